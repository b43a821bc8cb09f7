// What racecheck of compute-sanitizer makes of barriers between some warps of a block.
//
//   nvcc -O3 -std=c++17 -arch=native -lineinfo bench/cuda/named_barriers.cu -o named_barriers
//   compute-sanitizer --tool racecheck ./named_barriers
//
// The same exchange with every form of barrier, a kernel each: the warps of a share write a tile, meet, read what the others wrote, and
// meet again before the next tile. At the end all shares meet, write, meet (__syncthreads) and read what another share wrote. `missing`
// leaves the second barrier of a step out, a real race that the tool must find; every other kernel is right, and the program says so
// where a sum is wrong. `uneven`: every second share has a step less, and so has met less often where it comes to __syncthreads.

#include <cstdio>
#include <cstdlib>

#define CHECK(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); exit(1); } } while (0)

enum form { missing, whole_block, whole_block_named, switched, in_register, unaligned };

// the warps of share sh, n_threads of them
template <form f, int n_threads>
static __device__ __forceinline__ void meet(const int sh) {
    if constexpr (f == whole_block || f == missing) {
        __syncthreads();
    } else if constexpr (f == whole_block_named) {
        asm volatile("bar.sync 1, %0;" :: "r"((int) blockDim.x) : "memory");
    } else if constexpr (f == switched) {
        switch (sh) {
            case 0:  asm volatile("bar.sync 1, %0;" :: "n"(n_threads) : "memory"); break;
            case 1:  asm volatile("bar.sync 2, %0;" :: "n"(n_threads) : "memory"); break;
            case 2:  asm volatile("bar.sync 3, %0;" :: "n"(n_threads) : "memory"); break;
            default: asm volatile("bar.sync 4, %0;" :: "n"(n_threads) : "memory"); break;
        }
    } else if constexpr (f == in_register) {
        asm volatile("bar.sync %0, %1;" :: "r"(sh + 1), "n"(n_threads) : "memory");
    } else {
        asm volatile("barrier.sync %0, %1;" :: "r"(sh + 1), "n"(n_threads) : "memory");
    }
}

template <form f, bool uneven, int shares, int warps>
static __global__ void exchange(const int all_steps, int * sums) {
    constexpr int n = 32*warps;
    __shared__ int tile[shares][n];
    __shared__ int last[shares][n];
    const int sh = threadIdx.x/n;
    const int ts = threadIdx.x%n;
    const int steps = all_steps - (uneven && sh % 2 == 1);
    int sum = 0;
    for (int step = 0; step < steps; ++step) {
        tile[sh][ts] = step*n + ts;
        meet<f, n>(sh);
        sum += tile[sh][n - 1 - ts];
        if constexpr (f != missing) {
            meet<f, n>(sh);
        }
    }
    __syncthreads();
    last[sh][ts] = sum;
    __syncthreads();
    sum += last[(sh + 1) % shares][ts];
    sums[blockIdx.x*blockDim.x + threadIdx.x] = sum;
}

template <form f, bool uneven, int shares, int warps>
static void run(const char * name) {
    constexpr int blocks = 4, steps = 5, n = 32*warps, total = blocks*shares*n;
    int * sums, got[total], bad = 0;
    CHECK(cudaMalloc(&sums, sizeof got));
    exchange<f, uneven, shares, warps><<<blocks, shares*n>>>(steps, sums);
    CHECK(cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(sums));
    for (int i = 0; i < total; ++i) {
        for (int k = 0; k < 2; ++k) {
            const int s = steps - (uneven && (i/n + k) % shares % 2 == 1);
            got[i] -= s*(s - 1)/2*n + s*(n - 1 - i%n);
        }
        bad += got[i] != 0;
    }
    printf("%-18s %s %d x %d warps: %d wrong\n", name, uneven ? "uneven" : "even  ", shares, warps, bad);
    fflush(stdout);
}

int main() {
#define EVEN(f)   run<f, false, 4, 2>(#f); run<f, false, 2, 4>(#f);
#define UNEVEN(f) run<f, true,  4, 2>(#f); run<f, true,  2, 4>(#f);
    EVEN(missing)
    EVEN(whole_block)
    EVEN(whole_block_named)
    EVEN(switched)   UNEVEN(switched)
    EVEN(in_register) UNEVEN(in_register)
    EVEN(unaligned)  UNEVEN(unaligned)
    return 0;
}
