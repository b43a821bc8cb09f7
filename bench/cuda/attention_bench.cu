// Checks and times attention of few columns outside ggml.
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=native -I <patched ggml>/src/ggml-cuda bench/cuda/attention_bench.cu -o attention_bench
//                                       (-arch=sm_90a on Hopper: else its own kernels are empty, and fail the check)
//   ./attention_bench check             error of every variant against float64, for every type
//   ./attention_bench forest            columns of several sequences with K/V rows of their own: errors, then times
//   ./attention_bench few               both checks, of few shapes, for compute-sanitizer
//   ./attention_bench shapes [HEAD] [COLUMNS] [ROWS] [K TYPE] [V TYPE] [n]   time per layer of every variant, best first (only the n best
//                                       are printed); HEAD: head size 256 (24 query heads, 4 K/V heads) or 128 (32 and 8), 0: the list
//
// A layer is the kernel and the sum of its chunks. Timings rotate through more K and V than the L2 cache holds and replay a CUDA
// graph with programmatic dependent launches; shares are of the measured copy bandwidth, for K and V read once. To compile faster,
// compile this file PARTS times with -DPARTS=8 -DPART=0 to 7.

#include "fattn-narrow-hopper.cuh"
#include "timing.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#ifndef PARTS
#define PARTS 1
#define PART  0
#endif

// ---- variants -----------------------------------------------------------------------------------------------------------

struct variant {
    int d, nr, ng, kt, q_regs, unpack, occ;
    void (*kernel)(fattn_narrow_args);
    void (*hopper)(fattn_narrow_hopper_args); // with 16*nr rows of queries
    void (*combine)(const char *, const float2 *, const float *, float *, int, int, int, bool, fattn_narrow_forest);
    const void * fn() const { return hopper ? (const void *) hopper : (const void *) kernel; }
    std::string label() const {
        char s[96];
        if (hopper) {
            snprintf(s, sizeof s, "hopper n%d u%d", 16*nr, unpack);
            return s;
        }
        snprintf(s, sizeof s, "r%d g%d k%d q%d u%d o%d", nr, ng, kt, q_regs, unpack, occ);
        return s;
    }
};

static void add(std::vector<variant> & all, const variant & v) {
    int device = 0, max_smem = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    CHECK(cudaFuncSetAttribute(v.fn(), cudaFuncAttributeMaxDynamicSharedMemorySize, max_smem));
    all.push_back(v);
}

template <bool on, int d, int nr, int ng, int kt, bool q_regs, bool unpack, int occ>
static void add(std::vector<variant> & all) {
    if constexpr (on) {
        add(all, { d, nr, ng, kt, q_regs, unpack, occ, fattn_narrow<d, nr, ng, kt, q_regs, unpack, float, occ>, nullptr, fattn_narrow_combine<d, true, float> });
    }
}

template <bool on, int d, int n, bool unpack>
static void add_hopper(std::vector<variant> & all) {
    if constexpr (on) {
        add(all, { d, n/16, 1, 4, false, unpack, 1, nullptr, fattn_narrow_hopper<d, n, unpack>, fattn_narrow_combine<d, false, float> });
    }
}
#define NAME_(i) add_variants_##i
#define NAME(i)  NAME_(i)

void NAME(PART)(std::vector<variant> & all) {
#define V(...) add<__LINE__ % PARTS == PART, __VA_ARGS__>(all);
#define H(...) add_hopper<__LINE__ % PARTS == PART, __VA_ARGS__>(all);
#include "attention_variants.inc"
}

#if PART == 0

#if PARTS > 1
#define OTHERS X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define X(i) void NAME_(i)(std::vector<variant> & all);
OTHERS
#undef X
#else
#define OTHERS
#endif

static int max_smem;

static const std::vector<variant> & variants() {
    static std::vector<variant> all;
    if (all.empty()) {
        NAME(0)(all);
#define X(i) NAME_(i)(all);
        OTHERS
#undef X
        std::sort(all.begin(), all.end(), [](const variant & a, const variant & b) { return a.label() < b.label(); });
    }
    return all;
}

// ---- types --------------------------------------------------------------------------------------------------------------

static const char * const type_names[] = { "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0" };
static const int type_bytes[] = { 64, 64, 34, 24, 22, 20, 18 }; // of 32 values

static int type_of(const std::string & name) {
    for (int i = 0; i < 7; ++i) if (name == type_names[i]) return i;
    printf("unknown type %s\n", name.c_str());
    exit(1);
}

// value i of a row
static __device__ double value(const int type, const char * row, const int i) {
    const int bytes[] = { 64, 64, 34, 24, 22, 20, 18 };
    if (type == FATTN_NARROW_F16)  return __half2float(((const __half *) row)[i]);
    if (type == FATTN_NARROW_BF16) return __bfloat162float(((const __nv_bfloat16 *) row)[i]);
    const char * b = row + i/32*bytes[type];
    const int j = i % 32;
    const double d = __half2float(*(const __half *) b);
    if (type == FATTN_NARROW_Q8_0) return d*((const int8_t *) (b + 2))[j];
    const bool has_min = type == FATTN_NARROW_Q4_1 || type == FATTN_NARROW_Q5_1, q5 = type == FATTN_NARROW_Q5_0 || type == FATTN_NARROW_Q5_1;
    const double m = has_min ? __half2float(*(const __half *) (b + 2)) : 0.0;
    b += has_min ? 4 : 2;
    int high = 0;
    if (q5) {
        high = ((const uint8_t *) b)[j/8] >> j%8 & 1;
        b += 4;
    }
    const int q = (((const uint8_t *) b)[j%16] >> (j < 16 ? 0 : 4) & 15) | high << 4;
    return has_min ? d*q + m : d*(q - (q5 ? 16 : 8));
}

// ---- launches -----------------------------------------------------------------------------------------------------------

struct shape { int gqa, heads_kv, cols, kv; bool mask; int k_type, v_type; };

struct plan {
    fattn_narrow_args args;
    int smem = 0; // 0: does not fit
    int blocks, rows;
    int n_v, n_raw;
};

// as many chunks as run at once
static plan make_plan(const variant & v, const shape & s, int max_stages, int prefetch) {
    plan p;
    fattn_narrow_args & a = p.args;
    a = {};
    const int tile = 16*v.kt, units = (s.kv + tile - 1)/tile;
    a.k_type = s.k_type; a.v_type = s.v_type;
    a.k_row  = v.d/32*type_bytes[s.k_type]; a.v_row = v.d/32*type_bytes[s.v_type];
    if (!v.unpack && (s.k_type || s.v_type)) return p;
    const int k_pitch = v.unpack ? fattn_narrow_pitch(v.d, a.k_row) : a.k_row, v_pitch = v.unpack ? fattn_narrow_pitch(v.d, a.v_row) : a.v_row;
    p.rows = s.cols*s.gqa;
    a.mask_cols = s.mask ? std::min(s.cols, (16*v.nr + s.gqa - 2)/s.gqa + 1) : 0;
    a.n_groups  = (p.rows + 16*v.nr - 1)/(16*v.nr);
    const int q = fattn_narrow_q_bytes(v.d, v.nr), slot = fattn_narrow_slot_bytes(v.kt, k_pitch, v_pitch, a.mask_cols), merge = fattn_narrow_merge_bytes(v.d, v.nr, v.ng);
    if (v.hopper) {
        const int n = 16*v.nr;
        a.mask_cols = s.mask ? std::min(s.cols, (n + s.gqa - 2)/s.gqa + 1) : 0;
        const int options[][2] = { { 2, 3 }, { 2, 2 }, { 1, 2 }, { 2, 1 }, { 1, 1 }, { 2, 0 } };
        for (auto & o : options) {
            if ((o[1] > 0) != (bool) v.unpack || p.smem || (v.unpack && o[1] < fattn_narrow_hopper_tiles_k(n, true)) || (v.unpack && max_stages < 8 && o[0] == 2)) continue;
            p.n_v = o[0];
            p.n_raw = o[1];
            const int total = fattn_narrow_hopper_layout(v.d, n, p.n_v, p.n_raw, a.k_row, a.v_row, a.mask_cols).total;
            if (total <= max_smem) p.smem = total;
        }
        if (p.smem == 0) return p;
        a.n_chunks = std::max(std::min({ n_sm/(a.n_groups*s.heads_kv), (s.kv + 63)/64, FATTN_NARROW_MAX_CHUNKS }), 1);
        a.n_stages = 10*p.n_v + p.n_raw;
    }
    auto bytes = [&](int stages) { return q + v.ng*fattn_narrow_share_bytes(v.d, v.nr, v.ng, v.kt, v.unpack, slot, stages); };
    const int limit = v.occ == 1 ? max_smem : max_smem/v.occ - 1024;
    const int least = v.unpack && v.ng == 1 ? 3 : 2;
    int stages = max_stages;
    int n = 0;
    if (!v.hopper) {
        while (stages >= least && bytes(stages) > limit) --stages;
        if (stages < least || merge > limit) return p;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, (const void *) v.kernel, 32*v.nr*v.ng, std::max(bytes(stages), merge)));
        if (n == 0) return p;
        a.n_chunks = std::max(std::min({ n*n_sm/(a.n_groups*s.heads_kv), units, FATTN_NARROW_MAX_CHUNKS }), 1);
        const int chunk = (units + a.n_chunks - 1)/a.n_chunks, steps = (chunk + v.ng - 1)/v.ng;
        a.n_stages = std::max(std::min(stages, steps + 1), least);
        p.smem = std::max(bytes(a.n_stages), merge);
    }
    a.n_kv = s.kv; a.n_cols = s.cols; a.gqa = s.gqa; a.n_heads_kv = s.heads_kv; a.prefetch = prefetch;
    a.scale = 1.4426950408889634f/sqrtf((float) v.d);
    a.q_nb1 = 4ll*v.d*s.gqa*s.heads_kv; a.q_nb2 = 4ll*v.d;
    a.k_nb1 = (int64_t) a.k_row*s.heads_kv; a.k_nb2 = a.k_row;
    a.v_nb1 = (int64_t) a.v_row*s.heads_kv; a.v_nb2 = a.v_row;
    a.mask_nb1 = (s.kv + 7)/8*16;
    p.blocks = a.n_groups*s.heads_kv*a.n_chunks;
    return p;
}

static void attention(cudaStream_t st, const variant & v, const plan & p, float * dst, bool combine = true) {
    if (v.hopper) {
        fattn_narrow_hopper_args h;
        h.a = p.args;
        h.n_v = p.n_v;
        h.n_raw = p.n_raw;
        const fattn_narrow_args & a = p.args;
        if (!fattn_narrow_hopper_describe(h.k, h.k_x, h.k_z, a.k, v.unpack, a.k_row, a.n_kv, a.n_heads_kv, a.k_nb1, a.k_nb2) ||
            !fattn_narrow_hopper_describe(h.v, h.v_x, h.v_z, a.v, v.unpack, a.v_row, a.n_kv, a.n_heads_kv, a.v_nb1, a.v_nb2)) {
            printf("a tensor cannot be described\n");
            exit(1);
        }
        launch(st, v.hopper, dim3(p.blocks), FATTN_NARROW_HOPPER_THREADS, p.smem, h);
    } else {
        launch(st, v.kernel, dim3(p.blocks), 32*v.nr*v.ng, p.smem, p.args);
    }
    if (combine) {
        const fattn_narrow_forest f = { p.args.seqs, p.args.spans, p.args.n_seqs, p.args.n_kv, 16*v.nr, 16*v.kt };
        launch(st, v.combine, dim3(p.rows, p.args.n_heads_kv), v.d, 0, (const char *) p.args.part, (const float2 *) p.args.stat, (const float *) nullptr, dst, p.rows, p.args.n_chunks, p.args.gqa, false, f);
    }
}

// ---- data ---------------------------------------------------------------------------------------------------------------

static __device__ float random_value(uint64_t x) { // about normal, variance 1
    float s = 0.0f;
    for (int i = 0; i < 4; ++i) {
        x += 0x9E3779B97F4A7C15ull;
        uint64_t z = x;
        z = (z ^ (z >> 30))*0xBF58476D1CE4E5B9ull; z = (z ^ (z >> 27))*0x94D049BB133111EBull; z ^= z >> 31;
        s += (float) (z >> 40)*0x1p-24f - 0.5f;
    }
    return s*1.7320508f;
}

static __global__ void fill_f32(float * p, const int64_t n, const uint64_t seed, const float scale) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) p[i] = scale*random_value(seed + i*77);
}

// random quants with scales that give about the variance 1
static __global__ void fill_type(char * p, const int64_t n_blocks, const int type, const uint64_t seed) {
    const int   bytes[] = { 64, 64, 34, 24, 22, 20, 18 };
    const float d   [] = { 1.0f, 1.0f, 1.0f/74, 1.0f/9.2f, 1.0f/9.2f, 1.0f/4.6f, 1.0f/4.6f };
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n_blocks; i += (int64_t) gridDim.x*blockDim.x) {
        char * b = p + i*bytes[type];
        for (int j = 0; j < (type < 2 ? 32 : bytes[type]/2); ++j) {
            const float x = random_value(seed + (i*32 + j)*77);
            if (type == FATTN_NARROW_F16)  ((__half *) b)[j] = __float2half(x);
            else if (type == FATTN_NARROW_BF16) ((__nv_bfloat16 *) b)[j] = __float2bfloat16(x);
            else ((uint16_t *) b)[j] = (uint16_t) (int) (x*1e5f);
        }
        if (type >= 2) {
            const float s = d[type]*(1.0f + 0.2f*random_value(seed + i*77 + 13));
            ((__half *) b)[0] = __float2half(s);
            if (type == FATTN_NARROW_Q4_1 || type == FATTN_NARROW_Q5_1) ((__half *) b)[1] = __float2half(type == FATTN_NARROW_Q4_1 ? -7.5f*s : -15.5f*s);
        }
    }
}

// kind 0: a visible prefix and a random tree over the last cols rows; 1: also columns hidden but for one row or one piece
static std::vector<__half> make_mask(int kv, int cols, int kind) {
    const int pitch = (kv + 7)/8*8;
    std::vector<__half> m((size_t) pitch*cols);
    for (int c = 0; c < cols; ++c) {
        const int one = (int) ((c*2654435761u >> 8) % (unsigned) kv);
        for (int i = 0; i < kv; ++i) {
            bool visible = i < kv - cols || i == kv - cols + c || (i < kv - cols + c && rand() % 3 == 0);
            if (kind && c % 3 == 1) visible = i == one;
            if (kind && c % 3 == 2) visible = i/16 == one/16;
            m[(size_t) c*pitch + i] = __float2half(!visible ? -INFINITY : kind && c % 3 == 2 ? (rand() % 100)*0.01f : 0.0f);
        }
    }
    return m;
}

// one block per column and query head; float64
static __global__ void reference(const fattn_narrow_args a, const int d, const double scale, double * w, double * ref) {
    const int col = blockIdx.x, h = blockIdx.y, n_heads = gridDim.y;
    const float * q = (const float *) (a.q + col*a.q_nb1 + h*a.q_nb2);
    double * p = w + ((int64_t) col*n_heads + h)*a.n_kv;
    __shared__ double red[256];
    double top = -INFINITY;
    for (int i = threadIdx.x; i < a.n_kv; i += blockDim.x) {
        const char * k = a.k + i*a.k_nb1 + h/a.gqa*a.k_nb2;
        double x = 0.0;
        for (int j = 0; j < d; ++j) x += (double) q[j]*value(a.k_type, k, j);
        x *= scale;
        if (a.mask) x += (double) __half2float(((const __half *) (a.mask + col*a.mask_nb1))[i]);
        p[i] = x;
        top = x > top ? x : top;
    }
    red[threadIdx.x] = top;
    __syncthreads();
    for (int i = 0; i < (int) blockDim.x; ++i) top = red[i] > top ? red[i] : top;
    __syncthreads();
    double sum = 0.0;
    for (int i = threadIdx.x; i < a.n_kv; i += blockDim.x) { p[i] = exp(p[i] - top); sum += p[i]; }
    red[threadIdx.x] = sum;
    __syncthreads();
    sum = 0.0;
    for (int i = 0; i < (int) blockDim.x; ++i) sum += red[i];
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        double o = 0.0;
        for (int i = 0; i < a.n_kv; ++i) o += p[i]*value(a.v_type, a.v + i*a.v_nb1 + h/a.gqa*a.v_nb2, j);
        ref[((int64_t) col*n_heads + h)*d + j] = o/sum;
    }
}

// ---- modes --------------------------------------------------------------------------------------------------------------

static int check(cudaStream_t st, bool few) {
    std::vector<shape> list = {
        { 6, 4, 1, 2304, true, 2, 6 }, { 6, 4, 1, 113, false, 2, 6 }, { 6, 4, 3, 256, true, 2, 2 }, { 6, 4, 8, 1000, true, 6, 6 }, { 6, 4, 24, 2304, true, 2, 6 },
        { 6, 4, 64, 1024, true, 2, 6 }, { 4, 8, 16, 2304, true, 2, 6 }, { 1, 3, 33,  256, true, 2, 6 }, { 8, 2, 16, 16, true, 2, 6 }, { 6, 1, 24, 113, false, 6, 6 },
        { 6, 1, 24, 113, false, 0, 0 }, { 6, 4, 24, 2304, true, 0, 0 }, { 6, 4, 1, 2304, true, 0, 0 }, { 4, 3, 7, 500, true, 0, 0 },
    };
    for (int i = 0; i < 7; ++i) {
        list.push_back({ 6, 2, 5, 333, true, i, (i + 1) % 7 });
        list.push_back({ 6, 2, 5, 333, true, i, i });
    }
    if (few) list = { { 6, 2, 5, 333, true, 2, 6 }, { 4, 1, 9, 177, true, 4, 5 }, { 6, 1, 24, 113, false, 3, 1 }, { 6, 1, 3, 200, true, 0, 0 } };
    int bad = 0;
    char * part; float2 * stat; float * q, * dst; char * k, * v_; __half * mask; double * w, * ref;
    CHECK(cudaMalloc(&part, 512ll << 20)); CHECK(cudaMalloc(&stat, 64 << 20)); CHECK(cudaMalloc(&q, 4 << 20)); CHECK(cudaMalloc(&dst, 4 << 20));
    CHECK(cudaMalloc(&k, 16 << 20)); CHECK(cudaMalloc(&v_, 16 << 20)); CHECK(cudaMalloc(&mask, 4 << 20)); CHECK(cudaMalloc(&w, 128 << 20)); CHECK(cudaMalloc(&ref, 8 << 20));
    fill_f32<<<1024, 256, 0, st>>>(q, 1 << 20, 1, 3.0f);
    for (const int d : { 256, 128 }) for (const shape & s : list) {
        const int heads = s.gqa*s.heads_kv;
        const size_t n_out = (size_t) d*heads*s.cols;
        std::vector<__half> m = make_mask(s.kv, s.cols, 1);
        CHECK(cudaMemcpy(mask, m.data(), m.size()*2, cudaMemcpyHostToDevice));
        CHECK(cudaMemsetAsync(k, 0xFF, 16 << 20, st)); CHECK(cudaMemsetAsync(v_, 0xFF, 16 << 20, st));
        fill_type<<<1024, 256, 0, st>>>(k,  (int64_t) s.kv*s.heads_kv*d/32, s.k_type, 2);
        fill_type<<<1024, 256, 0, st>>>(v_, (int64_t) s.kv*s.heads_kv*d/32, s.v_type, 3);
        std::vector<double> r;
        double worst = 0.0;
        for (const variant & v : variants()) {
            if (v.d != d || (!v.unpack && (s.k_type || s.v_type)) || (v.unpack && !few && !s.k_type && !s.v_type && s.kv > 500)) continue;
            for (int mode = 0; mode < 2; ++mode) { // all stages and prefetch; few stages
                plan p = make_plan(v, s, mode ? v.unpack && v.ng == 1 ? 3 : 2 : FATTN_NARROW_MAX_STAGES, mode || d == 128 ? 0 : 192);
                if (p.smem == 0) { if (mode) printf("%d %-22s %2d columns %s %s: does not fit\n", v.d, v.label().c_str(), s.cols, type_names[s.k_type], type_names[s.v_type]); continue; }
                fattn_narrow_args & a = p.args;
                a.q = (const char *) q; a.k = k; a.v = v_; a.mask = s.mask ? (const char *) mask : nullptr; a.part = part; a.stat = stat;
                if (r.empty()) {
                    reference<<<dim3(s.cols, heads), 256, 0, st>>>(a, v.d, 1.0/sqrt((double) v.d), w, ref);
                    r.resize(n_out);
                    CHECK(cudaStreamSynchronize(st));
                    CHECK(cudaMemcpy(r.data(), ref, n_out*8, cudaMemcpyDeviceToHost));
                }
                std::vector<float> y[2];
                for (auto & o : y) {
                    o.resize(n_out);
                    CHECK(cudaMemsetAsync(dst, 0xFF, n_out*4, st)); CHECK(cudaMemsetAsync(part, 0xFF, 64ll << 20, st)); CHECK(cudaMemsetAsync(stat, 0xFF, 4 << 20, st));
                    attention(st, v, p, dst);
                    CHECK(cudaMemcpyAsync(o.data(), dst, n_out*4, cudaMemcpyDeviceToHost, st));
                    CHECK(cudaStreamSynchronize(st));
                }
                double e = 0.0, n = 0.0;
                for (size_t i = 0; i < n_out; ++i) { e += (y[0][i] - r[i])*(y[0][i] - r[i]); n += r[i]*r[i]; }
                const bool same = memcmp(y[0].data(), y[1].data(), n_out*4) == 0;
                if (!(e/n < 2e-6) || !same) {
                    ++bad;
                    printf("%d %-22s gqa %d heads %d columns %d rows %d %s %s stages %d: %.3e %s FAIL\n", v.d, v.label().c_str(), s.gqa, s.heads_kv, s.cols, s.kv,
                        type_names[s.k_type], type_names[s.v_type], a.n_stages, e/n, same ? "" : "not reproducible");
                }
                worst = !(e/n <= worst) ? e/n : worst;
            }
        }
        printf("%d gqa %d heads %d columns %2d rows %4d %4s %4s worst NMSE %.3e\n", d, s.gqa, s.heads_kv, s.cols, s.kv, type_names[s.k_type], type_names[s.v_type], worst);
        fflush(stdout);
    }
    printf("%d failures\n", bad);
    return bad != 0;
}

static void shapes(cudaStream_t st, double peak, int d, int cols, int kv, int k_type, int v_type, int best) {
    const int64_t pool = 3ll << 30;
    char * cache, * part; float2 * stat; float * q, * dst; __half * mask;
    CHECK(cudaMalloc(&cache, pool)); CHECK(cudaMalloc(&part, 512ll << 20)); CHECK(cudaMalloc(&stat, 64 << 20)); CHECK(cudaMalloc(&q, 8 << 20)); CHECK(cudaMalloc(&dst, 8 << 20));
    CHECK(cudaMalloc(&mask, 64 << 20));
    const int row = d/32*(type_bytes[k_type] + type_bytes[v_type]);
    fill_f32<<<1024, 256, 0, st>>>(q, 2 << 20, 1, 3.0f);
    std::vector<__half> m = make_mask(kv, cols, 0);
    CHECK(cudaMemcpy(mask, m.data(), m.size()*2, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    const shape s = { d == 256 ? 6 : 4, d == 256 ? 4 : 8, cols, kv, true, k_type, v_type };
    const int64_t bytes = (int64_t) kv*row*s.heads_kv; // K and V
    const int64_t k_bytes = (int64_t) kv*d/32*type_bytes[k_type]*s.heads_kv;
    const int copies = (int) std::min<int64_t>(pool/bytes, kv <= 4096 ? 64 : kv <= 40000 ? 16 : 4);
    for (int c = 0; c < copies; ++c) {
        fill_type<<<4096, 256, 0, st>>>(cache + c*bytes,           (int64_t) kv*s.heads_kv*d/32, k_type, 2);
        fill_type<<<4096, 256, 0, st>>>(cache + c*bytes + k_bytes, (int64_t) kv*s.heads_kv*d/32, v_type, 3);
    }
    struct result { float us, alone; std::string text; };
    std::vector<result> all;
    for (const variant & v : variants()) {
        if (v.d != d) continue;
        for (int stages : { 8, 3, 2 }) for (int prefetch : { 0, 192 }) {
            if ((prefetch && d == 128) || (kv > 8192 && (prefetch || stages < 8))) continue;
            const plan p0 = make_plan(v, s, stages, prefetch);
            if (v.unpack && !k_type && !v_type) continue;
            if (p0.smem == 0 || (stages < 8 && make_plan(v, s, 8, 0).args.n_stages <= stages) || (stages < 8 && prefetch)) continue;
            auto run = [&](bool combine) {
                return time_graph(st, [&]() {
                    for (int c = 0; c < copies; ++c) {
                        plan p = p0;
                        p.args.q = (const char *) q; p.args.mask = (const char *) mask; p.args.part = part; p.args.stat = stat;
                        p.args.k = cache + c*bytes; p.args.v = cache + c*bytes + k_bytes;
                        attention(st, v, p, dst, combine);
                    }
                })*1e3f/copies;
            };
            char text[160];
            snprintf(text, sizeof text, "%-22s stages %d prefetch %3d blocks %d chunks %d groups %d", v.label().c_str(), p0.args.n_stages, prefetch, p0.blocks, p0.args.n_chunks, p0.args.n_groups);
            all.push_back({ run(true), run(false), text });
        }
    }
    std::sort(all.begin(), all.end(), [](const result & a, const result & b) { return a.us < b.us; });
    printf("d %d, %d columns, %d rows, %s %s: %.1f MB of K and V, %.1f us at the copy bandwidth\n", d, cols, kv, type_names[k_type], type_names[v_type], bytes*1e-6, bytes/peak*1e-6);
    for (int i = 0; i < (int) all.size() && i < best; ++i) {
        printf("  %7.2f us (%2.0f%%)  without the sum %7.2f us  %s\n", all[i].us, 100*bytes/(all[i].us*1e6)/peak, all[i].alone, all[i].text.c_str());
    }
    fflush(stdout);
    CHECK(cudaFree(cache)); CHECK(cudaFree(part)); CHECK(cudaFree(stat)); CHECK(cudaFree(q)); CHECK(cudaFree(dst)); CHECK(cudaFree(mask));
}

// ---- several sequences --------------------------------------------------------------------------------------------------

struct texts { std::vector<int> widths, lengths; int spare, gap; };

struct laid_out {
    std::vector<int> seqs, spans;
    std::vector<__half> mask;
    int cols = 0, kv = 0;
    // rows of a sequence: its text, then its nodes; gap: rows between sequences
    laid_out(const texts & t) {
        for (size_t i = 0; i < t.widths.size(); ++i) {
            const int w = t.widths[i];
            seqs.insert(seqs.end(), { (int) i, w ? cols : -1, w });
            spans.insert(spans.end(), { kv, kv + t.lengths[i] + w });
            cols += w;
            kv   += (t.lengths[i] + w + 63)/64*64 + t.gap;
        }
        cols += t.spare;
        const int pitch = (kv + 7)/8*8;
        mask.assign((size_t) pitch*cols, __float2half(-INFINITY));
        for (size_t i = 0; i < t.widths.size(); ++i) for (int j = 0; j < t.widths[i]; ++j) {
            __half * m = &mask[(size_t) (seqs[3*i + 1] + j)*pitch + spans[2*i]];
            for (int r = 0; r < t.lengths[i] + t.widths[i]; ++r) m[r] = __float2half(r < t.lengths[i] || r == t.lengths[i] + j || (r < t.lengths[i] + j && rand()%3 == 0) ? 0.0f : -INFINITY);
        }
    }
};

static bool forest_plan(const variant & v, plan & p, int n_seqs) {
    fattn_narrow_args & a = p.args;
    int n = 1;
    if (!v.hopper) CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, (const void *) v.kernel, 32*v.nr*v.ng, p.smem));
    a.n_chunks = std::max(n*n_sm/a.n_heads_kv, p.rows/(16*v.nr) + n_seqs);
    a.n_groups = 1;
    a.prefetch = 0;
    a.n_seqs   = n_seqs;
    p.blocks   = a.n_chunks*a.n_heads_kv;
    return a.n_chunks <= FATTN_NARROW_MAX_CHUNKS;
}

static int forest(cudaStream_t st, bool few) {
    const int64_t pool = few ? 1ll << 29 : 4ll << 30;
    char * cache, * part; float2 * stat; float * q, * dst; __half * mask; int * seqs, * spans; double * w, * ref;
    CHECK(cudaMalloc(&cache, pool)); CHECK(cudaMalloc(&part, 512ll << 20)); CHECK(cudaMalloc(&stat, 64 << 20)); CHECK(cudaMalloc(&q, 8 << 20)); CHECK(cudaMalloc(&dst, 8 << 20));
    CHECK(cudaMalloc(&mask, 64 << 20)); CHECK(cudaMalloc(&seqs, 4096)); CHECK(cudaMalloc(&spans, 4096)); CHECK(cudaMalloc(&w, 512ll << 20)); CHECK(cudaMalloc(&ref, 16 << 20));
    fill_f32<<<1024, 256, 0, st>>>(q, 2 << 20, 1, 3.0f);
    int bad = 0;
    const int types[][2] = { { 0, 0 }, { 2, 6 }, { 2, 2 } };
    const std::vector<texts> small = { { { 1 }, { 40 }, 0, 0 }, { { 3, 0, 9, 1 }, { 300, 50, 0, 900 }, 2, 100 }, { { 8, 8, 8, 8, 8, 8, 8, 8 }, { 100, 200, 300, 64, 1, 0, 70, 500 }, 0, 0 },
        { { 1, 1, 1, 1, 1, 1, 1, 1 }, { 500, 1, 1, 1, 1, 700, 1, 1 }, 0, 64 }, { { 40, 20, 1 }, { 10, 1500, 300 }, 3, 0 } };
    for (const int d : { 256, 128 }) for (const texts & t : small) for (auto & ty : types) {
        const laid_out l(t);
        if (few && (l.cols > 16 || ty[1] == 2)) continue;
        const shape s = { d == 256 ? 6 : 4, d == 256 ? 4 : 2, l.cols, l.kv, true, ty[0], ty[1] };
        const int heads = s.gqa*s.heads_kv;
        char * v_ = cache + (1 << 28);
        fill_type<<<1024, 256, 0, st>>>(cache, (int64_t) s.kv*s.heads_kv*d/32, s.k_type, 2);
        fill_type<<<1024, 256, 0, st>>>(v_,    (int64_t) s.kv*s.heads_kv*d/32, s.v_type, 3);
        CHECK(cudaMemcpy(mask, l.mask.data(), l.mask.size()*2, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(seqs, l.seqs.data(), l.seqs.size()*4, cudaMemcpyHostToDevice)); CHECK(cudaMemcpy(spans, l.spans.data(), l.spans.size()*4, cudaMemcpyHostToDevice));
        const size_t n_out = (size_t) d*heads*l.cols;
        std::vector<double> r;
        double worst = 0.0;
        for (const variant & v : variants()) {
            if (v.d != d || (!v.unpack && (s.k_type || s.v_type)) || (v.unpack && !s.k_type && !s.v_type)) continue;
            plan p = make_plan(v, s, FATTN_NARROW_MAX_STAGES, 0);
            if (p.smem == 0 || !forest_plan(v, p, t.widths.size())) { printf("%d %s does not fit\n", d, v.label().c_str()); continue; }
            fattn_narrow_args & a = p.args;
            a.q = (const char *) q; a.k = cache; a.v = v_; a.mask = (const char *) mask; a.part = part; a.stat = stat; a.seqs = seqs; a.spans = spans;
            if (r.empty()) {
                reference<<<dim3(s.cols, heads), 256, 0, st>>>(a, v.d, 1.0/sqrt((double) v.d), w, ref);
                r.resize(n_out);
                CHECK(cudaStreamSynchronize(st));
                CHECK(cudaMemcpy(r.data(), ref, n_out*8, cudaMemcpyDeviceToHost));
                for (int c = l.cols - t.spare; c < l.cols; ++c) for (int i = 0; i < d*heads; ++i) r[(size_t) c*d*heads + i] = 0.0;
            }
            std::vector<float> y(n_out);
            CHECK(cudaMemsetAsync(dst, 0xFF, n_out*4, st)); CHECK(cudaMemsetAsync(part, 0xFF, 64ll << 20, st)); CHECK(cudaMemsetAsync(stat, 0xFF, 4 << 20, st));
            attention(st, v, p, dst);
            CHECK(cudaMemcpyAsync(y.data(), dst, n_out*4, cudaMemcpyDeviceToHost, st));
            CHECK(cudaStreamSynchronize(st));
            double e = 0.0, n = 0.0;
            for (size_t i = 0; i < n_out; ++i) { e += (y[i] - r[i])*(y[i] - r[i]); n += r[i]*r[i]; }
            if (!(e/n < 2e-6)) { ++bad; printf("%d %-22s %d texts %d columns %s %s: %.3e FAIL\n", d, v.label().c_str(), (int) t.widths.size(), l.cols, type_names[s.k_type], type_names[s.v_type], e/n); }
            worst = !(e/n <= worst) ? e/n : worst;
        }
        printf("%d %d texts %d columns %d rows %s %s worst NMSE %.3e\n", d, (int) t.widths.size(), l.cols, l.kv, type_names[s.k_type], type_names[s.v_type], worst);
    }
    printf("%d failures\n", bad);
    if (few) return bad != 0;

    struct timed { const char * name; texts t; };
    const std::vector<int> eight(8, 8), ones(8, 1), two(8, 2048);
    const std::vector<timed> list = { { "1 x 64, 2K", { { 64 }, { 2048 }, 0, 0 } }, { "8 x 8, 2K each", { eight, two, 0, 0 } }, { "8 x 1, 2K each", { ones, two, 0, 0 } },
        { "24 18 10 6 3 1 1 1, 2K each", { { 24, 18, 10, 6, 3, 1, 1, 1 }, two, 0, 0 } }, { "8 x 8, 32K and 7 x 1K", { eight, { 32768, 1024, 1024, 1024, 1024, 1024, 1024, 1024 }, 0, 0 } },
        { "8 x 8, 16K each", { eight, std::vector<int>(8, 16384), 0, 0 } } };
    for (const timed & t : list) for (auto & ty : types) {
        if (ty[1] == 2) continue;
        const laid_out l(t.t);
        const shape s = { 6, 4, l.cols, l.kv, true, ty[0], ty[1] };
        const int64_t k_bytes = (int64_t) l.kv*256/32*type_bytes[ty[0]]*4, bytes = k_bytes + (int64_t) l.kv*256/32*type_bytes[ty[1]]*4;
        const int copies = (int) std::min<int64_t>(pool/bytes, 16);
        for (int c = 0; c < copies; ++c) {
            fill_type<<<4096, 256, 0, st>>>(cache + c*bytes,           (int64_t) l.kv*4*8, ty[0], 2);
            fill_type<<<4096, 256, 0, st>>>(cache + c*bytes + k_bytes, (int64_t) l.kv*4*8, ty[1], 3);
        }
        CHECK(cudaMemcpy(mask, l.mask.data(), l.mask.size()*2, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(seqs, l.seqs.data(), l.seqs.size()*4, cudaMemcpyHostToDevice)); CHECK(cudaMemcpy(spans, l.spans.data(), l.spans.size()*4, cudaMemcpyHostToDevice));
        struct result { float us; std::string text; };
        std::vector<result> all[2];
        for (const variant & v : variants()) for (int with = 0; with < 2; ++with) {
            if (v.d != 256 || (!v.unpack && (ty[0] || ty[1])) || (v.unpack && !ty[0] && !ty[1])) continue;
            plan p0 = make_plan(v, s, 8, 0);
            if (p0.smem == 0 || (with && !forest_plan(v, p0, t.t.widths.size()))) continue;
            const float us = time_graph(st, [&]() {
                for (int c = 0; c < copies; ++c) {
                    plan p = p0;
                    p.args.q = (const char *) q; p.args.mask = (const char *) mask; p.args.part = part; p.args.stat = stat;
                    p.args.k = cache + c*bytes; p.args.v = cache + c*bytes + k_bytes;
                    p.args.seqs = with ? seqs : nullptr; p.args.spans = with ? spans : nullptr;
                    attention(st, v, p, dst);
                }
            }, 3)*1e3f/copies;
            all[with].push_back({ us, v.label() });
        }
        for (int with = 0; with < 2; ++with) {
            std::sort(all[with].begin(), all[with].end(), [](const result & a, const result & b) { return a.us < b.us; });
            printf("%-28s %5.1f MB %s %s %s", t.name, bytes*1e-6, type_names[ty[0]], type_names[ty[1]], with ? "sequences:" : "all rows: ");
            for (int i = 0; i < 4 && i < (int) all[with].size(); ++i) printf("  %7.2f us %s", all[with][i].us, all[with][i].text.c_str());
            printf("\n");
        }
        fflush(stdout);
    }
    return bad != 0;
}

int main(int argc, char ** argv) {
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, 0));
    n_sm = p.multiProcessorCount;
    max_smem = (int) p.sharedMemPerBlockOptin;
    cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    const std::string mode = argc > 1 ? argv[1] : "check";
    if (mode == "check") {
        return check(s, false);
    }
    if (mode == "few") {
        return check(s, true) | forest(s, true);
    }
    if (mode == "forest") {
        return forest(s, false);
    }
    const double peak = copy_bandwidth(s);
    printf("%s, %d multiprocessors, copy %.2f TB/s\n", p.name, n_sm, peak);
    const int d = argc > 2 ? atoi(argv[2]) : 0, best = argc > 7 ? atoi(argv[7]) : 6;
    if (d) {
        shapes(s, peak, d, argc > 3 ? atoi(argv[3]) : 24, argc > 4 ? atoi(argv[4]) : 2304, type_of(argc > 5 ? argv[5] : "f16"), type_of(argc > 6 ? argv[6] : "f16"), best);
        return 0;
    }
    const int pairs[][2] = { { FATTN_NARROW_Q8_0, FATTN_NARROW_Q4_0 }, { FATTN_NARROW_F16, FATTN_NARROW_F16 }, { FATTN_NARROW_Q8_0, FATTN_NARROW_Q8_0 }, { FATTN_NARROW_Q4_0, FATTN_NARROW_Q4_0 } };
    for (int kv : { 2304, 32768, 131072 }) for (auto & t : pairs) for (int cols : { 1, 4, 8, 16, 24, 64 }) shapes(s, peak, 256, cols, kv, t[0], t[1], best);
    for (int kv : { 2304, 32768 }) for (auto & t : pairs) for (int cols : { 1, 16 }) shapes(s, peak, 128, cols, kv, t[0], t[1], best);
    return 0;
}
#endif // PART == 0
