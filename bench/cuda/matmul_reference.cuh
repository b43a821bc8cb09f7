#pragma once

// Test data for matmul_bench.cu and its float64 reference, written from the definition of the formats.

#include "mmn-unpack-more.cuh"

#include <stdint.h>

// ---- reference ----------------------------------------------------------------------------------------------------------

// FP16 -> FP64 by hand, subnormals included
static __device__ double half_at(const uint8_t * p) {
    const int u = p[0] | (p[1] << 8), e = (u >> 10) & 31, m = u & 1023;
    const double v = e == 0 ? ldexp((double) m, -24) : ldexp((double) (m + 1024), e - 25);
    return u & 0x8000 ? -v : v;
}

// value i of a 256-block, from the definition of the formats
static __device__ double dequantise(const int type, const uint8_t * b, const int i) {
    switch (type) {
        case MMN_Q4_0: {
            b += 18*(i/32);
            const int j = i % 32;
            const int q = j < 16 ? b[2 + j] & 15 : b[2 + j - 16] >> 4;
            return half_at(b)*(q - 8);
        }
        case MMN_Q8_0:
            b += 34*(i/32);
            return half_at(b)*(int8_t) b[2 + i % 32];
        case MMN_Q4_K:
        case MMN_Q5_K: {
            const int j = i/32;
            const uint8_t * s = b + 4;
            const int sc = j < 4 ? s[j]     & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
            const int mn = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j]     >> 6) << 4);
            const uint8_t * qs = b + (type == MMN_Q4_K ? 16 : 48);
            int q = qs[32*(j/2) + i % 32];
            q = j % 2 ? q >> 4 : q & 15;
            if (type == MMN_Q5_K) {
                q |= ((b[16 + i % 32] >> j) & 1) << 4;
            }
            return half_at(b)*sc*q - half_at(b + 2)*mn;
        }
        case MMN_Q6_K: {
            const int h = i/128, l = i % 32, j = (i % 128)/32;
            const int lo = b[64*h + 32*(j % 2) + l];
            const int hi = b[128 + 32*h + l];
            const int q = ((j < 2 ? lo & 15 : lo >> 4) | (((hi >> 2*j) & 3) << 4)) - 32;
            return half_at(b + 208)*(int8_t) b[192 + i/16]*q;
        }
        case MMN_IQ4_XS: {
            const int values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
            const int j = i/32;
            const int low = (b[4 + j/2] >> 4*(j % 2)) & 15;
            const int sc = low | ((((b[2] | (b[3] << 8)) >> 2*j) & 3) << 4);
            const int q = b[8 + 16*j + i % 16];
            return half_at(b)*(sc - 32)*values[i % 32 < 16 ? q & 15 : q >> 4];
        }
        case MMN_Q4_1: {
            b += 20*(i/32);
            const int q = b[4 + i % 16];
            return half_at(b)*(i % 32 < 16 ? q & 15 : q >> 4) + half_at(b + 2);
        }
        case MMN_IQ4_NL: {
            const int values[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };
            b += 18*(i/32);
            const int q = b[2 + i % 16];
            return half_at(b)*values[i % 32 < 16 ? q & 15 : q >> 4];
        }
        case MMN_NVFP4:
        case MMN_MXFP4: {
            const double values[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
            int q;
            double scale;
            if (type == MMN_NVFP4) {
                b += 36*(i/64);
                const int sc = b[(i % 64)/16];
                scale = sc == 127 ? 0.0 : sc < 8 ? ldexp((double) sc, -9) : ldexp(8.0 + sc % 8, sc/8 - 10);
                q = b[4 + 8*((i % 64)/16) + i % 8];
                q = i % 16 < 8 ? q & 15 : q >> 4;
            } else {
                b += 17*(i/32);
                scale = ldexp(1.0, b[0] - 127);
                q = b[1 + i % 16];
                q = i % 32 < 16 ? q & 15 : q >> 4;
            }
            return (q < 8 ? scale : -scale)*values[q % 8];
        }
        case MMN_Q2_K: {
            const int q = (b[16 + 32*(i/128) + i % 32] >> 2*((i % 128)/32)) & 3;
            return half_at(b + 80)*(b[i/16] & 15)*q - half_at(b + 82)*(b[i/16] >> 4);
        }
        case MMN_Q3_K: {
            const int low  = (b[32 + 32*(i/128) + i % 32] >> 2*((i % 128)/32)) & 3;
            const int high = (b[i % 32] >> i/32) & 1;
            const int j = i/16; // 16 scales: 8 bytes with 4 bits of two, 4 bytes with 2 bits of four
            const int sc = ((b[96 + j % 8] >> 4*(j/8)) & 15) | (((b[104 + j % 4] >> 2*(j/4)) & 3) << 4);
            return half_at(b + 108)*(sc - 32)*(low + 4*high - 4);
        }
        case MMN_IQ3_XXS: {
            const uint8_t * a = b + 66 + 4*(i/32);
            const uint32_t w = a[0] | (a[1] << 8) | (a[2] << 16) | ((uint32_t) a[3] << 24);
            const uint32_t seven = (w >> 7*((i % 32)/8)) & 127;
            const uint32_t sign = seven | ((__popc(seven) & 1) << 7);
            const int v = (iq3xxs_grid[b[2 + i/4]] >> 8*(i % 4)) & 255;
            return half_at(b)*(2*(w >> 28) + 1)/4*((sign >> i % 8) & 1 ? -v : v);
        }
        case MMN_F16:
            return half_at(b + 2*i);
        default:
            return (double) __uint_as_float((uint32_t) (b[2*i] | (b[2*i + 1] << 8)) << 16);
    }
}

// q8: activations rounded to 8 bits with one scale per 32 values, as the stock quantised kernels do
static __global__ void reference(const int type, const uint8_t * w, const int64_t stride, const float * x, const int k,
                                 const int rows, double * dst, const bool q8) {
    const int row = blockIdx.x, col = blockIdx.y;
    double s = 0.0;
    for (int b = threadIdx.x; b < k/32; b += 32) {
        float scale = 0.0f;
        for (int j = 0; j < 32; ++j) {
            scale = fmaxf(scale, fabsf(x[(int64_t) col*k + b*32 + j]));
        }
        scale /= 127.0f;
        for (int j = 0; j < 32; ++j) {
            const int i = b*32 + j;
            double v = x[(int64_t) col*k + i];
            if (q8) {
                v = scale == 0.0f ? 0.0 : (double) scale*roundf((float) v/scale);
            }
            s += v*dequantise(type, w + row*stride + (i/256)*((int64_t) (stride/(k/256))), i % 256);
        }
    }
    for (int o = 16; o > 0; o >>= 1) {
        s += __shfl_xor_sync(0xFFFFFFFF, s, o);
    }
    if (threadIdx.x == 0) {
        dst[(int64_t) col*rows + row] = s;
    }
}

// ---- data ---------------------------------------------------------------------------------------------------------------

static __device__ uint32_t hash(uint64_t v) {
    v = (v ^ (v >> 30))*0xbf58476d1ce4e5b9ull;
    v = (v ^ (v >> 27))*0x94d049bb133111ebull;
    return (uint32_t) (v ^ (v >> 31));
}

static __device__ void put_half(uint8_t * p, const float v) {
    const __half h = __float2half(v);
    const unsigned short u = *(const unsigned short *) &h;
    p[0] = u & 255;
    p[1] = u >> 8;
}

// random bytes with scales of a realistic size, one thread per 256-block; wild: some blocks are much larger, smaller or zero
static __global__ void fill_weights(const int type, uint8_t * w, const int64_t blocks, const int bytes, const uint64_t seed, const bool wild) {
    const int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x;
    if (i >= blocks) {
        return;
    }
    uint8_t * b = w + i*bytes;
    for (int j = 0; j < bytes; j += 2) {
        const uint32_t r = hash(seed + i*1024 + j);
        float n = 0.03f*((int) (r & 0xFFFF) - 32768)/32768.0f;
        if (type == MMN_F16) {
            put_half(b + j, n);
        } else if (type == MMN_BF16) {
            const uint32_t u = __float_as_uint(n);
            b[j] = (u >> 16) & 255;
            b[j + 1] = u >> 24;
        } else {
            b[j] = r & 255;
            b[j + 1] = (r >> 8) & 255;
        }
    }
    float u = 0.5f + (hash(seed + i*1024 + 1001) & 1023)/1024.0f;
    const int rare = hash(seed + i*1024 + 1003) % 32;
    if (wild) {
        u *= rare == 0 ? 30.0f : rare == 1 ? 0.0f : rare == 2 ? 0.01f : 1.0f;
    }
    switch (type) {
        case MMN_Q4_0: for (int j = 0; j < 8; ++j) put_half(b + 18*j, (0.002f + 0.001f*(hash(seed + i*1024 + 600 + j) & 7))*u); break;
        case MMN_Q8_0: for (int j = 0; j < 8; ++j) put_half(b + 34*j, (0.0002f + 0.0001f*(hash(seed + i*1024 + 600 + j) & 7))*u); break;
        case MMN_Q4_K: put_half(b, 0.0001f*u); put_half(b + 2, 0.0008f*u); break;
        case MMN_Q5_K: if (wild) { put_half(b, 0.0001f*u); put_half(b + 2, 0.0008f*u); break; } b[0] = hash(seed + i*1024 + 1002) & 255; b[1] = 3; put_half(b + 2, 0.0008f*u); break;
        case MMN_IQ4_XS: put_half(b, 0.00003f*u); break;
        case MMN_Q4_1: for (int j = 0; j < 8; ++j) { const float d = (0.002f + 0.001f*(hash(seed + i*1024 + 600 + j) & 7))*u; put_half(b + 20*j, d); put_half(b + 20*j + 2, -7.3f*d); } break;
        case MMN_IQ4_NL: for (int j = 0; j < 8; ++j) put_half(b + 18*j, (0.0002f + 0.0001f*(hash(seed + i*1024 + 600 + j) & 7))*u); break;
        case MMN_NVFP4: for (int j = 0; j < 16; ++j) b[36*(j/4) + j % 4] = wild ? hash(seed + i*1024 + 600 + j) & 127 : 32 + (hash(seed + i*1024 + 600 + j) & 31); break;
        case MMN_MXFP4: for (int j = 0; j < 8; ++j) b[17*j] = 115 + (hash(seed + i*1024 + 600 + j) & (wild ? 15 : 3)); break;
        case MMN_Q2_K: put_half(b + 80, 0.001f*u); put_half(b + 82, 0.0012f*u); break;
        case MMN_Q3_K: put_half(b + 108, 0.0003f*u); break;
        case MMN_IQ3_XXS: put_half(b, 0.0003f*u); break;
        case MMN_Q6_K: if (wild) { put_half(b + 208, 0.00005f*u); break; } b[208] = 60 + (hash(seed + i*1024 + 1002) & 127); b[209] = 0; break; // subnormal, about 7e-6
        default: break;
    }
}

static __global__ void fill_x(float * x, const int64_t n, const uint64_t seed) {
    const int64_t i = blockIdx.x*(int64_t) blockDim.x + threadIdx.x;
    if (i < n) {
        float s = 0.0f;
        for (int j = 0; j < 4; ++j) {
            s += (hash(seed + 4*i + j) & 0xFFFF)/65536.0f - 0.5f;
        }
        x[i] = s*(hash(seed*3 + i) % 97 == 0 ? 20.0f : 1.7f); // some outliers
    }
}
