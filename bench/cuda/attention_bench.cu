// Checks and times attention of few columns outside ggml.
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=native -I <patched ggml>/src/ggml-cuda bench/cuda/attention_bench.cu -o attention_bench
//   ./attention_bench check             error of every variant against float64
//   ./attention_bench shapes [HEAD] [COLUMNS] [ROWS] [n]   time per layer of every variant, best first (only the n best are printed);
//                                       HEAD: head size 256 (24 query heads, 4 K/V heads) or 128 (32 and 8), 0: all of the list
//
// A layer is the kernel and the sum of its chunks. Timings rotate through more K and V than the L2 cache holds and replay a CUDA
// graph with programmatic dependent launches; shares are of the measured copy bandwidth, for K and V read once.

#include "fattn-narrow-kernel.cuh"
#include "timing.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

static int max_smem;

// ---- variants -----------------------------------------------------------------------------------------------------------

struct variant {
    int d, nr, ng, kt, q_regs, part_bytes, occ;
    void (*kernel)(fattn_narrow_args);
    void (*combine)(const char *, const float2 *, float *, int, int, int);
    std::string label() const {
        char s[96];
        snprintf(s, sizeof s, "r%d g%d k%d q%d %s o%d", nr, ng, kt, q_regs, part_bytes == 2 ? "f16" : "f32", occ);
        return s;
    }
};

template <int d, int nr, int ng, int kt, bool q_regs, typename part_t, int occ>
static variant make() {
    variant v { d, nr, ng, kt, q_regs, (int) sizeof(part_t), occ, fattn_narrow<d, nr, ng, kt, q_regs, part_t, occ>, fattn_narrow_combine<d, part_t> };
    CHECK(cudaFuncSetAttribute((const void *) v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_smem));
    return v;
}

static const std::vector<variant> & variants() {
    static const std::vector<variant> all = {
        make<256, 1, 2, 1, true,  float,  1>(), make<256, 1, 4, 1, true,  float,  1>(), make<256, 1, 8, 1, true,  float,  1>(),
        make<256, 2, 2, 1, true,  float,  1>(), make<256, 2, 4, 1, true,  float,  1>(), make<256, 3, 1, 1, true,  float,  1>(),
        make<256, 3, 2, 1, true,  float,  1>(), make<256, 3, 2, 1, true,  __half, 1>(), make<256, 3, 2, 2, true,  float,  1>(),
        make<256, 3, 3, 1, false, float,  1>(), make<256, 3, 4, 1, false, float,  1>(), make<256, 4, 2, 1, true,  float,  1>(),
        make<256, 4, 3, 1, false, float,  1>(), make<256, 5, 1, 1, true,  float,  1>(), make<256, 5, 2, 1, false, float,  1>(),
        make<256, 6, 1, 1, true,  float,  1>(), make<256, 6, 1, 2, true,  float,  1>(), make<256, 6, 2, 1, false, float,  1>(),
        make<256, 8, 1, 1, true,  float,  1>(), make<256, 8, 1, 2, true,  float,  1>(), make<256, 9, 1, 1, false, float,  1>(),
        make<256, 9, 1, 1, false, __half, 1>(), make<256, 12, 1, 1, false, float, 1>(),
        make<128, 1, 4, 1, true,  float,  1>(), make<128, 2, 2, 1, true,  float,  1>(), make<128, 2, 4, 1, true,  float,  1>(),
        make<128, 4, 1, 1, true,  float,  1>(), make<128, 4, 2, 1, true,  float,  1>(), make<128, 4, 2, 2, true,  float,  1>(),
        make<128, 4, 2, 1, false, float,  2>(), make<128, 4, 3, 1, false, float,  1>(), make<128, 8, 1, 1, true,  float,  1>(),
        make<128, 8, 1, 2, true,  float,  1>(),
    };
    return all;
}

// ---- launches -----------------------------------------------------------------------------------------------------------

struct shape { int gqa, heads_kv, cols, kv; bool mask; };

struct plan {
    fattn_narrow_args args;
    int smem = 0; // 0: does not fit
    int blocks, rows;
};

// as many chunks as run at once
static plan make_plan(const variant & v, const shape & s, int max_stages, int prefetch) {
    plan p;
    fattn_narrow_args & a = p.args;
    a = {};
    const int tile = 16*v.kt, units = (s.kv + tile - 1)/tile;
    p.rows = s.cols*s.gqa;
    a.mask_cols = s.mask ? std::min(s.cols, (16*v.nr + s.gqa - 2)/s.gqa + 1) : 0;
    a.n_groups  = (p.rows + 16*v.nr - 1)/(16*v.nr);
    const int q = fattn_narrow_q_bytes(v.d, v.nr), slot = fattn_narrow_slot_bytes(v.d, v.ng, v.kt, a.mask_cols), merge = fattn_narrow_merge_bytes(v.d, v.nr, v.ng);
    const int limit = v.occ == 1 ? max_smem : max_smem/v.occ - 1024;
    int stages = std::min((limit - q)/slot, max_stages);
    if (stages < 2 || merge > limit) return p;
    int n = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, (const void *) v.kernel, 32*v.nr*v.ng, std::max(q + stages*slot, merge)));
    if (n == 0) return p;
    a.n_chunks = std::max(std::min({ n*n_sm/(a.n_groups*s.heads_kv), units, FATTN_NARROW_MAX_CHUNKS }), 1);
    const int chunk = (units + a.n_chunks - 1)/a.n_chunks, steps = (chunk + v.ng - 1)/v.ng;
    a.n_stages = std::max(std::min(stages, steps + 1), 2);
    a.n_kv = s.kv; a.n_cols = s.cols; a.gqa = s.gqa; a.n_heads_kv = s.heads_kv; a.prefetch = prefetch;
    a.scale = 1.4426950408889634f/sqrtf((float) v.d);
    a.q_nb1 = 4ll*v.d*s.gqa*s.heads_kv; a.q_nb2 = 4ll*v.d;
    a.k_nb1 = a.v_nb1 = 2ll*v.d*s.heads_kv; a.k_nb2 = a.v_nb2 = 2ll*v.d;
    a.mask_nb1 = 2ll*s.kv;
    p.smem   = std::max(q + a.n_stages*slot, merge);
    p.blocks = a.n_groups*s.heads_kv*a.n_chunks;
    return p;
}

static void attention(cudaStream_t st, const variant & v, const plan & p, float * dst, bool combine = true) {
    launch(st, v.kernel, dim3(p.blocks), 32*v.nr*v.ng, p.smem, p.args);
    if (combine) {
        launch(st, v.combine, dim3(p.rows, p.args.n_heads_kv), v.d, 0, (const char *) p.args.part, (const float2 *) p.args.stat, dst, p.rows, p.args.n_chunks, p.args.gqa);
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

static __global__ void fill_f16(__half * p, const int64_t n, const uint64_t seed) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) p[i] = __float2half(random_value(seed + i*77));
}

// kind 0: a visible prefix and a random tree over the last cols rows; 1: also columns hidden but for one row or one piece
static std::vector<__half> make_mask(int kv, int cols, int kind) {
    std::vector<__half> m((size_t) kv*cols);
    for (int c = 0; c < cols; ++c) {
        const int one = (int) ((c*2654435761u >> 8) % (unsigned) kv);
        for (int i = 0; i < kv; ++i) {
            bool visible = i < kv - cols || i == kv - cols + c || (i < kv - cols + c && rand() % 3 == 0);
            if (kind && c % 3 == 1) visible = i == one;
            if (kind && c % 3 == 2) visible = i/16 == one/16;
            m[(size_t) c*kv + i] = __float2half(!visible ? -INFINITY : kind && c % 3 == 2 ? (rand() % 100)*0.01f : 0.0f);
        }
    }
    return m;
}

// one block per column and query head
static __global__ void reference(const fattn_narrow_args a, const int d, const double scale, double * w, double * ref) {
    const int col = blockIdx.x, h = blockIdx.y, n_heads = gridDim.y;
    const float * q = (const float *) (a.q + col*a.q_nb1 + h*a.q_nb2);
    double * p = w + ((int64_t) col*n_heads + h)*a.n_kv;
    __shared__ double red[256];
    double top = -INFINITY;
    for (int i = threadIdx.x; i < a.n_kv; i += blockDim.x) {
        const __half * k = (const __half *) (a.k + i*a.k_nb1 + h/a.gqa*a.k_nb2);
        double x = 0.0;
        for (int j = 0; j < d; ++j) x += (double) q[j]*(double) __half2float(k[j]);
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
        for (int i = 0; i < a.n_kv; ++i) o += p[i]*(double) __half2float(((const __half *) (a.v + i*a.v_nb1 + h/a.gqa*a.v_nb2))[j]);
        ref[((int64_t) col*n_heads + h)*d + j] = o/sum;
    }
}

// ---- modes --------------------------------------------------------------------------------------------------------------

static int check(cudaStream_t st) {
    const shape list[] = {
        { 6, 4,  1,  2304, true }, { 6, 4,  1, 113, false }, { 6, 4, 3, 256, true }, { 6, 4, 8, 1000, true }, { 6, 4, 24, 2304, true }, { 6, 4, 64, 2304, true },
        { 4, 8, 16,  2304, true }, { 1, 3, 33,  256, true }, { 8, 2, 16, 16, true }, { 6, 4, 24, 8192, true }, { 6, 1, 24, 113, false },
    };
    int bad = 0;
    char * part; float2 * stat; float * q, * dst; __half * k, * v_, * mask; double * w, * ref;
    CHECK(cudaMalloc(&part, 512ll << 20)); CHECK(cudaMalloc(&stat, 64 << 20)); CHECK(cudaMalloc(&q, 4 << 20)); CHECK(cudaMalloc(&dst, 4 << 20));
    CHECK(cudaMalloc(&k, 64 << 20)); CHECK(cudaMalloc(&v_, 64 << 20)); CHECK(cudaMalloc(&mask, 4 << 20)); CHECK(cudaMalloc(&w, 128 << 20)); CHECK(cudaMalloc(&ref, 8 << 20));
    fill_f32<<<1024, 256, 0, st>>>(q, 1 << 20, 1, 3.0f);
    fill_f16<<<1024, 256, 0, st>>>(k, 32 << 20, 2);
    fill_f16<<<1024, 256, 0, st>>>(v_, 32 << 20, 3);
    for (const variant & v : variants()) {
        double worst = 0.0;
        for (const shape & s : list) {
            const int heads = s.gqa*s.heads_kv;
            const size_t n_out = (size_t) v.d*heads*s.cols;
            std::vector<__half> m = make_mask(s.kv, s.cols, 1);
            CHECK(cudaMemcpy(mask, m.data(), m.size()*2, cudaMemcpyHostToDevice));
            CHECK(cudaDeviceSynchronize());
            for (int mode = 0; mode < 2; ++mode) { // all stages and prefetch; two stages
                plan p = make_plan(v, s, mode ? 2 : FATTN_NARROW_MAX_STAGES, mode ? 0 : 192);
                if (p.smem == 0) { if (!mode) printf("%d %-22s %2d columns: does not fit\n", v.d, v.label().c_str(), s.cols); continue; }
                fattn_narrow_args & a = p.args;
                a.q = (const char *) q; a.k = (const char *) k; a.v = (const char *) v_; a.mask = s.mask ? (const char *) mask : nullptr; a.part = part; a.stat = stat;
                reference<<<dim3(s.cols, heads), 256, 0, st>>>(a, v.d, 1.0/sqrt((double) v.d), w, ref);
                std::vector<float> y[2];
                for (auto & o : y) {
                    o.resize(n_out);
                    CHECK(cudaMemsetAsync(dst, 0xFF, n_out*4, st)); CHECK(cudaMemsetAsync(part, 0xFF, 512ll << 20, st)); CHECK(cudaMemsetAsync(stat, 0xFF, 64 << 20, st));
                    attention(st, v, p, dst);
                    CHECK(cudaMemcpyAsync(o.data(), dst, n_out*4, cudaMemcpyDeviceToHost, st));
                    CHECK(cudaStreamSynchronize(st));
                }
                std::vector<double> r(n_out);
                CHECK(cudaMemcpy(r.data(), ref, n_out*8, cudaMemcpyDeviceToHost));
                double e = 0.0, n = 0.0;
                for (size_t i = 0; i < n_out; ++i) { e += (y[0][i] - r[i])*(y[0][i] - r[i]); n += r[i]*r[i]; }
                const bool same = memcmp(y[0].data(), y[1].data(), n_out*4) == 0;
                if (!(e/n < 2e-6) || !same) {
                    ++bad;
                    printf("%d %-22s gqa %d heads %d columns %d rows %d stages %d: %.3e %s FAIL\n", v.d, v.label().c_str(), s.gqa, s.heads_kv, s.cols, s.kv, a.n_stages, e/n, same ? "" : "not reproducible");
                }
                worst = !(e/n <= worst) ? e/n : worst;
            }
        }
        printf("%d %-22s worst NMSE %.3e\n", v.d, v.label().c_str(), worst);
        fflush(stdout);
    }
    printf("%d failures\n", bad);
    return bad != 0;
}

static void shapes(cudaStream_t st, double peak, int d, int cols, int kv, int best) {
    const int64_t pool = 3ll << 30;
    char * cache, * part; float2 * stat; float * q, * dst; __half * mask;
    CHECK(cudaMalloc(&cache, pool)); CHECK(cudaMalloc(&part, 512ll << 20)); CHECK(cudaMalloc(&stat, 64 << 20)); CHECK(cudaMalloc(&q, 8 << 20)); CHECK(cudaMalloc(&dst, 8 << 20));
    CHECK(cudaMalloc(&mask, 64 << 20));
    fill_f16<<<4096, 256, 0, st>>>((__half *) cache, pool/2, 2);
    fill_f32<<<1024, 256, 0, st>>>(q, 2 << 20, 1, 3.0f);
    std::vector<__half> m = make_mask(kv, cols, 0);
    CHECK(cudaMemcpy(mask, m.data(), m.size()*2, cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
    const shape s = { d == 256 ? 6 : 4, d == 256 ? 4 : 8, cols, kv, true };
    const int64_t bytes = 4ll*kv*d*s.heads_kv; // K and V
    const int copies = (int) std::min<int64_t>(pool/bytes, kv <= 4096 ? 64 : 16);
    struct result { float us, alone; std::string text; };
    std::vector<result> all;
    for (const variant & v : variants()) {
        if (v.d != d) continue;
        for (int stages : { 8, 3, 2 }) for (int prefetch : { 0, 192 }) {
            const plan p0 = make_plan(v, s, stages, prefetch);
            if (p0.smem == 0 || (stages < 8 && make_plan(v, s, 8, 0).args.n_stages <= stages) || (stages < 8 && prefetch)) continue;
            auto run = [&](bool combine) {
                return time_graph(st, [&]() {
                    for (int c = 0; c < copies; ++c) {
                        plan p = p0;
                        p.args.q = (const char *) q; p.args.mask = (const char *) mask; p.args.part = part; p.args.stat = stat;
                        p.args.k = cache + c*bytes; p.args.v = cache + c*bytes + bytes/2;
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
    printf("d %d, %d columns, %d rows: %.1f MB of K and V, %.1f us at the copy bandwidth\n", d, cols, kv, bytes*1e-6, bytes/peak*1e-6);
    for (int i = 0; i < (int) all.size() && i < best; ++i) {
        printf("  %7.2f us (%2.0f%%)  without the sum %7.2f us  %s\n", all[i].us, 100*bytes/(all[i].us*1e6)/peak, all[i].alone, all[i].text.c_str());
    }
    fflush(stdout);
    CHECK(cudaFree(cache)); CHECK(cudaFree(part)); CHECK(cudaFree(stat)); CHECK(cudaFree(q)); CHECK(cudaFree(dst)); CHECK(cudaFree(mask));
}

int main(int argc, char ** argv) {
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, 0));
    n_sm = p.multiProcessorCount;
    max_smem = (int) p.sharedMemPerBlockOptin;
    cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    const std::string mode = argc > 1 ? argv[1] : "check";
    if (mode == "check") {
        return check(s);
    }
    const double peak = copy_bandwidth(s);
    printf("%s, %d multiprocessors, copy %.2f TB/s\n", p.name, n_sm, peak);
    const int d = argc > 2 ? atoi(argv[2]) : 0, best = argc > 5 ? atoi(argv[5]) : 6;
    if (d) {
        shapes(s, peak, d, argc > 3 ? atoi(argv[3]) : 24, argc > 4 ? atoi(argv[4]) : 2304, best);
        return 0;
    }
    for (int kv : { 2304, 8192, 32768 }) for (int cols : { 1, 4, 8, 16, 24, 32, 64 }) shapes(s, peak, 256, cols, kv, best);
    for (int kv : { 2304, 8192 }) for (int cols : { 1, 16 }) shapes(s, peak, 128, cols, kv, best);
    return 0;
}
