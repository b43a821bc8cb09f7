#pragma once

// Matrix products with one column: dst[rows] = W[k, rows]^T * x[k], limited by reading W once.
//
// A candidate that no GPU has run yet (bench/notes-matmul.md). Beside a narrow product (mmn-product.cuh), every row belongs to one
// block: no partial sums cross the memory, so that what follows a product (a residual, a gated activation) is done where the product
// is, and each block computes the input for itself. A pass is a chain of products; what counts is how little lies between the last
// weights of one and the first result of the next.
//
// - One block per multiprocessor has a contiguous share of the units of 8 rows. Its warps share the k of every unit: items of
//   8 rows x 512 values, item i of the block goes to warp i % warps, which has a ring of its own, so that no barrier is between loads.
// - Two 256-blocks of a row are two rows of the tensor cores' A; x of the first is in the even columns of B, of the second in the
//   odd ones. Of the result the even columns of rows 0 .. 7 and the odd ones of rows 8 .. 15 are used.

#include "mmn-convert.cuh"
#include "mmn-unpack.cuh"

#define MMC_UNIT  8   // rows of a unit
#define MMC_KS    2   // 256-blocks of an item
#define MMC_BATCH 16  // units summed over the warps at a time
#define MMC_STEP_BYTES (MMN_STEP*2 + 64) // of x: fragments, sums over 32 values, scale

enum mmc_input {
    MMC_PLAIN,     // x
    MMC_GATE,      // x*sigmoid(y), y[2^head_bits, heads] with stride_y elements between heads
    MMC_HEAD_NORM, // rms_norm(x)*w*silu(y) per head of 128, strides between heads
    MMC_NORM,      // rms_norm(x)*w
};

struct mmc_matrix {
    const char  * w;
    float       * dst;
    const float * add;   // null, or [rows] that is added
    int           unit0; // first unit in the launch
};

struct mmc_args {
    mmc_matrix    mat[MMN_MAX_GROUP];
    int           n_mat;
    int           n_units;
    int           n_steps;  // k / MMN_STEP
    int64_t       stride_w;
    bool          early;    // weights and w are constant: they are read before the preceding kernel has finished
    bool          gated;    // two matrices: silu(first)*second goes to the first's dst; a unit is 4 rows of each
    int           input;    // mmc_input
    const float * x;
    const float * y;
    const float * w;
    int64_t       stride_x; // elements between heads
    int64_t       stride_y;
    int           head_bits;
    float         eps;
    float       * normed;   // null, or where the input of the products goes, which overlaps with no input
};

template <mmn_type type, int nw, int ns>
constexpr int mmc_ring_bytes = nw*ns*MMC_UNIT*mmn_pitch<type, MMC_KS>;
template <int nw>
constexpr int mmc_sum_bytes = 2*MMC_BATCH*nw*MMC_UNIT*(int) sizeof(float);

// As mmn_write_fragments makes them: what a lane has of a warp's 256 converted values. 8 of them, the sums of two sub-blocks (the same
// in 8 lanes), what undoes the scale.
struct mmn_fragment {
    uint4 f;
    uint2 sums;
    float back;
};

static __device__ __forceinline__ mmn_fragment mmn_make_fragment(const float4 v0, const float4 v1) {
    float m = fmaxf(fmaxf(fabsf(v0.x), fabsf(v0.y)), fmaxf(fabsf(v0.z), fabsf(v0.w)));
    m = fmaxf(m, fmaxf(fmaxf(fabsf(v1.x), fabsf(v1.y)), fmaxf(fabsf(v1.z), fabsf(v1.w))));
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, o, 32));
    }
    // 2^(9 - exponent(m)), within the range of FP32
    const uint32_t e   = min(max(__float_as_uint(m) & 0x7F800000u, 0x0A000000u), 0x7E000000u);
    const float    mul = __uint_as_float((uint32_t) ((254u + 9u) << 23) - e);

    mmn_fragment r;
    r.back = __uint_as_float(e - (9u << 23));
    r.f.x = mmn_u32(__floats2half2_rn(v0.x*mul, v0.z*mul));
    r.f.y = mmn_u32(__floats2half2_rn(v0.y*mul, v0.w*mul));
    r.f.z = mmn_u32(__floats2half2_rn(v1.x*mul, v1.z*mul));
    r.f.w = mmn_u32(__floats2half2_rn(v1.y*mul, v1.w*mul));
    // sums of the rounded values over the 8 lanes of a sub-block
    const float2 a = __half22float2(mmn_h2(r.f.x)), b = __half22float2(mmn_h2(r.f.y));
    const float2 c = __half22float2(mmn_h2(r.f.z)), d = __half22float2(mmn_h2(r.f.w));
    float s0 = (a.x + a.y) + (b.x + b.y);
    float s1 = (c.x + c.y) + (d.x + d.y);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) {
        s0 += __shfl_xor_sync(0xFFFFFFFF, s0, o, 32);
        s1 += __shfl_xor_sync(0xFFFFFFFF, s1, o, 32);
    }
    const __half2 hi = __floats2half2_rn(s0, s1);
    const float2  hf = __half22float2(hi);
    const __half2 lo = __floats2half2_rn(s0 - hf.x, s1 - hf.y);
    r.sums = make_uint2(mmn_u32(hi), mmn_u32(lo));
    return r;
}

static __device__ __forceinline__ float mmc_warp_sum(float s) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        s += __shfl_xor_sync(0xFFFFFFFF, s, o, 32);
    }
    return s;
}

// A lane's 8 of the 256 values at p.
struct mmc_values {
    float4 a, b;
    __device__ __forceinline__ void load(const float * p) {
        a = *(const float4 *) p;
        b = *(const float4 *) (p + 32);
    }
};

// Leaves the fragments of 256-block kb in shared memory at s_x.
static __device__ __forceinline__ void mmc_put(const mmc_values & v, const int kb, const uint32_t s_x) {
    const mmn_fragment r = mmn_make_fragment(v.a, v.b);
    const int i = threadIdx.x % 8;
    const int t = (threadIdx.x/8) % 4;
    char * base = mmn_smem + s_x + kb*MMC_STEP_BYTES;
    *(uint4 *) (base + (i*4 + t)*16) = r.f;
    if (i == 0) {
        *(uint2 *) (base + MMN_STEP*2 + t*8) = r.sums;
        if (t == 0) {
            *(float *) (base + MMN_STEP*2 + 32) = r.back;
        }
    }
}

// The input of the products, rms_norm(x)*w, as fragments at s_x; w: the warp's factors. part: nw floats of shared memory.
template <int nw, int n>
static __device__ __forceinline__ void mmc_prepare_norm(const mmc_args & args, const mmc_values (&w)[n], const uint32_t s_x, const uint32_t s_part) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;

    mmc_values v[n];
    float s = 0.0f;
#pragma unroll
    for (int j = 0; j < n; ++j) {
        const int kb = j*nw + warp;
        if (kb < args.n_steps) {
            v[j].load(args.x + kb*MMN_STEP + mmn_lane_offset());
        }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
        s += j*nw + warp < args.n_steps ? mmn_sum_sq(v[j].a, v[j].b) : 0.0f;
    }
    s = mmc_warp_sum(s);
    if (lane == 0) {
        *(float *) (mmn_smem + s_part + warp*4) = s;
    }
    __syncthreads();
    s = mmc_warp_sum(lane < nw ? *(const float *) (mmn_smem + s_part + lane*4) : 0.0f);
    const float scale = rsqrtf(s/(args.n_steps*MMN_STEP) + args.eps);
#pragma unroll
    for (int j = 0; j < n; ++j) {
        const int kb = j*nw + warp;
        if (kb < args.n_steps) {
            v[j].a = mmn_mul4(mmn_scale4(scale, v[j].a), w[j].a);
            v[j].b = mmn_mul4(mmn_scale4(scale, v[j].b), w[j].b);
            if (args.normed != nullptr && blockIdx.x == 0) {
                float * p = args.normed + kb*MMN_STEP + mmn_lane_offset();
                *(float4 *) p        = v[j].a;
                *(float4 *) (p + 32) = v[j].b;
            }
            mmc_put(v[j], kb, s_x);
        }
    }
}

// the same for the other kinds of input
template <int nw>
static __device__ __forceinline__ void mmc_prepare(const mmc_args & args, const uint32_t s_x) {
    for (int kb = threadIdx.x/32; kb < args.n_steps; kb += nw) {
        const int k0 = kb*MMN_STEP + mmn_lane_offset();
        mmc_values v;
        if (args.input == MMC_HEAD_NORM) {
            const int head = k0 / MMN_HEAD, in_head = k0 % MMN_HEAD;
            mmc_values z, w;
            v.load(args.x + head*args.stride_x + in_head);
            z.load(args.y + head*args.stride_y + in_head);
            w.load(args.w + in_head);
            float s = mmn_sum_sq(v.a, v.b);
#pragma unroll
            for (int o = MMN_HEAD/16; o > 0; o >>= 1) {
                s += __shfl_xor_sync(0xFFFFFFFF, s, o, 32);
            }
            const float scale = rsqrtf(s/MMN_HEAD + args.eps);
            v.a = mmn_mul4(mmn_mul4(mmn_scale4(scale, v.a), w.a), mmn_silu(z.a));
            v.b = mmn_mul4(mmn_mul4(mmn_scale4(scale, v.b), w.b), mmn_silu(z.b));
        } else {
            v.load(args.x + k0);
            if (args.input == MMC_GATE) {
                const int k1 = k0 + 32;
                const int in_head = (1 << args.head_bits) - 1;
                v.a = mmn_mul4(v.a, mmn_sigmoid(*(const float4 *) (args.y + (k0 >> args.head_bits)*args.stride_y + (k0 & in_head))));
                v.b = mmn_mul4(v.b, mmn_sigmoid(*(const float4 *) (args.y + (k1 >> args.head_bits)*args.stride_y + (k1 & in_head))));
            }
        }
        mmc_put(v, kb, s_x);
    }
}

template <mmn_type type, int nw, int ns>
static __global__ void __launch_bounds__(nw*32, 1) mmn_column(const __grid_constant__ mmc_args args) {
#ifdef MMN_AVAILABLE
    using row_t = mmn_row<type>;
    constexpr bool aligned    = row_t::bytes % 16 == 0;
    constexpr int  item_bytes = MMC_KS*row_t::bytes;
    constexpr int  chunks     = mmn_chunks<type, MMC_KS>;
    constexpr int  pitch      = mmn_pitch<type, MMC_KS>;
    constexpr int  n_chunks   = MMC_UNIT*chunks;
    constexpr int  iters      = (n_chunks + 31)/32;
    constexpr int  slot_bytes = MMC_UNIT*pitch;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g    = lane / 4;
    const int t    = lane % 4;

    const uint32_t ring  = warp*(ns*slot_bytes);
    const uint32_t s_sum = mmc_ring_bytes<type, nw, ns>;
    const uint32_t s_x   = s_sum + mmc_sum_bytes<nw>;

    const int n_pairs = args.n_steps/MMC_KS;
    const int unit0   = (int) ((uint32_t)  blockIdx.x     *(uint32_t) args.n_units/gridDim.x);
    const int unit1   = (int) ((uint32_t) (blockIdx.x + 1)*(uint32_t) args.n_units/gridDim.x);
    const int n_items = (unit1 - unit0)*n_pairs;

    // row r of a unit
    auto row_of = [&](const int unit, const int r) {
        if (args.gated) {
            return args.mat[r/4].w + (int64_t) (unit*4 + r%4)*args.stride_w;
        }
        int m = 0;
#pragma unroll
        for (int j = 1; j < MMN_MAX_GROUP; ++j) {
            m = j < args.n_mat && unit >= args.mat[j].unit0 ? j : m;
        }
        return args.mat[m].w + (int64_t) ((unit - args.mat[m].unit0)*MMC_UNIT + r)*args.stride_w;
    };

    // loading position
    int l_item = warp;
    int l_unit = unit0 + warp/n_pairs;
    int l_pair = warp%n_pairs;
    int64_t l_off[iters]; // from row 0 of the unit
    uint32_t l_dst[iters];
    const int64_t gap = args.gated ? args.mat[1].w - args.mat[0].w - 4*args.stride_w : 0;
#pragma unroll
    for (int j = 0; j < iters; ++j) {
        const int c = min(j*32 + lane, n_chunks - 1);
        const int r = c/chunks;
        l_off[j] = r*args.stride_w + (r >= 4 ? gap : 0) + (aligned ? (c % chunks)*16 : 0);
        l_dst[j] = r*pitch + mmn_chunk_pos<type>(c % chunks)*16;
    }

    const uint32_t s_base = mmn_smem_addr(mmn_smem);
    auto load_item = [&](const int slot) {
        const uint32_t dst = s_base + ring + slot*slot_bytes;
        const char   * src = row_of(l_unit, 0) + l_pair*item_bytes;
#pragma unroll
        for (int j = 0; j < iters; ++j) {
            if (n_chunks % 32 == 0 || j < iters - 1 || j*32 + lane < n_chunks) {
                if constexpr (aligned) {
                    mmn_cp16(dst + l_dst[j], src + l_off[j]);
                } else {
                    // no chunk without a byte of the row: it could lie behind the end of the weights
                    const uintptr_t p = (uintptr_t) (src + l_off[j]);
                    const int       c = min((j*32 + lane) % chunks, ((int) (p & 15) + item_bytes - 1)/16);
                    mmn_cp16(dst + l_dst[j], (const char *) (p & ~(uintptr_t) 15) + c*16);
                }
            }
        }
        l_item += nw;
        l_pair += nw;
        while (l_pair >= n_pairs) {
            l_pair -= n_pairs;
            ++l_unit;
        }
    };

    mmn_launch_next_kernel();
    if (!args.early) {
        mmn_wait_previous_kernel();
    }
#pragma unroll
    for (int s = 0; s < ns - 1; ++s) {
        if (l_item < n_items) {
            load_item(s);
        }
        mmn_cp_commit();
    }
    constexpr int n_norm = MMN_MAX_NORM/MMN_STEP/nw + (MMN_MAX_NORM/MMN_STEP % nw != 0);
    mmc_values w[n_norm];
    if (args.input == MMC_NORM) {
#pragma unroll
        for (int j = 0; j < n_norm; ++j) {
            w[j].load(args.w + min(j*nw + warp, args.n_steps - 1)*MMN_STEP + mmn_lane_offset());
        }
    }
    if (args.early) {
        mmn_wait_previous_kernel();
    }
    if (args.input == MMC_NORM) {
        mmc_prepare_norm<nw>(args, w, s_x, s_sum);
    } else {
        mmc_prepare<nw>(args, s_x);
    }
    __syncthreads();

    float acc = 0.0f;
    int c_unit = unit0 + warp/n_pairs;
    int c_pair = warp%n_pairs;
    int c_slot = 0;
    int l_slot = ns - 1;
    uint32_t sums = s_sum;

    for (int first = unit0; first < unit1; first += MMC_BATCH) {
        const int end = min(first + MMC_BATCH, unit1);
        while (c_unit < end) {
            mmn_cp_wait<ns - 2>();
            __syncwarp();
            if (l_item < n_items) {
                load_item(l_slot);
            }
            mmn_cp_commit();
            l_slot = l_slot + 1 == ns ? 0 : l_slot + 1;

            const uint32_t s_w = ring + c_slot*slot_bytes + g*pitch;
            const uint32_t s_c = s_x + c_pair*(MMC_KS*MMC_STEP_BYTES);
            const uint32_t s_b = s_c + (g % 2)*MMC_STEP_BYTES;
            const uint32_t skip = aligned ? 0 : ((uint32_t) (uintptr_t) row_of(c_unit, g) + (uint32_t) c_pair*item_bytes) & 15;

            row_t r[2];
            r[0].load(s_w,                             skip,                t);
            r[1].load(s_w + (aligned ? row_t::bytes : 0), skip + row_t::bytes, t);
            const float x0 = __uint_as_float(mmn_lds32(s_c + MMN_STEP*2 + 32));
            const float x1 = __uint_as_float(mmn_lds32(s_c + MMC_STEP_BYTES + MMN_STEP*2 + 32));
            if constexpr (row_t::has_min) {
                const uint2 b = mmn_lds64(s_b + MMN_STEP*2 + t*8);
                float ms[4] = {};
                mmn_mma(ms, r[0].mn, r[1].mn, r[0].mn, r[1].mn, b.x, b.y);
                acc -= (r[0].dmin*x0)*ms[0] + (r[1].dmin*x1)*ms[3];
            }
            float sum[2][4] = {};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint4 b = mmn_lds128(s_b + (i*4 + t)*16);
                uint32_t f[4], h[4];
                r[0].frag(i, f);
                r[1].frag(i, h);
                mmn_mma(sum[0], f[0], h[0], f[1], h[1], b.x, b.y);
                mmn_mma(sum[1], f[2], h[2], f[3], h[3], b.z, b.w);
            }
            acc += (r[0].d*x0)*(sum[0][0] + sum[1][0]) + (r[1].d*x1)*(sum[0][3] + sum[1][3]);

            c_slot = c_slot + 1 == ns ? 0 : c_slot + 1;
            c_pair += nw;
            if (c_pair >= n_pairs) {
                // the warp's last item of this unit
                if (t == 0) {
                    *(float *) (mmn_smem + sums + (((c_unit - first)*nw + warp)*MMC_UNIT + g)*4) = acc;
                }
                acc = 0.0f;
                do {
                    c_pair -= n_pairs;
                    ++c_unit;
                } while (c_pair >= n_pairs);
            }
        }
        __syncthreads();
        const int unit = first + threadIdx.x/MMC_UNIT;
        const int r    = threadIdx.x % MMC_UNIT;
        // row r of the unit: the warps that have items of it, in their order
        auto sum_of = [&](const int r) {
            const int n = min(n_pairs, nw);
            int       w = (unit - unit0)*n_pairs % nw;
            float     v = 0.0f;
            for (int j = 0; j < n; ++j) {
                v += *(const float *) (mmn_smem + sums + (((unit - first)*nw + w)*MMC_UNIT + r)*4);
                w = w + 1 == nw ? 0 : w + 1;
            }
            return v;
        };
        if (unit < end && args.gated && r < 4) {
            const float v = sum_of(r);
            args.mat[0].dst[unit*4 + r] = v/(1.0f + expf(-v))*sum_of(r + 4);
        } else if (unit < end && !args.gated) {
            int m = 0;
#pragma unroll
            for (int j = 1; j < MMN_MAX_GROUP; ++j) {
                m = j < args.n_mat && unit >= args.mat[j].unit0 ? j : m;
            }
            const int row = (unit - args.mat[m].unit0)*MMC_UNIT + r;
            const float v = sum_of(r);
            args.mat[m].dst[row] = args.mat[m].add != nullptr ? v + args.mat[m].add[row] : v;
        }
        sums = sums == s_sum ? s_sum + mmc_sum_bytes<nw>/2 : s_sum;
    }
    mmn_cp_wait<0>();
#else
    (void) args;
#endif // MMN_AVAILABLE
}
