// Checks and times the narrow matrix products outside ggml.
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=native -I <patched ggml>/src -I <patched ggml>/src/ggml-cuda bench/cuda/matmul_bench.cu -o matmul_bench
//   ./matmul_bench check [small] [type]   error of every type and width against float64 products of the dequantised weights
//   ./matmul_bench shapes [type] [dependent launch 0|1]   time and bandwidth per shape of the 27B model, every variant of matmul_variants.inc
//   ./matmul_bench profile TYPE     one launch per variant, for a profiler; types are numbers from 0, in the order of type_name below
//   ./matmul_bench tune             the same with every variant, the fastest kept
//   ./matmul_bench model            all matrix products of one 27B pass, in layer order, as one CUDA graph
//
// On Hopper -gencode=arch=compute_90a,code=sm_90a in place of -arch=native adds the kernels of mmn-hopper.cuh (h in their labels).
// Timings rotate through buffers larger than the L2 cache and replay a CUDA graph; shares are of the measured copy bandwidth.

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"
#include "mmn-convert.cuh"
#include "mmn-hopper.cuh"
#include "mmn-product.cuh"
#include "mmn-unpack-more.cuh"
#include "matmul_reference.cuh"
#include "timing.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

static const char * const type_name[] = { "q4_0", "q8_0", "q4_K", "q5_K", "q6_K", "f16", "bf16", "iq4_xs",
                                         "q4_1", "iq4_nl", "nvfp4", "mxfp4", "q2_K", "q3_K", "iq3_xxs" };
static const int          step_bytes[] = { 144, 272, 144, 176, 210, 512, 512, 136, 160, 144, 144, 136, 84, 110, 98 };

// ---- launches -----------------------------------------------------------------------------------------------------------

struct variant {
    int type, mt, nt, nw, ks, ns, occ, bps;
    void (*kernel)(mmn_args);
    int smem;
    int grid = 0; // blocks that fit on the device at once
    bool core = false; // of mmn-hopper.cuh: activations in the order of core matrices
    int rows() const { return 16*mt*nw; }
    std::string label() const {
        char s[96];
        snprintf(s, sizeof s, "%sm%d n%d w%d k%d s%d o%d b%d", core ? "h " : "", mt, nt, nw, ks, ns, occ, bps);
        return s;
    }
};

static variant & fit(variant & v) {
    if (cudaFuncSetAttribute((const void *) v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.smem) != cudaSuccess) {
        cudaGetLastError();
        return v;
    }
    int n = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, (const void *) v.kernel, v.nw*32, v.smem));
    v.grid = std::min(n, v.bps)*n_sm;
    return v;
}

template <mmn_type type, int mt, int nt, int nw, int ks, int ns, int occ>
static variant make_variant(int bps) {
    variant v { type, mt, nt, nw, ks, ns, occ, bps, mmn_product<type, mt, nt, nw, ks, ns, occ, false>, ns*mmn_stage_bytes<type, mt, nt, nw, ks, false> };
    return fit(v);
}

static __global__ void compiled_for_hopper(bool * yes) {
#ifdef MMN_WGMMA_AVAILABLE
    *yes = true;
#else
    *yes = false;
#endif
}

static bool for_hopper() {
    bool * yes;
    CHECK(cudaMallocManaged(&yes, 1));
    compiled_for_hopper<<<1, 1>>>(yes);
    CHECK(cudaDeviceSynchronize());
    return *yes;
}

template <mmn_type type, int nt, int nw, int ns, int registers>
static variant make_hopper_variant(int bps) {
    static const bool available = for_hopper();
    variant v { type, 1, nt, nw, 1, ns, bps, bps, mmnh_product<type, nt, nw, ns, registers>, mmnh_smem_bytes<type, nt, nw, ns> };
    v.core = true;
    return available ? fit(v) : v;
}

struct workspace {
    char * x; float * part; int * done;
};

static workspace make_workspace() {
    workspace w;
    CHECK(cudaMalloc(&w.x, 64ll << 20));
    CHECK(cudaMalloc(&w.part, 256ll << 20));
    CHECK(cudaMalloc(&w.done, 1 << 20));
    return w;
}

static void convert(cudaStream_t s, const workspace & ws, const float * x, int k, int cols, int nt, bool core = false) {
    const int n_done = 4096;
    const int64_t stride = k;
    launch(s, core ? mmn_convert<MMN_INPUT_PLAIN, true> : mmn_convert<MMN_INPUT_PLAIN, false>, dim3(nt*8, (k/256 + 7)/8), 256, 0, x, stride, (const float *) nullptr, (int64_t) 0, k, k/256, cols, nt, ws.x, ws.done, n_done);
}

struct matrix { const char * w; float * dst; int rows; };

static mmn_args arguments(const workspace & ws, const variant & v, const std::vector<matrix> & mats, int k, int cols) {
    mmn_args a = {};
    int tiles = 0;
    for (const matrix & m : mats) {
        a.mat[a.n_mat++] = { m.w, m.dst, m.rows, m.rows, tiles };
        tiles += (m.rows + v.rows() - 1)/v.rows();
    }
    a.n_tiles  = tiles;
    a.n_steps  = k/256;
    a.cols     = cols;
    a.stride_w = (int64_t) (k/256)*step_bytes[v.type];
    a.x = ws.x; a.part = ws.part; a.done = ws.done;
    a.early = true;
    return a;
}

static int grid_size(const variant & v, const mmn_args & a) {
    return std::min(v.grid, a.n_tiles*a.n_steps/v.ks);
}

static void product(cudaStream_t s, const variant & v, const mmn_args & a) {
    launch(s, v.kernel, grid_size(v, a), v.nw*32, v.smem, a);
}

static void product(cudaStream_t s, const workspace & ws, const variant & v, const std::vector<matrix> & mats, int k, int cols) {
    product(s, v, arguments(ws, v, mats, k, cols));
}

#include "matmul_variants.inc"

// the variant used for a type and width: the first listed with enough columns
static const variant & pick(int type, int cols) {
    for (const variant & v : variants()) {
        if (v.type == type && v.grid > 0 && v.nt*8 >= cols) return v;
    }
    fprintf(stderr, "no variant for type %s, %d columns\n", type_name[type], cols);
    exit(1);
}

// ---- modes --------------------------------------------------------------------------------------------------------------

static int check(cudaStream_t s, const bool small, const int only_type) {
    const workspace ws = make_workspace();
    CHECK(cudaMemset(ws.done, 0, 1 << 20));
    const int shapes[][2] = { { 256, 1 }, { 512, 200 }, { 5120, 48 }, { 5120, 1030 }, { 2048, 777 }, { 17408, 640 }, { 25600, 130 } };
    int bad = 0;
    printf("%-6s %-18s %6s %6s %5s %12s %12s\n", "type", "variant", "k", "rows", "cols", "NMSE", "q8_1 NMSE");
    for (const variant & v : variants()) {
        if (only_type >= 0 && v.type != only_type) continue;
        if (v.grid == 0) { printf("%-6s %-18s does not fit\n", type_name[v.type], v.label().c_str()); continue; }
        double worst = 0.0, worst_q8 = 0.0;
        for (const auto & sh : shapes) {
            const int k = sh[0], rows = sh[1];
            if (k % (256*v.ks) != 0 || (small && (int64_t) k*rows > 256*1024)) continue;
            const int64_t blocks = (int64_t) rows*(k/256);
            uint8_t * w; float * x, * dst; double * ref, * ref8;
            CHECK(cudaMalloc(&w, blocks*step_bytes[v.type] + 128));
            CHECK(cudaMalloc(&x, 4ll*k*64)); CHECK(cudaMalloc(&dst, 4ll*rows*64)); 
            CHECK(cudaMalloc(&ref, 8ll*rows*64)); CHECK(cudaMalloc(&ref8, 8ll*rows*64));
            fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(v.type, w, blocks, step_bytes[v.type], 99 + k + rows, true);
            fill_x<<<(k*64 + 255)/256, 256, 0, s>>>(x, k*64ll, 5 + k);
            const int64_t stride = (int64_t) (k/256)*step_bytes[v.type];
            reference<<<dim3(rows, v.nt*8), 32, 0, s>>>(v.type, w, stride, x, k, rows, ref, false);
            reference<<<dim3(rows, v.nt*8), 32, 0, s>>>(v.type, w, stride, x, k, rows, ref8, true);
            for (int cols : { v.nt*8, v.nt*8 - 3, v.nt*8 - 7 }) {
                std::vector<float> y(rows*64), again(rows*64);
                for (int rep = 0; rep < 2; ++rep) {
                    CHECK(cudaMemsetAsync(dst, 0xFF, 4ll*rows*64, s));
                    convert(s, ws, x, k, cols, v.nt, v.core);
                    product(s, ws, v, { { (const char *) w, dst, rows } }, k, cols);
                    CHECK(cudaMemcpyAsync((rep ? again : y).data(), dst, 4ll*rows*64, cudaMemcpyDeviceToHost, s));
                    CHECK(cudaStreamSynchronize(s));
                }
                std::vector<double> r(rows*64), r8(rows*64);
                CHECK(cudaMemcpy(r.data(), ref, 8ll*rows*v.nt*8, cudaMemcpyDeviceToHost));
                CHECK(cudaMemcpy(r8.data(), ref8, 8ll*rows*v.nt*8, cudaMemcpyDeviceToHost));
                double e = 0.0, e8 = 0.0, n = 0.0;
                for (int i = 0; i < rows*cols; ++i) {
                    e += (y[i] - r[i])*(y[i] - r[i]); e8 += (r8[i] - r[i])*(r8[i] - r[i]); n += r[i]*r[i];
                }
                const bool same = memcmp(y.data(), again.data(), 4ll*rows*64) == 0;
                const bool ok = (e/n < 1e-6 || e < 1e-2*e8) && same; // the one value of a small case may be almost zero
                if (!ok) {
                    ++bad;
                    printf("%-6s %-18s %6d %6d %5d %12.3e %12.3e %s FAIL\n", type_name[v.type], v.label().c_str(), k, rows, cols, e/n, e8/n,
                           same ? "" : "not reproducible");
                }
                worst = std::max(worst, e/n); worst_q8 = std::max(worst_q8, e8/n);
            }
            CHECK(cudaFree(w)); CHECK(cudaFree(x)); CHECK(cudaFree(dst)); CHECK(cudaFree(ref)); CHECK(cudaFree(ref8));
        }
        printf("%-6s %-18s grid %4d  worst %12.3e   8-bit activations %12.3e\n", type_name[v.type], v.label().c_str(), v.grid, worst, worst_q8);
        fflush(stdout);
    }
    printf("%d failures\n", bad);
    return bad != 0;
}

static void shapes(cudaStream_t s, double peak, int only_type) {
    const workspace ws = make_workspace();
    CHECK(cudaMemset(ws.done, 0, 1 << 20));
    struct { const char * name; int k, rows; } list[] = {
        { "attn_q",      5120, 12288 }, { "attn_qkv",   5120, 10240 }, { "attn_out", 6144, 5120 },
        { "gate+up",     5120, 34816 }, { "ffn_down",  17408,  5120 }, { "attn_k",   5120, 1024 }, { "output", 5120, 248320 },
    };
    {
        float * xx; CHECK(cudaMalloc(&xx, 4ll*32768*64));
        for (int nt : { 1, 3, 8 }) for (int k : { 5120, 17408 }) {
            const float ms = time_graph(s, [&]() { for (int i = 0; i < 100; ++i) convert(s, ws, xx, k, nt*8, nt); });
            printf("convert k %d cols %d: %.2f us\n", k, nt*8, ms*10);
        }
        CHECK(cudaFree(xx));
    }
    const int64_t pool = 2ll << 30;
    uint8_t * w; float * x, * dst;
    CHECK(cudaMalloc(&w, pool + 256)); CHECK(cudaMalloc(&x, 4ll*32768*64)); CHECK(cudaMalloc(&dst, 4ll*248320*64));
    fill_x<<<(32768*64 + 255)/256, 256, 0, s>>>(x, 32768*64ll, 5);
    int filled = -1;
    for (const variant & v : variants()) {
        if (v.grid == 0 || (only_type >= 0 && v.type != only_type)) continue;
        if (filled != v.type) {
            fill_weights<<<(pool/step_bytes[v.type] + 127)/128, 128, 0, s>>>(v.type, w, pool/step_bytes[v.type], step_bytes[v.type], 7, false);
            filled = v.type;
        }
        printf("%-5s %-16s x%d:", type_name[v.type], v.label().c_str(), v.grid/n_sm);
        for (const auto & sh : list) {
            const int64_t bytes = (int64_t) sh.rows*(sh.k/256)*step_bytes[v.type];
            const int64_t pitch = (bytes + 127)/128*128;
            const int copies = (int) std::min<int64_t>(pool/pitch, 32);
            if (copies < 1) continue;
            const float ms = time_graph(s, [&]() {
                convert(s, ws, x, sh.k, v.nt*8, v.nt, v.core);
                for (int c = 0; c < copies; ++c) product(s, ws, v, { { (const char *) w + c*pitch, dst, sh.rows } }, sh.k, v.nt*8);
            });
            const double bw = bytes*(double) copies/ms*1e-9;
            printf("  %s %.1f us %.2f (%.0f%%)", sh.name, ms*1e3/copies, bw, 100*bw/peak);
        }
        printf("\n");
        fflush(stdout);
    }
    CHECK(cudaFree(w)); CHECK(cudaFree(x)); CHECK(cudaFree(dst)); CHECK(cudaFree(ws.part)); CHECK(cudaFree(ws.x));
}

// one launch per variant, for a profiler
static void profile(cudaStream_t s, int type) {
    const workspace ws = make_workspace();
    const int k = 5120, rows = 34816;
    const int64_t blocks = (int64_t) rows*(k/256);
    uint8_t * w; float * x, * dst;
    CHECK(cudaMalloc(&w, blocks*512)); CHECK(cudaMalloc(&x, 4ll*k*64)); CHECK(cudaMalloc(&dst, 4ll*rows*64));
    fill_x<<<(k*64 + 255)/256, 256, 0, s>>>(x, k*64ll, 5);
    fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, w, blocks, step_bytes[type], 7, false);
    for (const variant & v : variants()) {
        if (v.type != type || v.grid == 0) continue;
        convert(s, ws, x, k, v.nt*8, v.nt, v.core);
        product(s, ws, v, { { (const char *) w, dst, rows } }, k, v.nt*8);
        CHECK(cudaStreamSynchronize(s));
    }
}

// every matrix product of one pass of the 27B model in the stock Q4_K_M mix
static void model(cudaStream_t s, double peak, const bool tune) {
    const workspace ws = make_workspace();
    CHECK(cudaMemset(ws.done, 0, 1 << 20));
    struct group { int k; std::vector<std::pair<int, matrix>> mats; };
    std::vector<group> groups;
    int64_t total = 0;
    float * dst; CHECK(cudaMalloc(&dst, 4ll*248320*64));
    auto add = [&](group & g, int type, int rows) {
        const int64_t blocks = (int64_t) rows*(g.k/256);
        uint8_t * w; CHECK(cudaMalloc(&w, blocks*step_bytes[type] + 256));
        fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, w, blocks, step_bytes[type], 7 + total, false);
        total += blocks*step_bytes[type];
        g.mats.push_back({ type, { (const char *) w, dst, rows } });
    };
    for (int l = 0; l < 64; ++l) {
        const bool rich = l < 8 || l >= 56 || (l - 10) % 3 == 0;
        const int big = rich ? MMN_Q6_K : MMN_Q4_K;
        group in { 5120 };
        if (l % 4 == 3) {
            add(in, MMN_Q4_K, 12288); add(in, MMN_Q4_K, 1024); add(in, big, 1024);
        } else {
            add(in, big, 10240); add(in, MMN_Q4_K, 6144); add(in, MMN_Q4_K, 48); add(in, MMN_Q4_K, 48);
        }
        groups.push_back(in);
        group out { 6144 };
        add(out, MMN_Q4_K, 5120);
        groups.push_back(out);
        group up { 5120 };
        add(up, MMN_Q4_K, 17408); add(up, MMN_Q4_K, 17408);
        groups.push_back(up);
        group down { 17408 };
        add(down, big, 5120);
        groups.push_back(down);
    }
    group head { 5120 };
    add(head, MMN_Q6_K, 248320);
    groups.push_back(head);
    float * x; CHECK(cudaMalloc(&x, 4ll*32768*64));
    fill_x<<<(32768*64 + 255)/256, 256, 0, s>>>(x, 32768*64ll, 5);
    CHECK(cudaDeviceSynchronize());
    printf("model: %.2f GB of weights, %.2f ms at the copy bandwidth\n", total*1e-9, total*1e-9/peak);
    std::map<int, const variant *> chosen; // by type
    int launches = 0;
    auto run = [&](const int cols) {
        return time_graph(s, [&]() {
            launches = 0;
            for (const group & g : groups) {
                std::map<int, std::vector<matrix>> by_type;
                for (const auto & m : g.mats) by_type[m.first].push_back(m.second);
                const variant & v = *chosen[g.mats[0].first];
                convert(s, ws, x, g.k, cols, v.nt, v.core);
                ++launches;
                for (const auto & it : by_type) {
                    product(s, ws, *chosen[it.first], it.second, g.k, cols);
                    ++launches;
                }
            }
        });
    };
    for (int cols : { 1, 8, 16, 24, 32, 48, 64 }) {
        for (int type : { MMN_Q4_K, MMN_Q6_K }) chosen[type] = &pick(type, cols);
        if (tune && cols > 1) {
            // each variant of a type, then the fastest of it while the other type's are tried
            for (int type : { MMN_Q4_K, MMN_Q6_K }) {
                const variant * best = chosen[type];
                float best_ms = 1e9f;
                for (const variant & v : variants()) {
                    if (v.type != type || v.grid == 0 || v.nt != chosen[type]->nt || v.core != chosen[type]->core) continue;
                    chosen[type] = &v;
                    const float ms = run(cols);
                    printf("   %2d columns, %s %s x%d: %.2f ms\n", cols, type_name[type], v.label().c_str(), v.grid/n_sm, ms);
                    if (ms < best_ms) { best_ms = ms; best = &v; }
                }
                chosen[type] = best;
            }
        }
        const float ms = run(cols);
        printf("%2d columns: %6.2f ms  %.2f TB/s (%.0f%% of copy)  %d launches\n", cols, ms, total/ms*1e-9, 100*total/ms*1e-9/peak, launches);
        fflush(stdout);
    }
}

int main(int argc, char ** argv) {
    cudaDeviceProp p;
    cudaStream_t s = open_device(p);
    const std::string mode = argc > 1 ? argv[1] : "check";
    if (mode == "check") {
        const bool small = argc > 2 && std::string(argv[2]) == "small";
        return check(s, small, argc > 2 + small ? atoi(argv[2 + small]) : -1);
    }
    if (mode == "profile" && argc > 2) {
        profile(s, atoi(argv[2]));
        return 0;
    }
    const double peak = copy_bandwidth(s);
    printf("%s, %d multiprocessors, copy %.2f TB/s\n", p.name, n_sm, peak);
    if (argc > 3) use_pdl = atoi(argv[3]);
    if (mode == "shapes") shapes(s, peak, argc > 2 ? atoi(argv[2]) : -1);
    if (mode == "model" || mode == "tune") model(s, peak, mode == "tune");
    return 0;
}
