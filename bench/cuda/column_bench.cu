// Checks and times products with one column whose rows belong to one block each (mmn-column.cuh) beside the narrow ones.
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=native -I <patched ggml>/src -I <patched ggml>/src/ggml-cuda bench/cuda/column_bench.cu -o column_bench
//   ./column_bench check    error of both against float64, every type and input
//   ./column_bench shapes   microseconds of a chain of one product and its input, both
//   ./column_bench model    all products of one plain 27B pass with what computes their inputs, as one CUDA graph, both by turns
//
// Timings replay CUDA graphs that read more weights than the L2 cache holds.

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"
#include "mmn-column.cuh"
#include "mmn-product.cuh"
#include "matmul_reference.cuh"
#include "timing.cuh"

#include <cmath>
#include <cstring>
#include <map>
#include <string>

static int step_bytes(const int type) { return type == MMN_Q4_K ? 144 : type == MMN_Q5_K ? 176 : 210; }
static const char * type_name(const int type) { return type == MMN_Q4_K ? "q4_K" : type == MMN_Q5_K ? "q5_K" : "q6_K"; }

// the narrow product behind a gated activation, which a column's products compute themselves
static const int NARROW_SWIGLU = 100;

struct narrow_kernel { void (*fn)(mmn_args); int rows, threads, ks, smem, grid; };
struct column_kernel { void (*fn)(mmc_args); int nw, ns, smem; std::string name; };

template <mmn_type type, int ns, int occ>
static narrow_kernel make_narrow() {
    narrow_kernel k { mmn_product<type, 1, 1, 4, 2, ns, occ>, 64, 128, 2, ns*mmn_stage_bytes<type, 1, 1, 4, 2>, 0 };
    CHECK(cudaFuncSetAttribute((const void *) k.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, k.smem));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&k.grid, (const void *) k.fn, k.threads, k.smem));
    k.grid *= n_sm;
    return k;
}

static const narrow_kernel & narrow(const int type) {
    static const narrow_kernel q4 = make_narrow<MMN_Q4_K, 3, 2>(), q5 = make_narrow<MMN_Q5_K, 2, 3>(), q6 = make_narrow<MMN_Q6_K, 2, 2>();
    return type == MMN_Q4_K ? q4 : type == MMN_Q5_K ? q5 : q6;
}

template <mmn_type type, int nw, int ns>
static column_kernel make_column() {
    column_kernel k { mmn_column<type, nw, ns>, nw, ns, mmc_ring_bytes<type, nw, ns> + mmc_sum_bytes<nw>, "w" + std::to_string(nw) + " s" + std::to_string(ns) };
    const int most = 227*1024;
    CHECK(cudaFuncSetAttribute((const void *) k.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    return k;
}

// the shipped one first
static std::vector<column_kernel> columns(const int type) {
    static const std::vector<column_kernel>
        q4 = { make_column<MMN_Q4_K, 16, 2>(), make_column<MMN_Q4_K, 16, 3>(), make_column<MMN_Q4_K, 16, 4>(), make_column<MMN_Q4_K, 12, 3>(), make_column<MMN_Q4_K, 12, 4>(), make_column<MMN_Q4_K, 8, 4>(), make_column<MMN_Q4_K, 8, 6>(), make_column<MMN_Q4_K, 20, 3>() },
        q5 = { make_column<MMN_Q5_K, 16, 2>(), make_column<MMN_Q5_K, 16, 3>(), make_column<MMN_Q5_K, 12, 3>() },
        q6 = { make_column<MMN_Q6_K, 16, 2>(), make_column<MMN_Q6_K, 12, 3>(), make_column<MMN_Q6_K, 12, 2>(), make_column<MMN_Q6_K, 8, 3>(), make_column<MMN_Q6_K, 8, 4>() };
    return type == MMN_Q4_K ? q4 : type == MMN_Q5_K ? q5 : q6;
}

struct buffers {
    float * x, * y, * w, * norm, * dst, * sum; // x, y: inputs; w: norm weights; norm: an input in float32
    char * frag; float * part; int * done;
};

static buffers make_buffers() {
    buffers b;
    for (float ** p : { &b.x, &b.y, &b.w, &b.norm, &b.sum }) CHECK(cudaMalloc(p, 4*65536));
    CHECK(cudaMalloc(&b.dst, 4*262144));
    CHECK(cudaMalloc(&b.frag, 4 << 20)); CHECK(cudaMalloc(&b.part, 16 << 20)); CHECK(cudaMalloc(&b.done, 1 << 16));
    CHECK(cudaMemset(b.done, 0, 1 << 16));
    CHECK(cudaMemset(b.sum, 0, 4*65536));
    fill_x<<<256, 256>>>(b.x, 65536, 5); fill_x<<<256, 256>>>(b.y, 65536, 6); fill_x<<<256, 256>>>(b.w, 65536, 7);
    CHECK(cudaDeviceSynchronize());
    return b;
}

struct matrix { const char * w; float * dst; int rows; };

// ---- narrow: a conversion, then products ---------------------------------------------------------------------------------

static void narrow_input(cudaStream_t s, const buffers & b, int input, bool add, int k) {
    const int n_done = 512;
    const dim3 grid(8, (k/256 + 7)/8);
    const int64_t none = 0, kk = k, head = 128;
    switch (input) {
        case MMC_PLAIN:  launch(s, mmn_convert<false>, grid, 256, 0, (const float *) b.x, kk, (const float *) nullptr, none, k, 1, 1, b.frag, b.done, n_done); break;
        case NARROW_SWIGLU: launch(s, mmn_convert<true>, grid, 256, 0, (const float *) b.x, kk, (const float *) b.y, kk, k, 1, 1, b.frag, b.done, n_done); break;
        case MMC_GATE:   launch(s, mmn_convert_gate, grid, 256, 0, (const float *) b.x, kk, (const float *) b.y, kk, (int64_t) 512, 8, k, 1, 1, b.frag, b.done, n_done); break;
        case MMC_HEAD_NORM: launch(s, mmn_convert_head_norm, grid, 256, 0, (const float *) b.x, kk, head, (const float *) b.y, kk, head, (const float *) b.w, 1e-6f, true, k, 1, 1, b.frag, b.done, n_done); break;
        case MMC_NORM:   launch(s, add ? mmn_convert_norm<true> : mmn_convert_norm<false>, dim3(8), k/8, 0, (const float *) b.x, kk, (const float *) b.y, (const float *) b.w, 1e-6f, true, b.sum, (float *) nullptr, k, 1, 1, b.frag, b.done, n_done); break;
    }
}

static void narrow_product(cudaStream_t s, const buffers & b, int type, const std::vector<matrix> & mats, int k) {
    const narrow_kernel & n = narrow(type);
    mmn_args a = {};
    for (const matrix & m : mats) {
        a.mat[a.n_mat++] = { m.w, m.dst, m.rows, m.rows, a.n_tiles };
        a.n_tiles += (m.rows + n.rows - 1)/n.rows;
    }
    a.n_steps = k/256; a.cols = 1; a.stride_w = (int64_t) (k/256)*step_bytes(type);
    a.x = b.frag; a.part = b.part; a.done = b.done; a.early = true;
    launch(s, n.fn, std::min(n.grid, a.n_tiles*a.n_steps/n.ks), n.threads, n.smem, a);
}

// ---- column: products that compute their input ---------------------------------------------------------------------------

static void column_product(cudaStream_t s, const buffers & b, const column_kernel & c, int type, int input, const std::vector<matrix> & mats, int k,
                           const float * add, bool gated) {
    mmc_args a = {};
    for (const matrix & m : mats) {
        a.mat[a.n_mat] = { m.w, m.dst, a.n_mat == 0 ? add : nullptr, a.n_units };
        ++a.n_mat;
        a.n_units += m.rows/MMC_UNIT;
    }
    a.n_steps = k/256; a.stride_w = (int64_t) (k/256)*step_bytes(type); a.early = true; a.gated = gated; a.input = input;
    a.x = b.x; a.y = b.y; a.w = b.w; a.stride_x = 128; a.stride_y = input == MMC_GATE ? 512 : 128; a.head_bits = 8; a.eps = 1e-6f;
    launch(s, c.fn, std::min(n_sm, a.n_units), c.nw*32, c.smem + a.n_steps*MMC_STEP_BYTES, a);
}

// ---- check ---------------------------------------------------------------------------------------------------------------

static double silu(const double v) { return v/(1.0 + exp(-v)); }

static int check(cudaStream_t s) {
    const buffers b = make_buffers();
    std::vector<float> x(65536), y(65536), w(65536);
    CHECK(cudaMemcpy(x.data(), b.x, 4*65536, cudaMemcpyDeviceToHost)); CHECK(cudaMemcpy(y.data(), b.y, 4*65536, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(w.data(), b.w, 4*65536, cudaMemcpyDeviceToHost));
    const int shapes[][2] = { { 512, 8 }, { 1024, 48 }, { 5120, 1032 }, { 5120, 48 }, { 6144, 5120 }, { 17408, 640 }, { 1024, 20000 } };
    const char * const names[] = { "plain", "gate", "head norm", "norm" };
    int bad = 0;
    for (int type : { MMN_Q4_K, MMN_Q5_K, MMN_Q6_K }) for (const auto & sh : shapes) for (int input = 0; input < 4; ++input) {
        const int k = sh[0], rows = sh[1];
        if (input == MMC_NORM && k > MMN_MAX_NORM) continue;
        std::vector<float> in(k);
        double ss = 0.0;
        for (int i = 0; i < k; ++i) ss += (double) x[i]*x[i];
        for (int i = 0; i < k; ++i) {
            double v = x[i];
            if (input == MMC_GATE) v = v/(1.0 + exp(-(double) y[(i >> 8)*512 + (i & 255)]));
            if (input == MMC_HEAD_NORM) {
                double h = 0.0;
                for (int j = i/128*128; j < i/128*128 + 128; ++j) h += (double) x[j]*x[j];
                v = v/sqrt(h/128 + 1e-6)*w[i % 128]*silu(y[i]);
            }
            if (input == MMC_NORM) v = v/sqrt(ss/k + 1e-6)*w[i];
            in[i] = (float) v;
        }
        CHECK(cudaMemcpy(b.norm, in.data(), 4*k, cudaMemcpyHostToDevice));
        const int64_t blocks = 2ll*rows*(k/256), stride = (int64_t) (k/256)*step_bytes(type);
        uint8_t * wt; double * ref;
        CHECK(cudaMalloc(&wt, blocks*step_bytes(type) + 128)); CHECK(cudaMalloc(&ref, 16ll*rows));
        fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, wt, blocks, step_bytes(type), 99 + k + rows, true);
        reference<<<dim3(2*rows, 1), 32, 0, s>>>(type, wt, stride, b.norm, k, 2*rows, ref, false);
        CHECK(cudaStreamSynchronize(s));
        std::vector<double> r(2*rows);
        CHECK(cudaMemcpy(r.data(), ref, 16ll*rows, cudaMemcpyDeviceToHost));
        const std::vector<matrix> two = { { (const char *) wt, b.dst, rows }, { (const char *) wt + rows*stride, b.dst + rows, rows } };
        std::vector<float> got(2*rows), again(2*rows), product(2*rows);
        auto fetch = [&](std::vector<float> & v) { CHECK(cudaMemcpyAsync(v.data(), b.dst, 8ll*rows, cudaMemcpyDeviceToHost, s)); CHECK(cudaStreamSynchronize(s)); };
        double e_narrow = 0.0, size = 0.0;
        for (int i = 0; i < 2*rows; ++i) size += r[i]*r[i];
        narrow_input(s, b, input, false, k);
        narrow_product(s, b, type, two, k);
        fetch(got);
        for (int i = 0; i < 2*rows; ++i) e_narrow += (got[i] - r[i])*(got[i] - r[i])/size;
        for (const column_kernel & c : columns(type)) {
            double e[3] = {};
            bool same = true;
            for (int how = 0; how < 3; ++how) { // two products, the same with x added to the first, gated
                for (int rep = 0; rep < 2; ++rep) {
                    CHECK(cudaMemsetAsync(b.dst, 0xFF, 8ll*rows, s));
                    column_product(s, b, c, type, input, two, k, how == 1 ? b.x : nullptr, how == 2);
                    fetch(rep ? again : got);
                }
                if (how == 0) product = got;
                same = same && memcmp(got.data(), again.data(), (how == 2 ? 4ll : 8ll)*rows) == 0;
                double n = 0.0;
                for (int i = 0; i < (how == 2 ? rows : 2*rows); ++i) {
                    double want = r[i];
                    if (how == 1 && i < rows) want += x[i];
                    if (how == 2) want = silu(product[i])*product[rows + i]; // of its own products: large times small ones magnify their errors
                    e[how] += (got[i] - want)*(got[i] - want); n += want*want;
                }
                e[how] /= n;
            }
            const double most = std::max(1e-6, 2*e_narrow);
            const bool ok = same && e[0] < most && e[1] < most && e[2] < 1e-10;
            bad += !ok;
            printf("%s %-9s %5d x %5d %-6s narrow %.2e column %.2e added %.2e gated %.2e%s\n", type_name(type), names[input], k, rows, c.name.c_str(), e_narrow, e[0], e[1], e[2], ok ? "" : same ? "  FAIL" : "  NOT REPRODUCIBLE");
        }
        CHECK(cudaFree(wt)); CHECK(cudaFree(ref));
    }
    printf("%d failures\n", bad);
    return bad != 0;
}

// ---- times ---------------------------------------------------------------------------------------------------------------

static void shapes(cudaStream_t s) {
    const buffers b = make_buffers();
    struct { const char * name; int k, rows, input; bool gated; } list[] = {
        { "qkv+z", 5120, 16384, MMC_NORM, false }, { "q+k+v", 5120, 14336, MMC_NORM, false }, { "z", 5120, 6144, MMC_NORM, false }, { "out", 6144, 5120, MMC_HEAD_NORM, false },
        { "gate+up", 5120, 34816, MMC_NORM, true }, { "down", 17408, 5120, MMC_PLAIN, false }, { "head", 5120, 248320, MMC_NORM, false } };
    const int64_t pool = 4ll << 30;
    uint8_t * w; CHECK(cudaMalloc(&w, pool + 256));
    for (int type : { MMN_Q4_K, MMN_Q6_K }) {
        fill_weights<<<(pool/step_bytes(type) + 127)/128, 128, 0, s>>>(type, w, pool/step_bytes(type), step_bytes(type), 7, false);
        for (const auto & sh : list) {
            const int64_t bytes = (int64_t) sh.rows*(sh.k/256)*step_bytes(type);
            const int64_t pitch = (bytes + 127)/128*128;
            const int n = (int) std::min<int64_t>(pool/pitch, 32);
            auto mats = [&](int i) -> std::vector<matrix> {
                const char * p = (const char *) w + i*pitch;
                if (!sh.gated) return { { p, b.dst, sh.rows } };
                return { { p, b.dst, sh.rows/2 }, { p + bytes/2, b.dst + sh.rows/2, sh.rows/2 } };
            };
            const float bare = time_graph(s, [&]() { for (int i = 0; i < n; ++i) narrow_product(s, b, type, mats(i), sh.k); });
            const float old = time_graph(s, [&]() {
                for (int i = 0; i < n; ++i) { narrow_input(s, b, sh.input == MMC_PLAIN ? NARROW_SWIGLU : sh.input, sh.input == MMC_NORM, sh.k); narrow_product(s, b, type, mats(i), sh.k); }
            });
            printf("%s %-8s %6.2f us at 3.0 TB/s; narrow alone %6.2f, with conversion %6.2f; column:", type_name(type), sh.name, bytes/3e6, bare*1e3/n, old*1e3/n);
            for (const column_kernel & c : columns(type)) {
                const float ms = time_graph(s, [&]() { for (int i = 0; i < n; ++i) column_product(s, b, c, type, sh.input, mats(i), sh.k, sh.gated ? nullptr : b.sum, sh.gated); });
                printf("  %s %.2f", c.name.c_str(), ms*1e3/n);
            }
            printf("\n");
            fflush(stdout);
        }
    }
    CHECK(cudaFree(w));
}

static void model(cudaStream_t s) {
    const buffers b = make_buffers();
    struct group { int k, input; bool gated; std::map<int, std::vector<matrix>> by_type; };
    std::vector<group> groups;
    int64_t total = 0;
    auto add = [&](group & g, int type, int rows) {
        const int64_t blocks = (int64_t) rows*(g.k/256);
        uint8_t * w; CHECK(cudaMalloc(&w, blocks*step_bytes(type) + 256));
        fill_weights<<<(blocks + 127)/128, 128, 0, s>>>(type, w, blocks, step_bytes(type), 7 + total, false);
        total += blocks*step_bytes(type);
        auto & list = g.by_type[type];
        list.push_back({ (const char *) w, b.dst + 32768*(int) list.size(), rows });
    };
    for (int l = 0; l < 64; ++l) {
        const bool rich = l < 8 || l >= 56 || (l - 10) % 3 == 0;
        const int big = rich ? MMN_Q6_K : MMN_Q4_K;
        group in { 5120, MMC_NORM, false, {} };
        if (l % 4 == 3) {
            add(in, MMN_Q4_K, 12288); add(in, MMN_Q4_K, 1024); add(in, big, 1024);
        } else {
            add(in, big, 10240); add(in, MMN_Q4_K, 6144); add(in, MMN_Q4_K, 48); add(in, MMN_Q4_K, 48);
        }
        group out { 6144, l % 4 == 3 ? MMC_GATE : MMC_HEAD_NORM, false, {} };
        add(out, MMN_Q4_K, 5120);
        group up { 5120, MMC_NORM, true, {} };
        add(up, MMN_Q4_K, 17408); add(up, MMN_Q4_K, 17408);
        group down { 17408, MMC_PLAIN, false, {} };
        add(down, big, 5120);
        for (const group & g : { in, out, up, down }) groups.push_back(g);
    }
    group head { 5120, MMC_NORM, false, {} };
    add(head, MMN_Q6_K, 248320);
    groups.push_back(head);
    CHECK(cudaDeviceSynchronize());
    printf("model: %.2f GB of weights, %.2f ms at 3.0 TB/s\n", total*1e-9, total/3.0e9);
    auto old = [&]() {
        for (const group & g : groups) {
            narrow_input(s, b, g.input == MMC_PLAIN ? NARROW_SWIGLU : g.input, g.input == MMC_NORM, g.k);
            for (const auto & it : g.by_type) narrow_product(s, b, it.first, it.second, g.k);
        }
    };
    for (int round = 0; round < 2; ++round) {
        printf("narrow with conversions %.3f ms\n", time_graph(s, old));
        for (const column_kernel & q4 : columns(MMN_Q4_K)) for (const column_kernel & q6 : columns(MMN_Q6_K)) {
            const int others = (q4.name != columns(MMN_Q4_K)[0].name) + (q6.name != columns(MMN_Q6_K)[0].name);
            if (others > 1 - round) continue; // at most one differs from the shipped ones; then these alone
            const float ms = time_graph(s, [&]() {
                for (const group & g : groups) for (const auto & it : g.by_type) {
                    column_product(s, b, it.first == MMN_Q4_K ? q4 : q6, it.first, g.input, it.second, g.k, g.gated || g.k == 5120 ? nullptr : b.sum, g.gated);
                }
            });
            printf("column, q4_K %s, q6_K %s: %.3f ms\n", q4.name.c_str(), q6.name.c_str(), ms);
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    cudaDeviceProp p;
    cudaStream_t s = open_device(p);
    const std::string mode = argc > 1 ? argv[1] : "check";
    printf("%s, %d multiprocessors\n", p.name, n_sm);
    if (mode == "check") return check(s);
    if (mode == "shapes") shapes(s);
    if (mode == "model") model(s);
    return 0;
}
