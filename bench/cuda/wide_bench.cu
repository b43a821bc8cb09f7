// Times what wide matrix products are made of, outside ggml: unpacking to FP16 and cuBLAS.
//
//   nvcc -O3 -std=c++17 -arch=native --expt-relaxed-constexpr -I <patched ggml>/include -I <patched ggml>/src \
//        -I <patched ggml>/src/ggml-cuda bench/cuda/wide_bench.cu -o wide_bench -lcublas
//   ./wide_bench unpack     time and bandwidth per type, 17,408 x 5,120 values: to FP16, and rows of both lengths to E4M3
//   ./wide_bench shapes     FP16 and BF16 products per shape of the 27B model and number of columns, FP32 sums
//   ./wide_bench model      all matrix products of a 27B batch in layer order, as one CUDA graph: each part, both, in parts of a matrix
//   ./wide_bench tiles      products that unpack the weights while they multiply, by columns of a tile, beside unpacking and cuBLAS
//                           (for Hopper: -gencode=arch=compute_90a,code=sm_90a in place of -arch=native)
//
// Weights are random bytes under fixed scales. The model's have 14.6 GB of their own, so that they are read from memory.

#include "mmw-unpack.cuh"
#include "mmw-e4m3.cuh"
#include "mmw-product-kernel.cuh"
#include "timing.cuh"

#include <cublas_v2.h>
#include <cstring>

#define BLAS(call) do { cublasStatus_t e_ = (call); if (e_ != CUBLAS_STATUS_SUCCESS) { \
    fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int) e_); exit(1); } } while (0)

static cublasHandle_t handle;
static float * alpha_beta; // 1, 0 on the device

// ---- random data --------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint32_t random_bits(uint64_t x) {
    x = (x ^ x >> 33)*0xff51afd7ed558ccdull;
    x = (x ^ x >> 33)*0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static __global__ void fill_bytes(uint32_t * p, const int64_t n) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) {
        p[i] = random_bits(i);
    }
}

// FP16 scales of blocks of `size` bytes, at byte `at` and, unless negative, `at2`
static __global__ void fill_scales(uint8_t * p, const int64_t blocks, const int size, const int at, const float a, const int at2, const float b) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < blocks; i += (int64_t) gridDim.x*blockDim.x) {
        *(half *) (p + i*size + at) = __float2half(a);
        if (at2 >= 0) {
            *(half *) (p + i*size + at2) = __float2half(b);
        }
    }
}

// about normal: the sum of four uniform numbers
template <typename T>
static __global__ void fill_normal(T * p, const int64_t n, const float scale) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) {
        const uint32_t a = random_bits(2*i), b = random_bits(2*i + 1);
        p[i] = (T) ((((a & 0xFFFF) + (a >> 16) + (b & 0xFFFF) + (float) (b >> 16))/65536.0f - 2.0f)*1.73f*scale);
    }
}

// ---- launches -----------------------------------------------------------------------------------------------------------

template <ggml_type type>
static void unpack(const void * w, half * y, const int64_t n, cudaStream_t s) {
    const int64_t per_block = 256*MMW_STEPS*MMW_UNIT;
    mmw_dequantise<type><<<(n + per_block - 1)/per_block, 256, 0, s>>>(w, y, n);
}

static void product(const void * w, const void * x, float * y, const int rows, const int cols, const int k, const int ldy, const cudaDataType_t t = CUDA_R_16F) {
    BLAS(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, rows, cols, k, alpha_beta, w, t, k, x, t, k, alpha_beta + 1, y, CUDA_R_32F, ldy,
        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP));
}

// ---- what is timed ------------------------------------------------------------------------------------------------------

template <ggml_type type>
static void time_unpack(const char * name, const int64_t values, const int64_t size, const int at, const int at2, cudaStream_t s) {
    const int64_t n = 17408ll*5120, bytes = n/values*size;
    const int copies = 6;
    uint8_t * w; half * y;
    CHECK(cudaMalloc(&w, copies*bytes)); CHECK(cudaMalloc(&y, n*sizeof(half)));
    fill_bytes<<<1056, 256, 0, s>>>((uint32_t *) w, copies*bytes/4);
    if (at >= 0) {
        fill_scales<<<1056, 256, 0, s>>>(w, copies*n/values, size, at, 2e-4f, at2, 1.5e-3f);
    }
    const float us = 1000*time_graph(s, [&] { for (int i = 0; i < copies; ++i) unpack<type>(w + i*bytes, y, n, s); })/copies;
    printf("%-7s %6.1f us, %5.0f GB/s read and written\n", name, us, (n*sizeof(half) + bytes)/us*1e-3);
    for (const int k : { 5120, 17408 }) {
        const int threads = (k/(MMW_UNIT*MMW_E4M3_KEEP) + 31)/32*32;
        const float rows_us = 1000*time_graph(s, [&] {
            for (int i = 0; i < copies; ++i) {
                mmw_rows_to_e4m3<type><<<n/k, threads, 0, s>>>(w + i*bytes, (char *) y, (float *) (y + n/2), nullptr, k);
            }
        })/copies;
        printf("%-7s %6.1f us, %5.0f GB/s to E4M3, rows of %d\n", name, rows_us, (n + bytes)/rows_us*1e-3, k);
    }
    CHECK(cudaFree(w)); CHECK(cudaFree(y));
}

static void time_shapes(cudaStream_t s) {
    half * w, * x; float * y;
    CHECK(cudaMalloc(&w, 17408ll*5120*2)); CHECK(cudaMalloc(&x, 4096ll*17408*2)); CHECK(cudaMalloc(&y, 4096ll*17408*4));
    const int shapes[][2] = { { 17408, 5120 }, { 5120, 17408 }, { 10240, 5120 }, { 6144, 5120 }, { 5120, 6144 }, { 12288, 5120 }, { 1024, 5120 }, { 48, 5120 } };
    printf("%-14s %5s | %9s %7s | %9s\n", "rows x k", "cols", "FP16 us", "TFLOP/s", "BF16 us");
    for (const auto & [rows, k] : shapes) {
        for (const int cols : { 65, 128, 256, 512, 1024, 2048, 4096 }) {
            const int reps = std::max(4, std::min(50, (int) (3e12/((double) rows*k*cols))));
            float us[2];
            for (const bool bf16 : { false, true }) {
                if (bf16) {
                    fill_normal<<<1056, 256, 0, s>>>((nv_bfloat16 *) w, (int64_t) rows*k, 0.02f);
                    fill_normal<<<1056, 256, 0, s>>>((nv_bfloat16 *) x, (int64_t) cols*k, 1.0f);
                } else {
                    fill_normal<<<1056, 256, 0, s>>>(w, (int64_t) rows*k, 0.02f);
                    fill_normal<<<1056, 256, 0, s>>>(x, (int64_t) cols*k, 1.0f);
                }
                us[bf16] = 1000*time_graph(s, [&] { for (int i = 0; i < reps; ++i) product(w, x, y, rows, cols, k, rows, bf16 ? CUDA_R_16BF : CUDA_R_16F); })/reps;
            }
            printf("%6d x %5d %5d | %9.1f %7.0f | %9.1f\n", rows, k, cols, us[0], 2e-6*rows*k*cols/us[0], us[1]);
        }
    }
    CHECK(cudaFree(w)); CHECK(cudaFree(x)); CHECK(cudaFree(y));
}

struct matrix { int rows, k; bool q6; size_t at; };

static std::vector<matrix> model(size_t & bytes) {
    std::vector<matrix> all;
    bytes = 0;
    const auto add = [&](const int rows, const int k, const bool q6) {
        all.push_back({ rows, k, q6, bytes });
        bytes += ((size_t) rows*k/256*(q6 ? 210 : 144) + 255)/256*256;
    };
    for (int i = 0; i < 64; ++i) {
        const bool better = i < 8 || i >= 56 || (i - 8) % 3 == 2;
        if ((i + 1) % 4 == 0) {
            add(12288, 5120, false); add(1024, 5120, false); add(1024, 5120, better);
        } else {
            add(10240, 5120, better); add(6144, 5120, false); add(48, 5120, false); add(48, 5120, false);
        }
        add(5120, 6144, false); add(17408, 5120, false); add(17408, 5120, false); add(5120, 17408, better);
    }
    return all;
}

static void time_model(cudaStream_t s) {
    size_t bytes;
    const std::vector<matrix> all = model(bytes);
    uint8_t * w; half * x, * scratch; float * y;
    CHECK(cudaMalloc(&w, bytes)); CHECK(cudaMalloc(&x, 4096ll*17408*2)); CHECK(cudaMalloc(&y, 4096ll*17408*4)); CHECK(cudaMalloc(&scratch, 17408ll*5120*2));
    fill_bytes<<<1056, 256, 0, s>>>((uint32_t *) w, bytes/4);
    fill_normal<<<1056, 256, 0, s>>>(x, 4096ll*17408, 1.0f);
    for (const matrix & m : all) {
        fill_scales<<<264, 256, 0, s>>>(w + m.at, (int64_t) m.rows*m.k/256, m.q6 ? 210 : 144, m.q6 ? 208 : 0, m.q6 ? 1e-5f : 2e-4f, m.q6 ? -1 : 2, 1.5e-3f);
    }
    const auto take = [&](const matrix & m, const int cols, const int64_t part, const bool unpacks, const bool multiplies) {
        const int parts = ((int64_t) m.rows*m.k*2 + part - 1)/part;
        const int rows  = std::min(m.rows, ((m.rows + parts - 1)/parts + 127)/128*128);
        for (int r = 0; r < m.rows; r += rows) {
            const int n = std::min(rows, m.rows - r);
            const uint8_t * from = w + m.at + (size_t) r*m.k/256*(m.q6 ? 210 : 144);
            if (unpacks) {
                m.q6 ? unpack<GGML_TYPE_Q6_K>(from, scratch, (int64_t) n*m.k, s) : unpack<GGML_TYPE_Q4_K>(from, scratch, (int64_t) n*m.k, s);
            }
            if (multiplies) {
                product(scratch, x, y + r, n, cols, m.k, m.rows);
            }
        }
    };
    struct variant { const char * name; int64_t mib; bool unpacks, multiplies; };
    for (const int cols : { 128, 256, 512, 1024, 2048, 4096 }) {
        for (const variant & v : { variant{ "unpack", 192, true, false }, { "multiply", 192, false, true }, { "both", 192, true, true }, { "both, parts of 96 MiB", 96, true, true },
                                   { "both, parts of 24 MiB", 24, true, true } }) {
            const float ms = time_graph(s, [&] { for (const matrix & m : all) take(m, cols, v.mib << 20, v.unpacks, v.multiplies); });
            printf("%5d columns, %-22s %8.1f ms, %6.1f us per token\n", cols, v.name, ms, 1000*ms/cols);
        }
    }
}

template <mmn_type type, int tn>
static void multiply_tiles(mmwp_args args, cudaStream_t s) {
    constexpr int tile_rows = ggml_cuda_mmwp_rows(tn), smem = mmwp_smem_bytes<type, tn>;
    args.n_row_tiles = (args.mat[0].rows + tile_rows - 1)/tile_rows;
    args.n_col_tiles = (args.cols + tn - 1)/tn;
    CHECK(cudaFuncSetAttribute((const void *) mmwp_product<type, tn, MMWP_DENSE>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    const int blocks = std::min(n_sm, (args.n_row_tiles*args.n_col_tiles*args.n_steps + 2)/3);
    launch(s, mmwp_product<type, tn, MMWP_DENSE>, dim3(blocks), MMWP_THREADS, smem, args);
}

template <ggml_type type, mmn_type row>
static void time_tiles(const char * name, const int64_t values, const int64_t size, const int at, const int at2, cudaStream_t s) {
    for (const auto & [rows, k] : { std::pair{ 17408, 5120 }, std::pair{ 5120, 17408 } }) {
        const int64_t n = (int64_t) rows*k, bytes = n/values*size;
        const int copies = 4, most = 2048;
        uint8_t * w; half * x, * scratch; float * y, * part, * scale; int * done;
        CHECK(cudaMalloc(&w, copies*bytes)); CHECK(cudaMalloc(&x, 2ll*most*k)); CHECK(cudaMalloc(&scratch, 2*n)); CHECK(cudaMalloc(&y, 4ll*most*rows));
        CHECK(cudaMalloc(&part, 4ll*n_sm*256*128)); CHECK(cudaMalloc(&scale, 4*most)); CHECK(cudaMalloc(&done, 4*n_sm));
        fill_bytes<<<1056, 256, 0, s>>>((uint32_t *) w, copies*bytes/4);
        if (at >= 0) {
            fill_scales<<<1056, 256, 0, s>>>(w, copies*n/values, size, at, 2e-4f, at2, 1.5e-3f);
        }
        fill_normal<<<1056, 256, 0, s>>>(x, (int64_t) most*k, 1.0f);
        fill_normal<<<8, 256, 0, s>>>(scale, most, 1.0f);
        CHECK(cudaMemsetAsync(done, 0, 4*n_sm, s));
        for (const int cols : { 96, 128, 256, 512, 1024, 2048 }) {
            mmwp_args args = {};
            args.mat[0]   = { nullptr, y, rows, rows, 0, nullptr, nullptr };
            args.n_mat    = 1;
            args.n_steps  = k/256;
            args.k        = k;
            args.cols     = cols;
            args.stride_w = k/values*size;
            args.x        = (const char *) x;
            args.scale    = scale;
            args.width    = cols;
            args.part     = part;
            args.done     = done;
            args.early    = true;
            const auto each = [&](const auto & body) {
                return 1000*time_graph(s, [&] { for (int i = 0; i < 2*copies; ++i) { args.mat[0].w = (const char *) w + i%copies*bytes; body(); } })/(2*copies);
            };
            const float us[] = { each([&] { multiply_tiles<row,  96>(args, s); }), each([&] { multiply_tiles<row, 128>(args, s); }),
                each([&] { multiply_tiles<row, 256>(args, s); }),
                each([&] { unpack<type>(args.mat[0].w, scratch, n, s); product(scratch, x, y, rows, cols, k, rows); }) };
            printf("%-6s %6d x %5d %5d | tiles of 96, 128, 256: %7.1f %7.1f %7.1f us, %4.0f TFLOP/s | unpacked, cuBLAS %7.1f us\n", name, rows, k, cols,
                us[0], us[1], us[2], 2e-6*n*cols/std::min({ us[0], us[1], us[2] }), us[3]);
        }
        for (void * p : { (void *) w, (void *) x, (void *) scratch, (void *) y, (void *) part, (void *) scale, (void *) done }) {
            CHECK(cudaFree(p));
        }
    }
}

int main(int argc, char ** argv) {
    cudaDeviceProp properties;
    cudaStream_t s = open_device(properties);
    void * workspace;
    CHECK(cudaMalloc(&workspace, 32 << 20)); CHECK(cudaMalloc(&alpha_beta, 8));
    const float one_zero[2] = { 1.0f, 0.0f };
    CHECK(cudaMemcpy(alpha_beta, one_zero, 8, cudaMemcpyHostToDevice));
    BLAS(cublasCreate(&handle)); BLAS(cublasSetStream(handle, s)); BLAS(cublasSetWorkspace(handle, workspace, 32 << 20));
    BLAS(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_DEVICE));
    const char * what = argc > 1 ? argv[1] : "model";
    if (strcmp(what, "unpack") == 0) {
        time_unpack<GGML_TYPE_Q4_K>  ("q4_K",   256, 144,   0,  2, s);
        time_unpack<GGML_TYPE_Q5_K>  ("q5_K",   256, 176,   0,  2, s);
        time_unpack<GGML_TYPE_Q6_K>  ("q6_K",   256, 210, 208, -1, s);
        time_unpack<GGML_TYPE_Q8_0>  ("q8_0",    32,  34,   0, -1, s);
        time_unpack<GGML_TYPE_Q4_0>  ("q4_0",    32,  18,   0, -1, s);
        time_unpack<GGML_TYPE_IQ4_NL>("iq4_nl",  32,  18,   0, -1, s);
        time_unpack<GGML_TYPE_IQ4_XS>("iq4_xs", 256, 136,   0, -1, s);
        time_unpack<GGML_TYPE_NVFP4> ("nvfp4",   64,  36,  -1, -1, s);
        time_unpack<GGML_TYPE_MXFP4> ("mxfp4",   32,  17,  -1, -1, s);
    } else if (strcmp(what, "shapes") == 0) {
        time_shapes(s);
    } else if (strcmp(what, "tiles") == 0) {
        time_tiles<GGML_TYPE_Q4_K,  MMN_Q4_K> ("q4_K",  256, 144,   0,  2, s);
        time_tiles<GGML_TYPE_Q5_K,  MMN_Q5_K> ("q5_K",  256, 176,   0,  2, s);
        time_tiles<GGML_TYPE_Q6_K,  MMN_Q6_K> ("q6_K",  256, 210, 208, -1, s);
        time_tiles<GGML_TYPE_Q8_0,  MMN_Q8_0> ("q8_0",   32,  34,   0, -1, s);
        time_tiles<GGML_TYPE_MXFP4, MMN_MXFP4>("mxfp4",  32,  17,  -1, -1, s);
    } else {
        time_model(s);
    }
    return 0;
}
