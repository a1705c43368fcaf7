// SPDX-License-Identifier: Apache-2.0
// benchmarks/tile_lab/inline.cuh: math warpgroups that run their own epilogue, one 64-row half of
// the tile each, without waiting for one another.
#pragma once
#include "../../kernels_src/layout/slab.cuh"
#include "../../kernels_src/ptx/ld_st.cuh"
#include "../../kernels_src/epilogue/slabs.cuh"
#include "../../kernels_src/epilogue/swiglu.cuh"
#include "stages.cuh"

namespace prime::lab {

using epilogue::Seat;
using epilogue::SlabPair;
using SwiGLU = epilogue::SwiGLU<true>;

// z and h. The activation sees z as it is stored.
template <class P>
PK_DEVICE void store_g1(
    const Args& args, float (&acc)[P::kAcc], SlabPair& slabs, const Seat& seat, const Tile& t) {
    constexpr int kHalfAcc = P::kAcc / 2;
    static_assert(P::kTileN % 128 == 0);
    const i32 row = t.m + static_cast<i32>(seat.warpgroup) * 64;
#pragma unroll
    for (int block = 0; block < P::kTileN / 128; ++block) {
        const i32 col = t.n + block * 64;
        const float* gate = acc + block * 32;
        const float* up = gate + kHalfAcc;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 slab = slabs.acquire(seat);
            epilogue::put64(slab, seat, half ? up : gate);
            epilogue::publish(seat);
            if (seat.leader) {
                ptx::tma_store_3d(&args.z, slab, col, half, row);
                ptx::bulk_commit();
            }
        }
        float h[32];
#pragma unroll
        for (int i = 0; i < 32; ++i)
            h[i] = SwiGLU::forward(epilogue::round_bf16(gate[i]), epilogue::round_bf16(up[i]), {});
        const u32 slab = slabs.acquire(seat);
        epilogue::put64(slab, seat, h);
        epilogue::publish(seat);
        if (seat.leader) {
            ptx::tma_store_2d(&args.o0, slab, col, row);
            ptx::bulk_commit();
        }
    }
}

// The tile as it is, bf16 or fp32: a slab holds 64 or 32 columns.
template <class P, Type T>
PK_DEVICE void store_plain(
    const Args& args, float (&acc)[P::kAcc], SlabPair& slabs, const Seat& seat, const Tile& t) {
    constexpr int kCols = T == kW32 ? 32 : 64;
    const i32 row = t.m + static_cast<i32>(seat.warpgroup) * 64;
#pragma unroll
    for (int block = 0; block < P::kTileN / kCols; ++block) {
        const u32 slab = slabs.acquire(seat);
        if constexpr (T == kW32)
            epilogue::put32_fp32(slab, seat, acc + block * (kCols / 2));
        else
            epilogue::put64(slab, seat, acc + block * (kCols / 2));
        epilogue::publish(seat);
        if (seat.leader) {
            const i32 batch = T == kG2 ? 0 : t.expert;
            ptx::tma_store_3d(&args.o0, slab, t.n + block * kCols, row, batch);
            ptx::bulk_commit();
        }
    }
}

// Two {gate, up} pairs of z slabs in turn, which dz overwrites, then one slab for score x h.
struct ZRing {
    u32 base, bar;
    u32 phase = 0;

    PK_DEVICE u32 gate(int chunk) const { return base + (chunk & 1) * 2 * layout::kSlabBytes; }
    PK_DEVICE u32 up(int chunk) const { return gate(chunk) + layout::kSlabBytes; }
    PK_DEVICE u32 sh() const { return base + 4 * layout::kSlabBytes; }
    PK_DEVICE void load(const Args& args, const Tile& t, i32 row, int chunk) const {
        const u32 b = bar + 8 * (chunk & 1);
        const i32 col = t.n + chunk * 64;
        ptx::mbarrier_arrive_expect_tx(b, 2 * layout::kSlabBytes);
        ptx::tma_load_3d(gate(chunk), &args.z, b, col, 0, row, ptx::kEvictFirst);
        ptx::tma_load_3d(up(chunk), &args.z, b, col, 1, row, ptx::kEvictFirst);
    }
    PK_DEVICE void await(int chunk) {
        wait(bar + 8 * (chunk & 1), (phase >> (chunk & 1)) & 1);
        phase ^= 1u << (chunk & 1);
    }
};

// A thread's two rows, 8 apart: their scores and the gradients of these.
struct RowPair {
    float score[2];
    float ds[2] = {0.0f, 0.0f};
};

// Sixteen columns: z in the slabs becomes dz, score x h goes to the third slab. `d`: dh, 8 values.
PK_DEVICE void grad16(const ZRing& z, int chunk, u32 at, const float* d, RowPair& rows) {
    u32 g[4], u[4], sh[4];
    ptx::ldmatrix_x4(z.gate(chunk) + at, g[0], g[1], g[2], g[3]);
    ptx::ldmatrix_x4(z.up(chunk) + at, u[0], u[1], u[2], u[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float s = rows.score[i & 1];
        const epilogue::Gradient lo =
            SwiGLU::backward(s * d[2 * i], ptx::bf16_lo(g[i]), ptx::bf16_lo(u[i]), {});
        const epilogue::Gradient hi =
            SwiGLU::backward(s * d[2 * i + 1], ptx::bf16_hi(g[i]), ptx::bf16_hi(u[i]), {});
        const float h_lo = epilogue::round_bf16(lo.h), h_hi = epilogue::round_bf16(hi.h);
        rows.ds[i & 1] += d[2 * i] * h_lo + d[2 * i + 1] * h_hi;
        g[i] = ptx::pack_bf16(lo.dg, hi.dg);
        u[i] = ptx::pack_bf16(lo.du, hi.du);
        sh[i] = ptx::pack_bf16(s * h_lo, s * h_hi);
    }
    ptx::stmatrix_x4(z.gate(chunk) + at, g[0], g[1], g[2], g[3]);
    ptx::stmatrix_x4(z.up(chunk) + at, u[0], u[1], u[2], u[3]);
    ptx::stmatrix_x4(z.sh() + at, sh[0], sh[1], sh[2], sh[3]);
}

// ds by n-tile, so that nothing is added atomically.
template <class P>
PK_DEVICE void store_ds(const Args& args, RowPair& rows, u32 row, const Seat& seat, const Tile& t) {
#pragma unroll
    for (int m = 1; m < 4; m <<= 1) {
        rows.ds[0] += __shfl_xor_sync(~0u, rows.ds[0], m);
        rows.ds[1] += __shfl_xor_sync(~0u, rows.ds[1], m);
    }
    const i32 n_tile = t.n / P::kTileN;
    // A pair along n with an odd number of n-tiles has one tile beyond the matrix.
    if ((seat.lane & 3) != 0 || n_tile >= args.num_n_tiles) return;
    float* out = args.ds + static_cast<i64>(row) * args.num_n_tiles + n_tile;
    out[0] = rows.ds[0];
    out[8 * args.num_n_tiles] = rows.ds[1];
}

template <class P>
PK_DEVICE void store_d2(
    const Args& args, float (&acc)[P::kAcc], ZRing& z, const Seat& seat, const Tile& t) {
    constexpr int kChunks = P::kTileN / 64;
    const i32 row = t.m + static_cast<i32>(seat.warpgroup) * 64;
    const u32 own_row = row + seat.warp * 16 + (seat.lane >> 2);
    RowPair rows{{__ldg(args.score + own_row), __ldg(args.score + own_row + 8)}};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        z.await(chunk);
        // Slabs of the previous chunk are stored: reload them, and let score x h be overwritten.
        if (seat.leader) ptx::bulk_wait_read<0>();
        seat.sync();
        if (seat.leader && chunk >= 1 && chunk + 1 < kChunks) z.load(args, t, row, chunk + 1);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const u32 at = layout::fragment_offset(seat.warp * 16, c, seat.lane);
            grad16(z, chunk, at, acc + chunk * 32 + c * 8, rows);
        }
        epilogue::publish(seat);
        if (seat.leader) {
            const i32 col = t.n + chunk * 64;
            ptx::tma_store_3d(&args.o1, z.gate(chunk), col, 0, row);
            ptx::tma_store_3d(&args.o1, z.up(chunk), col, 1, row);
            ptx::tma_store_2d(&args.o0, z.sh(), col, row);
            ptx::bulk_commit();
        }
    }
    store_ds<P>(args, rows, own_row, seat, t);
}

template <class P, Type T>
PK_DEVICE void math_inline(const Args& args, u32 base, u32 wg) {
    using S = Smem<P>;
    const Seat seat{wg, (threadIdx.x >> 5) & 3, threadIdx.x & 31, (threadIdx.x & 127) == 0};
    constexpr u32 kPerWg = P::kScratchBytes / 2;
    static_assert(kPerWg >= (T == kD2 ? 5 : 2) * layout::kSlabBytes && kPerWg % 1024 == 0);
    SlabPair slabs{base + S::scratch + wg * kPerWg};
    ZRing z{base + S::scratch + wg * kPerWg, base + S::loaded(wg)};
    pipeline::Ring<P::kStages> ring;
    float acc[P::kAcc];
    bool first = args.stagger && wg == 0;
    if (args.stagger && wg == 1) wait(base + S::second_may_start, 0);
    for (Walk<P> walk(args); walk.more(); walk.next()) {
        const Tile t = walk.tile();
        if constexpr (T == kD2) {
            if (seat.leader) {
                ptx::bulk_wait_read<0>();
                for (int chunk = 0; chunk < 2; ++chunk)
                    z.load(args, t, t.m + static_cast<i32>(wg) * 64, chunk);
            }
        }
        mainloop<P, T>(acc, base, wg, t.k_steps, ring, first);
        first = false;
        if constexpr (T == kG1)
            store_g1<P>(args, acc, slabs, seat, t);
        else if constexpr (T == kD2)
            store_d2<P>(args, acc, z, seat, t);
        else
            store_plain<P, T>(args, acc, slabs, seat, t);
    }
    if (seat.leader) ptx::bulk_wait<0>();
}

}  // namespace prime::lab
