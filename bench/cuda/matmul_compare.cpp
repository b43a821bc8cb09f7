// Matrix products through ggml on the first CUDA device: the narrow kernels (1 to 64 columns) or the wide products (65 and more) against
// the other kernels, error and time.
//
// Build it with -fopenmp against the patched ggml with CUDA (link ggml, ggml-base, ggml-cuda); arguments: [wide] names of types (default:
// all). The error is the normalised mean squared error against float64 products of the dequantised weights, on 96 rows of each matrix and
// up to 64 columns; "x 3000" has one channel in 5,000 that many times as large. The time is the mean of one product inside a graph that
// rotates through enough copies of the weights to exceed the L2 cache.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cuda.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

struct result { double nmse, us; };

static std::vector<uint8_t> quantised(const ggml_type type, const int64_t k, const int64_t rows, std::mt19937 & rng) {
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> w(k*std::min<int64_t>(rows, 256));
    for (float & v : w) {
        v = normal(rng);
    }
    const int64_t distinct = w.size()/k;
    std::vector<uint8_t> q(ggml_row_size(type, k)*rows);
    ggml_quantize_chunk(type, w.data(), q.data(), 0, distinct, k, nullptr);
    for (int64_t r = distinct; r < rows; ++r) {
        memcpy(q.data() + r*ggml_row_size(type, k), q.data() + ((r*7) % distinct)*ggml_row_size(type, k), ggml_row_size(type, k));
    }
    return q;
}

static std::vector<result> measure(ggml_backend_t backend, const ggml_type type, const int64_t k, const int64_t rows, const int64_t cols, const float outlier) {
    std::mt19937 rng(k + rows + cols);
    const std::vector<uint8_t> q = quantised(type, k, rows, rng);
    const int copies = (int) std::max<int64_t>(2, std::min<int64_t>(64, (512ll << 20)/(int64_t) q.size()));

    ggml_init_params params = { ggml_tensor_overhead()*(2*copies + 8) + ggml_graph_overhead_custom(4*copies + 16, false), nullptr, true };
    ggml_context * ctx_w = ggml_init(params);
    ggml_context * ctx   = ggml_init(params);
    std::vector<ggml_tensor *> w(copies), y(copies);
    for (auto & t : w) {
        t = ggml_new_tensor_2d(ctx_w, type, k, rows);
    }
    ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, cols);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 4*copies + 16, false);
    for (int i = 0; i < copies; ++i) {
        // views keep the products from being grouped: each converts its own input
        y[i] = ggml_mul_mat(ctx, w[i], ggml_view_2d(ctx, x, k, cols, x->nb[1], 0));
        ggml_build_forward_expand(graph, y[i]);
    }
    ggml_backend_buffer_t buf_w = ggml_backend_alloc_ctx_tensors(ctx_w, backend);
    ggml_backend_buffer_set_usage(buf_w, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_t buf = ggml_backend_alloc_ctx_tensors(ctx, backend);
    for (auto & t : w) {
        ggml_backend_tensor_set(t, q.data(), 0, q.size());
    }
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<float> xh(k*cols);
    for (size_t i = 0; i < xh.size(); ++i) { // repeated: millions take seconds, and no row is like another
        xh[i] = i >= 1048573 ? xh[i - 1048573] : normal(rng)*(outlier == 1.0f && rng() % 101 == 0 ? 12.0f : 1.0f);
    }
    for (int64_t n = 0; n < cols; ++n) {
        for (int64_t i = 77; i < k; i += 5000) {
            xh[n*k + i] *= outlier;
        }
    }
    ggml_backend_tensor_set(x, xh.data(), 0, xh.size()*4);

    // float64 reference on some rows
    const int64_t n_check = std::min<int64_t>(rows, 96);
    const int64_t c_check = std::min<int64_t>(cols, 64);
    std::vector<int64_t> check(n_check);
    std::vector<double> ref(n_check*c_check);
#pragma omp parallel for
    for (int64_t c = 0; c < n_check; ++c) {
        std::vector<float> row(k);
        check[c] = c*(rows - 1)/std::max<int64_t>(n_check - 1, 1);
        ggml_get_type_traits(type)->to_float(q.data() + check[c]*ggml_row_size(type, k), row.data(), k);
        for (int64_t n = 0; n < c_check; ++n) {
            double s = 0.0;
            for (int64_t i = 0; i < k; ++i) {
                s += (double) row[i]*xh[n*cols/c_check*k + i];
            }
            ref[c*c_check + n] = s;
        }
    }

    std::vector<result> out;
    for (const bool ours : { false, true }) {
        ggml_backend_cuda_set_narrow_mul_mat(backend, GGML_TYPE_COUNT, 1, 64, ours);
        ggml_backend_cuda_set_wide_mul_mat(backend, GGML_TYPE_COUNT, ours);
        for (int i = 0; i < 3; ++i) {
            ggml_backend_graph_compute(backend, graph);
        }
        std::vector<double> us;
        for (int i = 0; i < 5; ++i) {
            const auto t0 = std::chrono::steady_clock::now();
            ggml_backend_graph_compute(backend, graph);
            us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - t0).count()/copies);
        }
        std::sort(us.begin(), us.end());
        std::vector<float> yh(rows*cols);
        ggml_backend_tensor_get(y[copies - 1], yh.data(), 0, yh.size()*4);
        double e = 0.0, s = 0.0;
        for (int64_t c = 0; c < n_check; ++c) {
            for (int64_t n = 0; n < c_check; ++n) {
                const double d = yh[n*cols/c_check*rows + check[c]] - ref[c*c_check + n];
                e += d*d;
                s += ref[c*c_check + n]*ref[c*c_check + n];
            }
        }
        out.push_back({ e/s, us[us.size()/2] });
    }
    ggml_backend_buffer_free(buf);
    ggml_backend_buffer_free(buf_w);
    ggml_free(ctx);
    ggml_free(ctx_w);
    return out;
}

int main(int argc, char ** argv) {
    ggml_backend_t backend = ggml_backend_cuda_init(0);
    struct shape { const char * model; int64_t k, rows; };
    const shape shapes[] = {
        { "27B attn_qkv",  5120, 10240 }, { "27B ssm_out",   6144,  5120 }, { "27B ssm_alpha", 5120,    48 }, { "27B ffn_gate", 5120, 17408 },
        { "27B ffn_down", 17408,  5120 }, { "27B attn_q",    5120, 12288 }, { "27B attn_k",    5120,  1024 }, { "draft fc",    25600,  5120 },
        { "9B ffn_gate",   4096, 12288 }, { "9B ffn_down",  12288,  4096 }, { "4B ffn_gate",   2560,  9216 }, { "4B ffn_down",  9216,  2560 },
        { "0.8B ffn_gate", 1024,  3584 }, { "0.8B ffn_down", 3584,  1024 }, { "odd rows",      2048,   777 },
    };
    const ggml_type types[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q5_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_XS, GGML_TYPE_BF16, GGML_TYPE_F16,
                                GGML_TYPE_NVFP4, GGML_TYPE_IQ4_NL, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K, GGML_TYPE_Q4_1, GGML_TYPE_IQ3_XXS, GGML_TYPE_MXFP4,
                                GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ3_S };
    struct width { int64_t cols; float outlier; };
    const bool wide = argc > 1 && strcmp(argv[1], "wide") == 0;
    const int  arg  = wide ? 2 : 1;
    const std::vector<width> widths = wide ?
        std::vector<width>{ { 65, 1 }, { 128, 1 }, { 256, 1 }, { 256, 100 }, { 256, 3000 }, { 512, 1 }, { 1024, 1 }, { 2048, 1 }, { 4096, 1 } } :
        std::vector<width>{ { 1, 1 }, { 8, 1 }, { 16, 1 }, { 24, 1 }, { 32, 1 }, { 48, 1 }, { 64, 1 } };
    int worse = 0, slower = 0, total = 0;
    printf("%-5s %-14s %6s %6s %4s %6s | %10s %8s | %10s %8s | %s\n", "type", "matrix", "k", "rows", "cols", "x", "stock NMSE", "us", "ours", "us", "ratio");
    for (const ggml_type type : types) {
        if (argc > arg && std::none_of(argv + arg, argv + argc, [&](const char * name) { return strcmp(name, ggml_type_name(type)) == 0; })) {
            continue;
        }
        for (const shape & sh : shapes) {
            for (const auto [cols, outlier] : widths) {
                const std::vector<result> r = measure(backend, type, sh.k, sh.rows, cols, outlier);
                ++total;
                const bool w = r[1].nmse > 1.02*r[0].nmse && r[1].nmse > 1e-12;
                const bool s = r[1].us > 1.03*r[0].us;
                worse  += w;
                slower += s;
                printf("%-5s %-14s %6d %6d %4d %6.0f | %10.2e %8.1f | %10.2e %8.1f | %.2f%s%s\n", ggml_type_name(type), sh.model, (int) sh.k, (int) sh.rows,
                       (int) cols, outlier, r[0].nmse, r[0].us, r[1].nmse, r[1].us, r[0].us/r[1].us, w ? " WORSE ERROR" : "", s ? " SLOWER" : "");
                fflush(stdout);
            }
        }
    }
    printf("%d cases, %d with a worse error, %d slower\n", total, worse, slower);
    ggml_backend_free(backend);
    return worse != 0;
}
