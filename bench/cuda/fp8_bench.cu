// Times one wide product with 8-bit operands beside FP16, outside ggml: cuBLASLt with E4M3, a scale per row of the weights and one per
// column, sums in FP32, results in F32; with fast accumulation and without; with one scale per operand for comparison.
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a bench/cuda/fp8_bench.cu -o fp8_bench -lcublasLt -lcublas
//   ./fp8_bench             17,408 x 5,120 and 5,120 x 17,408 at 512, 1,024 and 4,096 columns
//   ./fp8_bench all         the other shapes of the 27B model too
//
// NMSE: against float64 products of the unrounded operands, and of the rounded ones (what sums alone lose), over 4,096 values. Weights and
// activations are about normal; -o gives every column one activation that is 100 times as large.

#include "timing.cuh"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstring>

#define BLAS(call) do { cublasStatus_t e_ = (call); if (e_ != CUBLAS_STATUS_SUCCESS) { \
    fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int) e_); exit(1); } } while (0)

static const int samples = 4096;

static __device__ __forceinline__ uint32_t random_bits(uint64_t x) {
    x = (x ^ x >> 33)*0xff51afd7ed558ccdull;
    x = (x ^ x >> 33)*0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

// about normal: the sum of four uniform numbers
static __global__ void fill_normal(float * p, const int64_t n, const uint64_t seed, const float scale) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) {
        const uint32_t a = random_bits(seed + 2*i), b = random_bits(seed + 2*i + 1);
        p[i] = ((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (float) (b >> 16))/65536.0f*1.73f*scale - 3.46f*scale;
    }
}

static __global__ void add_outliers(float * p, const int k) {
    p[(int64_t) blockIdx.x*k + random_bits(blockIdx.x) % k] *= 100.0f;
}

// a block per row: FP16, and E4M3 with the scale that brings the largest magnitude to 448
static __global__ void round_rows(const float * x, half * h, __nv_fp8_storage_t * q, float * scale, const int k) {
    x += (int64_t) blockIdx.x*k;
    h += (int64_t) blockIdx.x*k;
    q += (int64_t) blockIdx.x*k;
    __shared__ uint32_t max;
    if (threadIdx.x == 0) {
        max = 0;
    }
    __syncthreads();
    uint32_t m = 0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        m = ::max(m, __float_as_uint(x[i]) & 0x7FFFFFFF);
    }
    atomicMax(&max, m);
    __syncthreads();
    const float s = __uint_as_float(max)/448.0f;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        h[i] = __float2half(x[i]);
        q[i] = __nv_cvt_float_to_fp8(x[i]/s, __NV_SATFINITE, __NV_E4M3);
    }
    if (threadIdx.x == 0) {
        scale[blockIdx.x] = s;
    }
}

static __device__ __forceinline__ double value(const float * p, const int64_t i) { return p[i]; }
static __device__ __forceinline__ double value(const __nv_fp8_storage_t * p, const int64_t i) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(p[i], __NV_E4M3)));
}

// sums[0] += (y - product)^2, sums[1] += product^2; a block per sample
template <typename T>
static __global__ void compare(const T * w, const T * x, const float * sw, const float * sx, const float * y, const int rows, const int cols, const int k, double * sums) {
    const int row = random_bits(2*blockIdx.x)     % rows;
    const int col = random_bits(2*blockIdx.x + 1) % cols;
    double s = 0;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        s += value(w, (int64_t) row*k + i)*value(x, (int64_t) col*k + i);
    }
    for (int o = 16; o > 0; o >>= 1) {
        s += __shfl_xor_sync(0xFFFFFFFF, s, o);
    }
    if (threadIdx.x == 0) {
        s *= sw != nullptr ? (double) sw[row]*sx[col] : 1.0;
        const double d = y[(int64_t) col*rows + row] - s;
        atomicAdd(sums, d*d);
        atomicAdd(sums + 1, s*s);
    }
}

struct data {
    float * w, * x, * y, * sw, * sx;
    half * hw, * hx;
    __nv_fp8_storage_t * qw, * qx;
    double * sums;
    char * workspace;
};

static const size_t workspace_bytes = 32 << 20;

template <typename T>
static double nmse(const T * w, const T * x, const float * sw, const float * sx, const float * y, const int rows, const int cols, const int k, double * sums, cudaStream_t s) {
    double host[2];
    CHECK(cudaMemsetAsync(sums, 0, sizeof(host), s));
    compare<<<samples, 32, 0, s>>>(w, x, sw, sx, y, rows, cols, k, sums);
    CHECK(cudaMemcpyAsync(host, sums, sizeof(host), cudaMemcpyDeviceToHost, s));
    CHECK(cudaStreamSynchronize(s));
    return host[0]/host[1];
}

// E4M3 product; false if cuBLASLt has none
struct lt_product {
    cublasLtMatmulDesc_t   op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulHeuristicResult_t found;
    bool ok = false;

    lt_product(cublasLtHandle_t lt, const data & t, const int rows, const int cols, const int k, const bool outer, const bool fast, const cudaDataType_t out) {
        const cublasOperation_t yes = CUBLAS_OP_T, no = CUBLAS_OP_N;
        const int8_t fast_accum = fast;
        BLAS(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &yes, sizeof(yes)));
        BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &no, sizeof(no)));
        BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_accum, sizeof(fast_accum)));
        if (outer) {
            const int32_t mode = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof(mode)));
            BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof(mode)));
        }
        BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &t.sw, sizeof(t.sw)));
        BLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &t.sx, sizeof(t.sx)));
        BLAS(cublasLtMatrixLayoutCreate(&a, CUDA_R_8F_E4M3, k, rows, k));
        BLAS(cublasLtMatrixLayoutCreate(&b, CUDA_R_8F_E4M3, k, cols, k));
        BLAS(cublasLtMatrixLayoutCreate(&d, out, rows, cols, rows));
        cublasLtMatmulPreference_t preference;
        BLAS(cublasLtMatmulPreferenceCreate(&preference));
        BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes)));
        int n = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt, op, a, b, d, d, preference, 1, &found, &n);
        BLAS(cublasLtMatmulPreferenceDestroy(preference));
        ok = status == CUBLAS_STATUS_SUCCESS && n > 0;
        if (!ok) {
            printf("  no kernel: %s scales, %s accumulation, %s results: status %d\n", outer ? "outer" : "single", fast ? "fast" : "full",
                out == CUDA_R_32F ? "F32" : "BF16", (int) status);
        }
    }
    ~lt_product() {
        cublasLtMatrixLayoutDestroy(a); cublasLtMatrixLayoutDestroy(b); cublasLtMatrixLayoutDestroy(d); cublasLtMatmulDescDestroy(op);
    }
    void run(cublasLtHandle_t lt, const data & t, cudaStream_t s) const {
        const float one = 1.0f, zero = 0.0f;
        BLAS(cublasLtMatmul(lt, op, &one, t.qw, a, t.qx, b, &zero, t.y, d, t.y, d, &found.algo, t.workspace, workspace_bytes, s));
    }
};

int main(int argc, char ** argv) {
    bool all = false, outliers = false;
    for (int i = 1; i < argc; ++i) {
        all      = all      || strcmp(argv[i], "all") == 0;
        outliers = outliers || strcmp(argv[i], "-o") == 0;
    }
    cudaDeviceProp p;
    cudaStream_t s = open_device(p);
    printf("%s, cuBLASLt %zu%s\n", p.name, cublasLtGetVersion(), outliers ? ", an activation of 100 times per column" : "");
    const int64_t most_w = 17408ll*5120, most_x = 17408ll*4096;
    data t;
    CHECK(cudaMalloc(&t.w,  4*most_w)); CHECK(cudaMalloc(&t.x,  4*most_x)); CHECK(cudaMalloc(&t.y, 4*most_x));
    CHECK(cudaMalloc(&t.hw, 2*most_w)); CHECK(cudaMalloc(&t.hx, 2*most_x));
    CHECK(cudaMalloc(&t.qw, most_w));   CHECK(cudaMalloc(&t.qx, most_x));
    CHECK(cudaMalloc(&t.sw, 4*17408));  CHECK(cudaMalloc(&t.sx, 4*4096));
    CHECK(cudaMalloc(&t.sums, 2*sizeof(double)));
    CHECK(cudaMalloc(&t.workspace, workspace_bytes));
    cublasHandle_t handle;
    BLAS(cublasCreate(&handle));
    BLAS(cublasSetStream(handle, s));
    BLAS(cublasSetWorkspace(handle, t.workspace, workspace_bytes));
    const cublasLtHandle_t lt = (cublasLtHandle_t) handle; // cuBLAS' handles are cuBLASLt's too
    const float one = 1.0f, zero = 0.0f;

    printf("%-14s %5s  %-18s %9s %8s  %9s %9s\n", "rows x k", "cols", "operands", "us", "TFLOP/s", "NMSE", "of sums");
    const int shapes[][2] = { { 17408, 5120 }, { 5120, 17408 }, { 10240, 5120 }, { 12288, 5120 }, { 6144, 5120 }, { 5120, 6144 }, { 1024, 5120 }, { 48, 5120 } };
    for (int i = 0; i < (all ? 8 : 2); ++i) {
        const int rows = shapes[i][0], k = shapes[i][1];
        for (const int cols : { 256, 512, 1024, 4096 }) {
            if (cols == 256 && !all) {
                continue;
            }
            fill_normal<<<1056, 256, 0, s>>>(t.w, (int64_t) rows*k, 0, 0.02f);
            fill_normal<<<1056, 256, 0, s>>>(t.x, (int64_t) cols*k, 1ull << 40, 1.0f);
            if (outliers) {
                add_outliers<<<cols, 1, 0, s>>>(t.x, k);
            }
            round_rows<<<rows, 256, 0, s>>>(t.w, t.hw, t.qw, t.sw, k);
            round_rows<<<cols, 256, 0, s>>>(t.x, t.hx, t.qx, t.sx, k);
            CHECK(cudaStreamSynchronize(s));
            const int reps = std::max(10, std::min(100, (int) (2e13/((double) rows*k*cols))));
            const auto report = [&](const char * name, const std::function<void()> & run, const bool scored, const bool eight) {
                CHECK(cudaMemsetAsync(t.y, 0xFF, 4ll*rows*cols, s));
                const double us = 1000*time_graph(s, [&] { for (int r = 0; r < reps; ++r) run(); })/reps;
                printf("%6d x %5d %5d  %-18s %9.1f %8.0f", rows, k, cols, name, us, 2e-6*rows*k*cols/us);
                if (scored) {
                    printf("  %9.2e", nmse(t.w, t.x, nullptr, nullptr, t.y, rows, cols, k, t.sums, s));
                }
                if (eight) {
                    printf(" %9.2e", nmse(t.qw, t.qx, t.sw, t.sx, t.y, rows, cols, k, t.sums, s));
                }
                printf("\n");
                fflush(stdout);
            };
            report("FP16", [&] {
                BLAS(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, rows, cols, k, &one, t.hw, CUDA_R_16F, k, t.hx, CUDA_R_16F, k, &zero, t.y, CUDA_R_32F, rows,
                    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP));
            }, true, false);
            for (const bool fast : { false, true }) {
                const lt_product outer(lt, t, rows, cols, k, true, fast, CUDA_R_32F);
                if (outer.ok) {
                    report(fast ? "E4M3 fast" : "E4M3", [&] { outer.run(lt, t, s); }, true, true);
                } else {
                    const lt_product bf16(lt, t, rows, cols, k, true, fast, CUDA_R_16BF);
                    if (bf16.ok) {
                        report(fast ? "E4M3 fast, BF16 out" : "E4M3, BF16 out", [&] { bf16.run(lt, t, s); }, false, false);
                    }
                }
            }
            for (const bool fast : { false, true }) {
                const lt_product single(lt, t, rows, cols, k, false, fast, CUDA_R_32F);
                if (single.ok) { // by the first scale of each: timed only
                    report(fast ? "one scale, fast" : "one scale", [&] { single.run(lt, t, s); }, false, false);
                }
            }
        }
    }
    return 0;
}
