// Checks and times products with 8 to 24 columns whose rows belong to one block each (rows_product.cuh, a candidate) beside the narrow ones.
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=native -I <patched ggml>/src -I <patched ggml>/src/ggml-cuda bench/cuda/rows_bench.cu -o rows_bench
//   ./rows_bench check    error against float64
//   ./rows_bench model    all products of one 27B pass with their conversions, as one CUDA graph: narrow, then every variant of the candidate,
//                         then the candidate for one kind of product alone

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"
#include "mmn-convert.cuh"
#include "mmn-product.cuh"
#include "rows_product.cuh"
#include "matmul_reference.cuh"
#include "timing.cuh"

#include <cmath>
#include <cstring>
#include <map>
#include <string>

static int step_bytes(const int type) { return type == MMN_Q4_K ? 144 : 210; }

struct narrow_kernel { void (*fn)(mmn_args); int rows, threads, ks, smem, grid; };
struct rows_kernel { void (*fn)(mmr_args); int nw, smem; std::string name; };

template <mmn_type type, int mt, int nt, int ks, int ns>
static narrow_kernel make_narrow() {
    narrow_kernel k { mmn_product<type, mt, nt, 4, ks, ns, 2>, 64*mt, 128, ks, ns*mmn_stage_bytes<type, mt, nt, 4, ks>, 0 };
    CHECK(cudaFuncSetAttribute((const void *) k.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, k.smem));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&k.grid, (const void *) k.fn, k.threads, k.smem));
    k.grid *= n_sm;
    return k;
}

static const narrow_kernel & narrow(const int type, const int nt) {
    static const narrow_kernel q4[] = { make_narrow<MMN_Q4_K, 1, 1, 2, 3>(), make_narrow<MMN_Q4_K, 1, 2, 2, 3>(), make_narrow<MMN_Q4_K, 2, 3, 1, 3>() };
    static const narrow_kernel q6[] = { make_narrow<MMN_Q6_K, 1, 1, 2, 2>(), make_narrow<MMN_Q6_K, 1, 2, 2, 2>(), make_narrow<MMN_Q6_K, 2, 3, 1, 2>() };
    return (type == MMN_Q4_K ? q4 : q6)[nt - 1];
}

template <mmn_type type, int nt, int nw, int ns, int mc>
static rows_kernel make_rows() {
    rows_kernel k { mmn_rows<type, nt, nw, ns, mc>, nw, mmr_ring_bytes<type, nw, ns> + mmr_sum_bytes<nt, nw, mc>,
                    "w" + std::to_string(nw) + " s" + std::to_string(ns) + " c" + std::to_string(mc) };
    CHECK(cudaFuncSetAttribute((const void *) k.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, k.smem));
    return k;
}

// variants under test: warps, slots of each warp's ring, tiles of a chunk
static const std::vector<rows_kernel> & variants(const int type, const int nt) {
    static const std::vector<rows_kernel> q4[] = {
        { make_rows<MMN_Q4_K, 1, 12, 4, 8>(), make_rows<MMN_Q4_K, 1, 12, 3, 5>(), make_rows<MMN_Q4_K, 1, 16, 3, 4>(), make_rows<MMN_Q4_K, 1, 10, 4, 8>() },
        { make_rows<MMN_Q4_K, 2, 12, 4, 4>(), make_rows<MMN_Q4_K, 2, 8, 6, 6>(), make_rows<MMN_Q4_K, 2, 10, 5, 4>() },
        { make_rows<MMN_Q4_K, 3, 8, 6, 4>(), make_rows<MMN_Q4_K, 3, 8, 5, 3>() } };
    static const std::vector<rows_kernel> q6[] = {
        { make_rows<MMN_Q6_K, 1, 12, 3, 6>(), make_rows<MMN_Q6_K, 1, 10, 4, 4>() },
        { make_rows<MMN_Q6_K, 2, 8, 4, 4>() },
        { make_rows<MMN_Q6_K, 3, 8, 4, 3>() } };
    return (type == MMN_Q4_K ? q4 : q6)[nt - 1];
}

struct matrix { const char * w; float * dst; int rows; };

static char * frag; // what conversions write
static float * part; // partial tiles and flags of the narrow products
static int * done;
static float * x, * dst;

static void convert(cudaStream_t s, int k, int cols, int nt) {
    launch(s, mmn_convert<false>, dim3(nt*8, (k/256 + 7)/8), 256, 0, (const float *) x, (int64_t) k, (const float *) nullptr, (int64_t) 0, k, cols, nt, frag, done, 512);
}

static void narrow_product(cudaStream_t s, int type, int nt, const std::vector<matrix> & mats, int k, int cols) {
    const narrow_kernel & n = narrow(type, nt);
    mmn_args a = {};
    for (const matrix & m : mats) {
        a.mat[a.n_mat++] = { m.w, m.dst, m.rows, m.rows, a.n_tiles };
        a.n_tiles += (m.rows + n.rows - 1)/n.rows;
    }
    a.n_steps = k/256; a.cols = cols; a.stride_w = (int64_t) (k/256)*step_bytes(type);
    a.x = frag; a.part = part; a.done = done; a.early = true;
    launch(s, n.fn, std::min(n.grid, a.n_tiles*a.n_steps/n.ks), n.threads, n.smem, a);
}

static void rows_product(cudaStream_t s, const rows_kernel & c, int type, const std::vector<matrix> & mats, int k, int cols) {
    mmr_args a = {};
    for (const matrix & m : mats) {
        a.mat[a.n_mat++] = { m.w, m.dst, m.rows, m.rows, a.n_units };
        a.n_units += m.rows/MMR_UNIT;
    }
    a.n_steps = k/256; a.cols = cols; a.stride_w = (int64_t) (k/256)*step_bytes(type);
    a.x = frag; a.early = true;
    launch(s, c.fn, std::min(n_sm, a.n_units), c.nw*32, c.smem, a);
}

static int check(cudaStream_t s) {
    const int shapes[][2] = { { 256, 8 }, { 1024, 48 }, { 5120, 1032 }, { 6144, 5120 }, { 17408, 640 }, { 512, 20008 } };
    int bad = 0;
    for (int type : { MMN_Q4_K, MMN_Q6_K }) for (const auto & sh : shapes) for (int nt : { 1, 2, 3 }) {
        const int k = sh[0], rows = sh[1];
        const int64_t blocks = (int64_t) rows*(k/256), stride = (int64_t) (k/256)*step_bytes(type);
        uint8_t * w; double * ref;
        CHECK(cudaMalloc(&w, blocks*step_bytes(type) + 128)); CHECK(cudaMalloc(&ref, 8ll*rows*nt*8));
        fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, w, blocks, step_bytes(type), 99 + k + rows, true);
        reference<<<dim3(rows, nt*8), 32, 0, s>>>(type, w, stride, x, k, rows, ref, false);
        std::vector<double> r(rows*nt*8);
        CHECK(cudaStreamSynchronize(s));
        CHECK(cudaMemcpy(r.data(), ref, 8*r.size(), cudaMemcpyDeviceToHost));
        for (const rows_kernel & c : variants(type, nt)) for (int cols : { nt*8, nt*8 - 3 }) {
            std::vector<float> y(rows*nt*8), again(rows*nt*8);
            for (std::vector<float> * out : { &y, &again }) {
                CHECK(cudaMemsetAsync(dst, 0xFF, 4*y.size(), s));
                convert(s, k, cols, nt);
                rows_product(s, c, type, { { (const char *) w, dst, rows } }, k, cols);
                CHECK(cudaMemcpyAsync(out->data(), dst, 4*y.size(), cudaMemcpyDeviceToHost, s));
                CHECK(cudaStreamSynchronize(s));
            }
            double e = 0.0, n = 0.0;
            for (int i = 0; i < rows*cols; ++i) { e += (y[i] - r[i])*(y[i] - r[i]); n += r[i]*r[i]; }
            const bool same = memcmp(y.data(), again.data(), 4*y.size()) == 0;
            const bool ok = same && e/n < 1e-6;
            bad += !ok;
            printf("%s %5d x %5d, %2d columns, %-10s NMSE %.2e%s\n", type == MMN_Q4_K ? "q4_K" : "q6_K", k, rows, cols, c.name.c_str(), e/n, ok ? "" : same ? "  FAIL" : "  NOT REPRODUCIBLE");
        }
        CHECK(cudaFree(w)); CHECK(cudaFree(ref));
    }
    printf("%d failures\n", bad);
    return bad != 0;
}

static void model(cudaStream_t s) {
    struct group { int k; std::map<int, std::vector<matrix>> by_type; };
    std::vector<group> groups;
    int64_t total = 0;
    auto add = [&](group & g, int type, int rows) {
        const int64_t blocks = (int64_t) rows*(g.k/256);
        uint8_t * w; CHECK(cudaMalloc(&w, blocks*step_bytes(type) + 256));
        fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, w, blocks, step_bytes(type), 7 + total, false);
        total += blocks*step_bytes(type);
        g.by_type[type].push_back({ (const char *) w, dst, rows });
    };
    for (int l = 0; l < 64; ++l) {
        const bool rich = l < 8 || l >= 56 || (l - 10) % 3 == 0;
        const int big = rich ? MMN_Q6_K : MMN_Q4_K;
        group in { 5120, {} }, out { 6144, {} }, up { 5120, {} }, down { 17408, {} };
        if (l % 4 == 3) {
            add(in, MMN_Q4_K, 12288); add(in, MMN_Q4_K, 1024); add(in, big, 1024);
        } else {
            add(in, big, 10240); add(in, MMN_Q4_K, 6144); add(in, MMN_Q4_K, 48); add(in, MMN_Q4_K, 48);
        }
        add(out, MMN_Q4_K, 5120); add(up, MMN_Q4_K, 17408); add(up, MMN_Q4_K, 17408); add(down, big, 5120);
        for (const group & g : { in, out, up, down }) groups.push_back(g);
    }
    group head { 5120, {} };
    add(head, MMN_Q6_K, 248320);
    groups.push_back(head);
    CHECK(cudaDeviceSynchronize());
    printf("model: %.2f GB of weights, %.2f ms at 3.0 TB/s\n", total*1e-9, total/3.0e9);
    for (int nt : { 1, 2, 3 }) {
        const int cols = nt*8;
        // kinds of products that the candidate computes, one bit each
        auto run = [&](const rows_kernel & q4, const rows_kernel & q6, int kinds) {
            return time_graph(s, [&]() {
                for (const group & g : groups) {
                    convert(s, g.k, cols, nt);
                    for (const auto & it : g.by_type) {
                        const int kind = it.second[0].rows > 100000 ? 8 : g.k == 5120 ? 1 : g.k == 6144 ? 2 : 4;
                        if (kinds & kind) rows_product(s, it.first == MMN_Q4_K ? q4 : q6, it.first, it.second, g.k, cols);
                        else narrow_product(s, it.first, nt, it.second, g.k, cols);
                    }
                }
            });
        };
        const std::vector<rows_kernel> & q4 = variants(MMN_Q4_K, nt), & q6 = variants(MMN_Q6_K, nt);
        for (int round = 0; round < 2; ++round) printf("%2d columns: narrow %.3f ms\n", cols, run(q4[0], q6[0], 0));
        for (const rows_kernel & k : q4) printf("   q4_K %s, q6_K %s: %.3f ms\n", k.name.c_str(), q6[0].name.c_str(), run(k, q6[0], 15));
        for (size_t i = 1; i < q6.size(); ++i) printf("   q4_K %s, q6_K %s: %.3f ms\n", q4[0].name.c_str(), q6[i].name.c_str(), run(q4[0], q6[i], 15));
        const char * const names[] = { "k = 5,120", "k = 6,144", "k = 17,408", "the head" };
        for (int i = 0; i < 4; ++i) printf("   %s alone: %.3f ms\n", names[i], run(q4[0], q6[0], 1 << i));
        fflush(stdout);
    }
}

int main(int argc, char ** argv) {
    cudaDeviceProp p;
    cudaStream_t s = open_device(p);
    CHECK(cudaMalloc(&frag, 16 << 20)); CHECK(cudaMalloc(&part, 64 << 20));
    CHECK(cudaMalloc(&done, 1 << 16)); CHECK(cudaMemset(done, 0, 1 << 16));
    CHECK(cudaMalloc(&x, 4ll*17408*64)); CHECK(cudaMalloc(&dst, 4ll*248320*24));
    fill_x<<<17408*64/256, 256>>>(x, 17408*64ll, 5);
    CHECK(cudaDeviceSynchronize());
    printf("%s, %d multiprocessors\n", p.name, n_sm);
    if (argc > 1 && std::string(argv[1]) == "model") { model(s); return 0; }
    return check(s);
}
