#pragma once

// Narrow matrix products whose rows belong to one block each: no partial sums cross the memory. Work as in mmn-common.cuh.
// A candidate that no GPU has run yet (bench/notes-matmul.md).
//
// - One block per multiprocessor has a contiguous share of the units of 8 rows, in chunks of up to mc tiles of two units. A warp takes
//   a 256-block of k for all tiles of a chunk: the activations are read once, into registers; item i of the block goes to warp i % warps.
// - Each warp has a ring of its own, one tile's 256-block per slot: no barrier is between loads. The warps' sums of a chunk meet in
//   shared memory.

#include "mmn-common.cuh"
#include "mmn-unpack.cuh"

#define MMR_UNIT 8

struct mmr_args {
    mmn_matrix  mat[MMN_MAX_GROUP]; // tile0: the first unit
    int         n_mat;
    int         n_units;
    int         n_steps;
    int         cols;
    int64_t     stride_w;
    const char * x;
    bool        early;
};

template <mmn_type type, int nw, int ns>
constexpr int mmr_ring_bytes = nw*ns*2*MMR_UNIT*mmn_pitch<type, 1>;
template <int nt, int nw, int mc>
constexpr int mmr_sum_bytes = nw*mc*nt*512;

template <mmn_type type, int nt, int nw, int ns, int mc>
static __global__ void __launch_bounds__(nw*32, 1) mmn_rows(const __grid_constant__ mmr_args args) {
#ifdef MMN_AVAILABLE
    using row_t = mmn_row<type>;
    constexpr bool aligned    = row_t::bytes % 16 == 0;
    constexpr int  chunks     = mmn_chunks<type, 1>;
    constexpr int  pitch      = mmn_pitch<type, 1>;
    constexpr int  n_chunks   = 2*MMR_UNIT*chunks;
    constexpr int  iters      = (n_chunks + 31)/32;
    constexpr int  slot_bytes = 2*MMR_UNIT*pitch;

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g    = lane / 4;
    const int t    = lane % 4;

    const uint32_t ring  = warp*(ns*slot_bytes);
    const uint32_t s_sum = mmr_ring_bytes<type, nw, ns>;

    const int n_steps = args.n_steps;
    const int unit0   = (int) ((uint32_t)  blockIdx.x     *(uint32_t) args.n_units/gridDim.x);
    const int unit1   = (int) ((uint32_t) (blockIdx.x + 1)*(uint32_t) args.n_units/gridDim.x);
    const int tiles   = (unit1 - unit0 + 1)/2;
    const int n_parts = (tiles + mc - 1)/mc;
    const int n_items = n_parts*n_steps;
    // tiles of part c: the first ones have one more
    const int some = tiles/n_parts, more = tiles % n_parts;
    auto first_tile = [&](const int c) { return c*some + min(c, more); };

    auto unit_at = [&](int unit) {
        unit = min(unit, unit1 - 1); // behind the share: the last unit again
        int m = 0;
#pragma unroll
        for (int j = 1; j < MMN_MAX_GROUP; ++j) {
            m = j < args.n_mat && unit >= args.mat[j].tile0 ? j : m;
        }
        return args.mat[m].w + (int64_t) ((unit - args.mat[m].tile0)*MMR_UNIT)*args.stride_w;
    };

    uint32_t l_off[iters], l_dst[iters];
#pragma unroll
    for (int j = 0; j < iters; ++j) {
        const int c = min(j*32 + lane, n_chunks - 1);
        const int r = c/chunks;
        l_off[j] = (r % MMR_UNIT)*(uint32_t) args.stride_w + (aligned ? (c % chunks)*16 : 0);
        l_dst[j] = r*pitch + mmn_chunk_pos<type>(c % chunks)*16;
    }

    // loading position
    int l_item = warp;
    int l_tile = first_tile(warp/n_steps);
    int l_end  = first_tile(warp/n_steps + 1);
    int l_step = warp % n_steps;

    const uint32_t s_base = mmn_smem_addr(mmn_smem);
    auto load_next = [&](const int slot) {
        if (l_item < n_items) {
            const uint32_t dst = s_base + ring + slot*slot_bytes;
            const char * src0 = unit_at(unit0 + 2*l_tile)     + l_step*row_t::bytes;
            const char * src1 = unit_at(unit0 + 2*l_tile + 1) + l_step*row_t::bytes;
#pragma unroll
            for (int j = 0; j < iters; ++j) {
                const int at = j*32 + lane;
                if (n_chunks % 32 == 0 || j < iters - 1 || at < n_chunks) {
                    const char * src = (at < MMR_UNIT*chunks ? src0 : src1) + l_off[j];
                    if constexpr (aligned) {
                        mmn_cp16(dst + l_dst[j], src);
                    } else {
                        // no chunk without a byte of the row: it could lie behind the end of the weights
                        const uintptr_t p = (uintptr_t) src;
                        const int       c = min(at % chunks, ((int) (p & 15) + row_t::bytes - 1)/16);
                        mmn_cp16(dst + l_dst[j], (const char *) (p & ~(uintptr_t) 15) + c*16);
                    }
                }
            }
            if (++l_tile == l_end) {
                l_item += nw;
                const int c = l_item/n_steps;
                l_step = l_item - c*n_steps;
                l_tile = first_tile(c);
                l_end  = first_tile(c + 1);
            }
        }
        mmn_cp_commit();
    };

    mmn_launch_next_kernel();
    if (!args.early) {
        mmn_wait_previous_kernel();
    }
#pragma unroll
    for (int s = 0; s < ns - 1; ++s) {
        load_next(s);
    }
    if (args.early) {
        mmn_wait_previous_kernel();
    }

    int c_slot = 0;
    int l_slot = ns - 1;
    int item   = warp;
    for (int c = 0; c < n_parts; ++c) {
        const int tile0 = first_tile(c);
        const int n     = first_tile(c + 1) - tile0;
        float acc[mc][nt][4] = {};
        for (; item < (c + 1)*n_steps; item += nw) {
            const int step = item - c*n_steps;
            const char * x = args.x + (int64_t) step*(nt*MMN_TILE_BYTES);
            uint4 b[nt][8];
            uint2 b_sum[nt];
            float x0[nt], x1[nt];
#pragma unroll
            for (int i = 0; i < nt; ++i) {
                const char * p = x + i*MMN_TILE_BYTES;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    b[i][j] = *(const uint4 *) (p + (j*32 + lane)*16);
                }
                if (row_t::has_min) {
                    b_sum[i] = *(const uint2 *) (p + MMN_FRAG_BYTES + lane*8);
                }
                const float2 v = *(const float2 *) (p + MMN_FRAG_BYTES + MMN_SUM_BYTES + t*8);
                x0[i] = v.x;
                x1[i] = v.y;
            }
#pragma unroll
            for (int a = 0; a < mc; ++a) {
                if (a < n) {
                    mmn_cp_wait<ns - 2>();
                    __syncwarp();
                    load_next(l_slot);
                    l_slot = l_slot + 1 == ns ? 0 : l_slot + 1;

                    const uint32_t s_w = ring + c_slot*slot_bytes + g*pitch;
                    c_slot = c_slot + 1 == ns ? 0 : c_slot + 1;
                    row_t r[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        int skip = 0;
                        if constexpr (!aligned) {
                            skip = ((uint32_t) (uintptr_t) unit_at(unit0 + 2*(tile0 + a) + h) + (uint32_t) g*(uint32_t) args.stride_w +
                                (uint32_t) step*row_t::bytes) & 15;
                        }
                        r[h].load(s_w + h*MMR_UNIT*pitch, skip, t);
                    }
                    if constexpr (row_t::has_min) {
#pragma unroll
                        for (int i = 0; i < nt; ++i) {
                            float ms[4] = {};
                            mmn_mma(ms, r[0].mn, r[1].mn, r[0].mn, r[1].mn, b_sum[i].x, b_sum[i].y);
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                acc[a][i][j] -= (r[j/2].dmin*(j % 2 == 0 ? x0[i] : x1[i]))*ms[j];
                            }
                        }
                    }
                    float sum[nt][4] = {};
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        uint32_t f[4], h[4];
                        r[0].frag(k, f);
                        r[1].frag(k, h);
#pragma unroll
                        for (int i = 0; i < nt; ++i) {
                            mmn_mma(sum[i], f[0], h[0], f[1], h[1], b[i][k].x, b[i][k].y);
                        }
#pragma unroll
                        for (int i = 0; i < nt; ++i) {
                            mmn_mma(sum[i], f[2], h[2], f[3], h[3], b[i][k].z, b[i][k].w);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < nt; ++i) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            acc[a][i][j] += (r[j/2].d*(j % 2 == 0 ? x0[i] : x1[i]))*sum[i][j];
                        }
                    }
                }
            }
        }
        // the warps that have items of this part, in the order of their first ones
        const int w_first = c*n_steps % nw;
        const int w_n     = min(n_steps, nw);
        if ((warp - w_first + nw) % nw < w_n) {
#pragma unroll
            for (int a = 0; a < mc; ++a) {
#pragma unroll
                for (int i = 0; i < nt; ++i) {
                    *(float4 *) (mmn_smem + s_sum + (((warp*mc + a)*nt + i)*32 + lane)*16) = make_float4(acc[a][i][0], acc[a][i][1], acc[a][i][2], acc[a][i][3]);
                }
            }
        }
        __syncthreads();
        for (int e = threadIdx.x; e < n*nt*32; e += nw*32) {
            const int l = e % 32, i = e/32 % nt, a = e/(32*nt);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            int w = w_first;
            for (int j = 0; j < w_n; ++j) {
                const float4 p = *(const float4 *) (mmn_smem + s_sum + (((w*mc + a)*nt + i)*32 + l)*16);
                v.x += p.x; v.y += p.y; v.z += p.z; v.w += p.w;
                w = w + 1 == nw ? 0 : w + 1;
            }
            const float y[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int unit = unit0 + 2*(tile0 + a) + h;
                if (unit < unit1) {
                    int m = 0;
#pragma unroll
                    for (int j = 1; j < MMN_MAX_GROUP; ++j) {
                        m = j < args.n_mat && unit >= args.mat[j].tile0 ? j : m;
                    }
                    const int row = (unit - args.mat[m].tile0)*MMR_UNIT + l/4;
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int col = i*8 + 2*(l % 4) + j;
                        if (col < args.cols) {
                            args.mat[m].dst[col*args.mat[m].ldd + row] = y[2*h + j];
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
    mmn_cp_wait<0>();
#else
    (void) args;
#endif // MMN_AVAILABLE
}
