// Checks and times attention of many columns over ranges of rows outside ggml, on a GPU with wgmma (Hopper).
//
//   nvcc -O3 -std=c++17 -use_fast_math -arch=sm_90a -I <patched ggml>/src/ggml-cuda bench/cuda/ranges_bench.cu -o ranges_bench -lpthread
//   ./ranges_bench check    error against float64, of some rows of each case
//   ./ranges_bench small    two small cases, for compute-sanitizer
//   ./ranges_bench times    27B heads (24 query heads, 4 K/V heads of 256): the last columns of so many rows, by splits
//
// Rates count the pairs of columns and rows that are seen.

#include "fattn-ranges-kernel.cuh"
#include "timing.cuh"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

enum kind_t { CAUSAL, WINDOW, RANDOM, OFFSET }; // what columns see: all before them, the last 300, anything or nothing, all from row 37 on

struct test {
    int    d, heads_kv, gqa, cols, kv;
    kind_t kind;
    int    splits;
};

static __global__ void fill(__half * p, const size_t n, const uint32_t seed) {
    for (size_t i = blockIdx.x*(size_t) blockDim.x + threadIdx.x; i < n; i += (size_t) gridDim.x*blockDim.x) {
        uint32_t x = (uint32_t) i*2654435761u + seed;
        x ^= x >> 15; x *= 0x2c1b3c6du; x ^= x >> 12; x *= 0x297a2d39u; x ^= x >> 15;
        p[i] = __float2half((x >> 8)*(1.0f/8388608.0f) - 1.0f);
    }
}

template <int d, int tile>
static void run(const fattn_ranges_args & a, cudaStream_t stream) {
    const int smem = fattn_ranges_smem(d, tile);
    CHECK(cudaFuncSetAttribute(fattn_ranges<d, tile>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    fattn_ranges<d, tile><<<a.n_tiles*a.n_heads_kv*a.n_splits, FATTN_RANGES_THREADS, smem, stream>>>(a);
    if (a.n_splits > 1) {
        fattn_ranges_combine<<<dim3(a.n_cols*a.gqa, a.n_heads_kv), d, 0, stream>>>(a);
    }
    CHECK(cudaGetLastError());
}

static void run(const fattn_ranges_args & a, const int d, cudaStream_t stream) {
    switch (d) {
        case 64:  run< 64, 128>(a, stream); break;
        case 128: run<128, 128>(a, stream); break;
        default:  run<256,  80>(a, stream); break;
    }
}

// a case on the device, its inputs on the host
struct bench {
    test c;
    fattn_ranges_args a = {};
    std::vector<float>   q;
    std::vector<int32_t> ranges;
    double seen = 0; // pairs

    explicit bench(const test & c) : c(c), q((size_t) c.d*c.heads_kv*c.gqa*c.cols), ranges(2*c.cols) {
        std::mt19937 gen(7);
        std::uniform_real_distribution<float> dis(-4.0f, 4.0f);
        for (float & x : q) {
            x = dis(gen);
        }
        for (int i = 0; i < c.cols; ++i) {
            int end   = c.kv - c.cols + i + 1;
            int first = c.kind == WINDOW ? std::max(0, end - 300) : c.kind == OFFSET ? 37 : 0;
            if (c.kind == RANDOM) {
                first = gen() % c.kv;
                end   = first + gen() % (c.kv - first + 1);
            }
            ranges[i]          = first;
            ranges[c.cols + i] = end;
            seen += std::max(0, end - first);
        }
        const size_t nk = (size_t) c.d*c.heads_kv*c.kv;
        a.q     = (const char *) upload(q);
        a.first = upload(ranges);
        a.end   = a.first + c.cols;
        a.k     = random(nk, 1);
        a.v     = random(nk, 99);
        a.q_nb2 = c.d*4;
        a.q_nb1 = a.q_nb2*c.heads_kv*c.gqa;
        a.k_nb2 = a.v_nb2 = c.d*2;
        a.k_nb1 = a.v_nb1 = a.k_nb2*c.heads_kv;
        a.n_kv   = c.kv;
        a.n_cols = c.cols;
        a.gqa    = c.gqa;
        a.n_heads_kv = c.heads_kv;
        a.n_heads    = c.heads_kv*c.gqa;
        a.n_tiles    = (c.cols*c.gqa + FATTN_RANGES_ROWS - 1)/FATTN_RANGES_ROWS;
        a.n_splits   = c.splits;
        a.scale      = 1.4426950408889634f/sqrtf(c.d);
        const size_t rows = (size_t) c.splits*c.heads_kv*a.n_tiles*FATTN_RANGES_ROWS;
        CHECK(cudaMalloc(&a.dst,  q.size()*4));
        CHECK(cudaMalloc(&a.part, rows*c.d*4));
        CHECK(cudaMalloc(&a.stat, rows*8));
        CHECK(cudaMemset(a.dst, 0xFF, q.size()*4));
    }

    ~bench() {
        for (const void * p : { (const void *) a.q, (const void *) a.first, (const void *) a.k, (const void *) a.v, (const void *) a.dst,
                                (const void *) a.part, (const void *) a.stat }) {
            CHECK(cudaFree((void *) p));
        }
    }

    template <typename T> static T * upload(const std::vector<T> & x) {
        T * p;
        CHECK(cudaMalloc(&p, x.size()*sizeof(T)));
        CHECK(cudaMemcpy(p, x.data(), x.size()*sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }

    static const char * random(const size_t n, const uint32_t seed) {
        __half * p;
        CHECK(cudaMalloc(&p, n*2));
        fill<<<1024, 256>>>(p, n, seed);
        return (const char *) p;
    }

    template <typename T> static std::vector<T> download(const void * p, const size_t n) {
        std::vector<T> x(n);
        CHECK(cudaMemcpy(x.data(), p, n*sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }

    // squared error against float64 over that of zeros, in 64 or more rows
    double error() const {
        const int heads = c.heads_kv*c.gqa;
        const auto out = download<float>(a.dst, q.size());
        const auto k   = download<__half>(a.k, (size_t) c.d*c.heads_kv*c.kv);
        const auto v   = download<__half>(a.v, k.size());
        const int n = std::min<int64_t>((int64_t) heads*c.cols, std::max<int64_t>(64, 20000000/(c.d*(int64_t) c.kv)));
        std::vector<double> wrong(16), total(16);
        std::vector<std::thread> threads;
        for (int t = 0; t < 16; ++t) {
            threads.emplace_back([&, t] {
                std::vector<double> p(c.kv), o(c.d);
                for (int64_t i = t; i < n; i += 16) {
                    const int col = i*2654435761u % c.cols, h = i % heads, lo = ranges[col], hi = ranges[c.cols + col];
                    const size_t at = ((size_t) col*heads + h)*c.d;
                    double top = -1e300, sum = 0;
                    for (int j = lo; j < hi; ++j) {
                        p[j] = 0;
                        for (int z = 0; z < c.d; ++z) {
                            p[j] += (double) q[at + z]*__half2float(k[((size_t) j*c.heads_kv + h/c.gqa)*c.d + z]);
                        }
                        p[j] /= sqrt((double) c.d);
                        top = std::max(top, p[j]);
                    }
                    std::fill(o.begin(), o.end(), 0.0);
                    for (int j = lo; j < hi; ++j) {
                        const double w = exp(p[j] - top);
                        sum += w;
                        for (int z = 0; z < c.d; ++z) {
                            o[z] += w*__half2float(v[((size_t) j*c.heads_kv + h/c.gqa)*c.d + z]);
                        }
                    }
                    for (int z = 0; z < c.d; ++z) {
                        const double r = sum > 0 ? o[z]/sum : 0, e = out[at + z] - r;
                        wrong[t] += e == e ? e*e : 1e30;
                        total[t] += r*r;
                    }
                }
            });
        }
        double w = 0, r = 1e-30;
        for (int t = 0; t < 16; ++t) {
            threads[t].join();
            w += wrong[t];
            r += total[t];
        }
        return w/r;
    }
};

static void check(const test & c) {
    bench b(c);
    run(b.a, c.d, 0);
    CHECK(cudaDeviceSynchronize());
    const double e = b.error();
    printf("head size %3d, %d x %d heads, %4d columns, %5d rows, kind %d, %d splits: NMSE %.1e %s\n", c.d, c.heads_kv, c.gqa, c.cols, c.kv, c.kind,
        c.splits, e, e < 1e-6 ? "" : "TOO MUCH");
}

int main(int argc, char ** argv) {
    const char * what = argc > 1 ? argv[1] : "check";
    if (!strcmp(what, "small")) {
        check({ 256, 2, 6, 50, 300, CAUSAL, 1 });
        check({ 128, 2, 4, 70, 301, RANDOM, 3 });
    } else if (!strcmp(what, "times")) {
        cudaStream_t stream;
        CHECK(cudaStreamCreate(&stream));
        for (int kv : { 2048, 10240, 32768, 131072 }) {
            for (int cols : { 128, 256, 512, 1024, 2048, 4096 }) {
                for (int splits : { 1, 2, 3, 4, 8 }) {
                    bench b({ 256, 4, 6, cols, kv, CAUSAL, splits });
                    if (cols <= kv && b.a.n_tiles*4*splits <= std::max(600, b.a.n_tiles*4)) {
                        const float ms = time_graph(stream, [&] { run(b.a, 256, stream); });
                        printf("%4d columns, %6d rows, %d splits: %8.3f ms, %3.0f TFLOP/s\n", cols, kv, splits, ms, b.seen*4*256*24/ms*1e-9);
                    }
                }
            }
        }
    } else {
        for (int splits : { 1, 3 }) {
            for (kind_t kind : { CAUSAL, WINDOW, RANDOM, OFFSET }) {
                for (int d : { 64, 128, 256 }) {
                    check({ d, 4, 6,  333, 5000, kind, splits });
                    check({ d, 3, 1,  129,  301, kind, splits });
                    check({ d, 2, 8,   65,  257, kind, splits });
                }
            }
            check({ 256, 4, 6, 2048, 32768, CAUSAL, splits });
        }
    }
    return 0;
}
