#pragma once

// What the benchmarks here share: launches, the time of a CUDA graph, the bandwidths that times are compared with.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(call) do { cudaError_t e_ = (call); if (e_ != cudaSuccess) { \
    fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); exit(1); } } while (0)

static int n_sm;
static int use_pdl = 1; // programmatic dependent launches

template <typename K, typename... A>
static void launch(cudaStream_t stream, K kernel, dim3 grid, int block, int smem, A... args) {
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = use_pdl;
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = grid;
    cfg.blockDim = dim3(block);
    cfg.dynamicSmemBytes = smem;
    cfg.stream = stream;
    cfg.attrs = &attr;
    cfg.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&cfg, kernel, args...));
}

// median milliseconds of a replay of what `body` launches
static float time_graph(cudaStream_t s, const std::function<void()> & body, int reps = 5) {
    cudaGraph_t g; cudaGraphExec_t e;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    body();
    CHECK(cudaStreamEndCapture(s, &g));
    CHECK(cudaGraphInstantiate(&e, g, 0));
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b));
    std::vector<float> t;
    for (int i = 0; i < reps + 1; ++i) {
        CHECK(cudaEventRecord(a, s));
        CHECK(cudaGraphLaunch(e, s));
        CHECK(cudaEventRecord(b, s));
        CHECK(cudaEventSynchronize(b));
        float ms; CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i) t.push_back(ms);
    }
    CHECK(cudaGraphExecDestroy(e)); CHECK(cudaGraphDestroy(g));
    CHECK(cudaEventDestroy(a)); CHECK(cudaEventDestroy(b));
    std::sort(t.begin(), t.end());
    return t[t.size()/2];
}

static __global__ void copy(const uint4 * a, uint4 * b, const int64_t n) {
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) {
        b[i] = a[i];
    }
}

static __global__ void read(const uint4 * a, uint4 * b, const int64_t n) {
    uint4 s = make_uint4(0, 0, 0, 0);
#pragma unroll 8
    for (int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x; i < n; i += (int64_t) gridDim.x*blockDim.x) {
        const uint4 v = __ldcs(a + i);
        s.x ^= v.x; s.y ^= v.y; s.z ^= v.z; s.w ^= v.w;
    }
    if (s.x == 1 && s.y == 2 && s.z == 3 && s.w == 4) {
        b[0] = s;
    }
}

// TB/s of the faster copy, bytes read plus bytes written
static double copy_bandwidth(cudaStream_t s) {
    char * a, * b;
    const size_t n = 4ull << 30;
    CHECK(cudaMalloc(&a, n)); CHECK(cudaMalloc(&b, n));
    CHECK(cudaMemset(a, 7, n));
    const float t0 = time_graph(s, [&]() { CHECK(cudaMemcpyAsync(b, a, n, cudaMemcpyDeviceToDevice, s)); });
    const float t1 = time_graph(s, [&]() { copy<<<n_sm*16, 512, 0, s>>>((const uint4 *) a, (uint4 *) b, n/16); });
    const float t2 = time_graph(s, [&]() { read<<<n_sm*4, 512, 0, s>>>((const uint4 *) a, (uint4 *) b, n/16); });
    printf("memcpy %.2f TB/s, copy kernel %.2f TB/s, read-only kernel %.2f TB/s\n", 2.0*n/t0*1e-9, 2.0*n/t1*1e-9, 1.0*n/t2*1e-9);
    CHECK(cudaFree(a)); CHECK(cudaFree(b));
    return 2.0*n/std::min(t0, t1)*1e-9;
}

// the first device's facts, and a stream of its own
static cudaStream_t open_device(cudaDeviceProp & p) {
    CHECK(cudaGetDeviceProperties(&p, 0));
    n_sm = p.multiProcessorCount;
    cudaStream_t s; CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}
