// Checks and times the products with experts outside ggml: a layer of 2048 x 512 experts as 35B-A3B and 80B-A3B have it.
//
//   nvcc -O3 -std=c++17 -arch=native -DTYPE=MMN_Q4_K -DDOWN=MMN_Q6_K -I <patched ggml>/include -I <patched ggml>/src \
//       -I <patched ggml>/src/ggml-cuda bench/cuda/experts_bench.cu -o experts_bench
//   ./experts_bench [experts used]          256 8
//   ./experts_bench small                   errors of few columns, no times, for compute-sanitizer
//
// TYPE: of gate and up, DOWN: of down. Random weights. The ids of a layer: independent columns, columns that take 6 of 10 experts from those
// before them, and all columns alike. Times are per layer in a CUDA graph of 40 layers (4 with many columns), weights larger than the L2 cache.

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"
#include "mmn-f32-kernel.cuh"
#include "mmn-id-convert.cuh"
#include "mmn-id-kernel.cuh"
#include "mmn-id-wide-product.cuh"
#include "mmn-unpack-more.cuh"
#include "matmul_reference.cuh"
#include "timing.cuh"

#include <cmath>
#include <random>
#include <set>
#include <string>

#ifndef TYPE
#define TYPE MMN_Q4_K
#endif
#ifndef DOWN
#define DOWN TYPE
#endif

static constexpr int D = 2048, F = 512, MAX_COLS = 4096, ROWS_CHECKED = 8;

// float64 product of ROWS_CHECKED rows of each pair, one warp each
static __global__ void check(const int type, const int bytes, const uint8_t * w, const int64_t stride_e, const float * x, const int k,
                             const int32_t * ids, const int x_div, const int rows, double * out) {
    const int p = blockIdx.x, row = (blockIdx.y*(rows/ROWS_CHECKED) + p*7) % rows;
    const uint8_t * b = w + ids[p]*stride_e + (int64_t) row*(k/256)*bytes;
    double s = 0;
    for (int i = threadIdx.x; i < k; i += 32) {
        s += dequantise(type, b + i/256*bytes, i % 256)*(double) x[(int64_t) (p/x_div)*k + i];
    }
    for (int o = 16; o; o >>= 1) {
        s += __shfl_xor_sync(~0u, s, o);
    }
    if (threadIdx.x == 0) {
        out[p*ROWS_CHECKED + blockIdx.y] = s;
    }
}

static std::vector<int> make_ids(const int n, const int k, const int e, const double overlap, std::mt19937 & rng) {
    std::vector<int> ids;
    for (int c = 0; c < n; ++c) {
        std::set<int> used;
        for (int j = 0; j < k;) {
            const int v = overlap >= 1 && c ? ids[j] : c && (int) (rng() % 1000) < overlap*1000 ? ids[rng() % ids.size()] : (int) (rng() % e);
            if (used.insert(v).second) {
                ids.push_back(v);
                ++j;
            }
        }
    }
    return ids;
}

template <typename T> static T * device(const size_t n) {
    T * p;
    CHECK(cudaMalloc(&p, n*sizeof(T) + 512));
    return p;
}

template <typename K> static int resident(const K & k) {
    int n = 0;
    CHECK(cudaFuncSetAttribute(k.fn, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) k.smem));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, k.fn, k.n_threads, k.smem));
    return n*n_sm;
}

int main(int argc, char ** argv) {
    const bool small = argc == 2 && std::string(argv[1]) == "small";
    const int E = argc > 2 ? atoi(argv[1]) : small ? 64 : 256, K = argc > 2 ? atoi(argv[2]) : small ? 4 : 8, sets = small ? 1 : 8;
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    n_sm = prop.multiProcessorCount;
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s));
    if (!small) {
        copy_bandwidth(s);
    }

    // gate, up, down of E + 1 experts, of which the last is shared
    const int bytes = mmn_row<TYPE>::bytes, bytes_down = mmn_row<DOWN>::bytes;
    const int64_t gate_e = (int64_t) F*(D/256)*bytes, down_e = (int64_t) D*(F/256)*bytes_down;
    char * w[8][3];
    for (int i = 0; i < sets; ++i) {
        char ** layer = w[i];
        for (int m = 0; m < 3; ++m) {
            const int64_t blocks = (E + 1)*(int64_t) D*F/256;
            layer[m] = device<char>(blocks*(m == 2 ? bytes_down : bytes));
            fill_weights<<<(unsigned) ((blocks + 255)/256), 256, 0, s>>>(m == 2 ? DOWN : TYPE, (uint8_t *) layer[m], blocks, m == 2 ? bytes_down : bytes, m + 1, false);
        }
    }
    const size_t max_pairs = (size_t) MAX_COLS*K;
    float * x = device<float>((size_t) MAX_COLS*D), * h = device<float>(max_pairs*F), * y = device<float>(max_pairs*D), * out = device<float>((size_t) MAX_COLS*D);
    float * weights = device<float>(max_pairs), * dots = device<float>(64*D/256);
    char * xc = device<char>((size_t) MAX_COLS*(D/256)*MMNI_COL_BYTES), * hc = device<char>(max_pairs*(F/256)*MMNI_COL_BYTES);
    float * logits = device<float>(64*E), * router = device<float>((size_t) sets*E*D);
    int32_t * ids = device<int32_t>(40*max_pairs);
    mmni_list * lists = device<mmni_list>(40);
    int * n_items = device<int>(1), * pairs = device<int>(max_pairs);
    mmwi_item * items = device<mmwi_item>(E + max_pairs/MMWI_ITEM_COLS);
    double * ref = device<double>(max_pairs*ROWS_CHECKED);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> host((size_t) MAX_COLS*D);
    for (float & v : host) {
        v = normal(rng);
    }
    CHECK(cudaMemcpy(x, host.data(), host.size()*4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(weights, 0, max_pairs*4));
    for (int i = 0; i < sets; ++i) {
        for (int64_t at = 0; at < (int64_t) E*D; at += MAX_COLS*D/2) { // other numbers for each set
            CHECK(cudaMemcpy(router + i*(int64_t) E*D + at, host.data() + (i + 1)*97, std::min<int64_t>((int64_t) E*D - at, MAX_COLS*D/2)*4, cudaMemcpyHostToDevice));
        }
    }

    for (const double overlap : { 0.0, 0.6, 1.0 }) {
        for (const int n : { 1, 2, 4, 8, 16, 24, 32, 64, 65, 128, 512, 2048, 4096 }) {
            const bool wide = n > 64;
            if (small && (overlap != 0.6 || n == 2 || n == 4 || n > 65)) {
                continue;
            }
            const int n_pairs = n*K, layers = small ? 1 : wide ? 4 : 40;
            double distinct = 0;
            for (int l = 0; l < layers; ++l) {
                const std::vector<int> v = make_ids(n, K, E, overlap, rng);
                distinct += (double) std::set<int>(v.begin(), v.end()).size()/layers;
                CHECK(cudaMemcpy(ids + l*max_pairs, v.data(), n_pairs*4, cudaMemcpyHostToDevice));
            }
            const mmni_kernel k_gate = mmni_choose<TYPE>(D/256, true, prop.sharedMemPerBlockOptin, n), k_down = mmni_choose<DOWN>(F/256, false, prop.sharedMemPerBlockOptin, n);
            const int max_items = std::min(E, n_pairs) + n_pairs/MMNI_ITEM_COLS + 8;
            const int b_gate = std::min(resident(k_gate), max_items*F/k_gate.rows_block), b_down = std::min(resident(k_down), max_items*D/k_down.rows_block);
            constexpr int mt = DOWN == MMN_Q4_0 || DOWN == MMN_Q4_K || DOWN == MMN_Q8_0 ? 2 : 1;
            const auto wide_gate = mmwi_product<TYPE, 2, true, 8, 1>;
            const auto wide_down = mmwi_product<DOWN, mt, false, 8, 1>;
            const int  smem_gate = mmwi_smem_bytes<TYPE, 2, 8>, smem_down = mmwi_smem_bytes<DOWN, mt, 8>;
            CHECK(cudaFuncSetAttribute(wide_gate, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_gate));
            CHECK(cudaFuncSetAttribute(wide_down, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_down));

            // shared: with the expert that all columns use, up to the sum
            auto convert = [&](const int l, const bool shared) {
                launch(s, mmni_convert<256, false>, dim3((n*(D/256) + 7)/8 + !wide), 256, 0, (const float *) x, (int64_t) D, D/256, n, xc, (const int32_t *) ids + l*max_pairs, K, K, n_pairs, E,
                    shared ? n : 0, wide ? nullptr : lists + l, (const float *) x, shared ? dots : nullptr, mmni_router {});
            };
            // ids by a router
            auto route = [&](const int l) {
                const int nc = n == 1 ? 1 : n == 2 ? 2 : 4;
                launch(s, n == 1 ? mmn_f32<2, 1> : n == 2 ? mmn_f32<2, 2> : mmn_f32<2, 4>, dim3((E + 1)/2, (n + nc - 1)/nc), MMN_F32_THREADS, 0,
                    (const float *) router + (l % sets)*(int64_t) E*D, (int64_t) D, true, (const float *) x, (int64_t) D, D, E, n, logits, (int64_t) E);
            };
            auto choose = [&](const int l) {
                const mmni_router r = { nullptr, logits, nullptr, weights, false, true, 1.0f/16384, 1.0f };
                launch(s, mmni_convert<1024, true>, dim3((n*(D/256) + 31)/32 + 1), 1024, 0, (const float *) x, (int64_t) D, D/256, n, xc, (const int32_t *) nullptr, K, K, n_pairs, E,
                    n, lists + l, (const float *) x, dots, r);
            };
            auto gate = [&](const int l, const bool shared) {
                char ** m = w[l % sets];
                if (wide) {
                    mmwi_args a = { m[0], m[1], gate_e, (D/256)*bytes, F, D/256, K, xc, n_items, items, pairs, h };
                    return launch(s, wide_gate, dim3(n_sm), 256, smem_gate, a);
                }
                mmni_args a = { m[0], m[1], gate_e, (D/256)*bytes, F, D/256, K, xc, lists + l, n_pairs + shared*n, h, m[0] + E*gate_e, m[1] + E*gate_e, shared ? E : -1, n_pairs, 0 };
                launch(s, k_gate.fn, dim3(b_gate), k_gate.n_threads, (int) k_gate.smem, a);
            };
            auto convert_h = [&](const bool shared) {
                const int cols = n_pairs + shared*n;
                launch(s, mmni_convert<256, false>, dim3((cols*(F/256) + 7)/8), 256, 0, (const float *) h, (int64_t) F, F/256, cols, hc, (const int32_t *) nullptr, 0, 1, 0, 0, 0, (mmni_list *) nullptr,
                    (const float *) nullptr, (float *) nullptr, mmni_router {});
            };
            auto down = [&](const int l, const bool shared) {
                char * m = w[l % sets][2];
                if (wide) {
                    mmwi_args a = { m, nullptr, down_e, (F/256)*bytes_down, D, F/256, 1, hc, n_items, items, pairs, y };
                    return launch(s, wide_down, dim3(n_sm), 256, smem_down, a);
                }
                mmni_args a = { m, nullptr, down_e, (F/256)*bytes_down, D, F/256, 1, hc, lists + l, n_pairs + shared*n, y, m + E*down_e, nullptr, shared ? E : -1, n_pairs, n_pairs };
                launch(s, k_down.fn, dim3(b_down), k_down.n_threads, (int) k_down.smem, a);
            };
            auto sort = [&](const int l) { launch(s, mmwi_sort, dim3(1), 1024, 0, (const int32_t *) ids + l*max_pairs, K, K, n_pairs, E, n_items, items, pairs); };
            auto sum  = [&](const bool shared) {
                launch(s, mmni_sum, dim3(n, D/256), 256, 0, (const float *) y, (const float *) weights, (const float *) (shared ? y + (int64_t) n_pairs*D : out), (const float *) (shared ? dots : nullptr), D/256, D, K, out);
            };

            std::vector<double> r((size_t) n_pairs*ROWS_CHECKED), u(r.size());
            auto reference_of = [&](const int m, const float * in, std::vector<double> & to) {
                check<<<dim3(n_pairs, ROWS_CHECKED), 32, 0, s>>>(m == 2 ? DOWN : TYPE, m == 2 ? bytes_down : bytes, (uint8_t *) w[0][m], m == 2 ? down_e : gate_e, in,
                    m == 2 ? F : D, ids, m == 2 ? 1 : K, m == 2 ? D : F, ref);
                CHECK(cudaMemcpyAsync(to.data(), ref, to.size()*8, cudaMemcpyDeviceToHost, s));
                CHECK(cudaStreamSynchronize(s));
            };
            auto nmse = [&](const float * dev, const int rows) {
                std::vector<float> v((size_t) n_pairs*rows);
                CHECK(cudaMemcpyAsync(v.data(), dev, v.size()*4, cudaMemcpyDeviceToHost, s));
                CHECK(cudaStreamSynchronize(s));
                double num = 0, den = 0;
                for (int p = 0; p < n_pairs; ++p) {
                    for (int j = 0; j < ROWS_CHECKED; ++j) {
                        const double e = r[(size_t) p*ROWS_CHECKED + j];
                        num += pow(v[(size_t) p*rows + (j*(rows/ROWS_CHECKED) + p*7) % rows] - e, 2);
                        den += e*e;
                    }
                }
                return num/den;
            };
            CHECK(cudaMemsetAsync(h, 0xFF, (size_t) n_pairs*F*4, s));
            CHECK(cudaMemsetAsync(y, 0xFF, (size_t) n_pairs*D*4, s));
            if (wide) {
                sort(0);
            }
            convert(0, false);
            gate(0, false);
            convert_h(false);
            down(0, false);
            reference_of(0, x, r);
            reference_of(1, x, u);
            for (size_t i = 0; i < r.size(); ++i) {
                r[i] = r[i]/(1 + exp(-r[i]))*u[i];
            }
            const double e_gate = nmse(h, F);
            reference_of(2, h, r);
            const double e_down = nmse(y, D);
            if (small) {
                if (wide) {
                    convert(0, false);
                } else {
                    convert(0, true);
                    route(0);
                    choose(0);
                }
                gate(0, !wide);
                convert_h(!wide);
                down(0, !wide);
                sum(!wide);
                CHECK(cudaStreamSynchronize(s));
                printf("columns %d: nmse %.1e %.1e\n", n, e_gate, e_down);
                fflush(stdout);
                continue;
            }

            auto per = [&](const std::function<void(int)> & f) { return 1e3*time_graph(s, [&]() { for (int l = 0; l < layers; ++l) f(l); })/layers; };
            auto layer = [&](const bool shared, const bool routed) {
                return per([&](const int l) {
                    if (wide) {
                        sort(l);
                    }
                    if (routed) {
                        route(l);
                        choose(l);
                    } else {
                        convert(l, shared);
                    }
                    gate(l, shared);
                    convert_h(shared);
                    down(l, shared);
                    sum(shared);
                });
            };
            const double whole = layer(false, false);
            printf("overlap %.1f columns %4d experts %5.1f: nmse %.1e %.1e; at 3.0 TB/s %.1f + %.1f us; layer %.1f us", overlap, n, distinct, e_gate, e_down,
                distinct*2*gate_e/3e6, distinct*down_e/3e6, whole);
            if (wide) {
                printf(", %.0f TFLOP/s; gate and up %.1f, down %.1f\n", 6.0*n_pairs*D*F/whole*1e-6, per([&](int l) { gate(l, false); }), per([&](int l) { down(l, false); }));
            } else {
                const double with = layer(true, false), routed = layer(true, true), product = per(route), choice = per(choose);
                layer(false, false); // lists without the shared expert
                printf(", with a shared expert %.1f, and a router %.1f (its product %.1f, choice and conversion %.1f); gate and up %.1f, down %.1f\n", with, routed, product,
                    choice, per([&](int l) { gate(l, false); }), per([&](int l) { down(l, false); }));
            }
            fflush(stdout);
        }
    }
}
