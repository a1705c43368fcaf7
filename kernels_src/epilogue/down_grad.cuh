// SPDX-License-Identifier: Apache-2.0
// epilogue/down_grad.cuh: from dh' = dy W_down (unscaled by the routing score) and the saved z to
// dz, score * h and the score's gradient.
//
// Layer:      epilogue.
//
// Threads:    z arrives by TMA in pairs of slabs (gate, up), two pairs in turn; the first two are
//             asked for before the multiplication, so they hide under it. dz leaves from the slabs
//             z arrived in; score * h has one of its own.
//
// Numerics:   d score = <dh', h> with h rounded to bf16 as in the forward; no division by the
//             score, so zero and negative scores keep their gradient. Partial sums per n-tile are
//             added later in ascending order.
#pragma once
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "slabs.cuh"
#include "swiglu.cuh"

namespace prime::epilogue {

template <bool kPlain>
struct DownGrad {
    static constexpr u32 kSlabs = 5;
    static constexpr u32 kChunks = layout::kTileN / 64;

    u32 base;
    u32 bar;        // two, one per slab pair
    u32 phase = 0;  // bit i: parity of barrier i

    template <class Args>
    PK_DEVICE void prefetch(const Args& args, const pipeline::Tile& t, const Seat& seat) {
        if (!seat.leader) return;
        // The previous tile's stores out of these slabs, before TMA writes them again.
        ptx::bulk_wait_read<0>();
        load(args, t, seat, 0);
        load(args, t, seat, 1);
    }

    template <class Args>
    PK_DEVICE void store(
        const Args& args, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        pipeline::Waiter& waiter) {
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
        const u32 r = row + seat.warp * 16 + (seat.lane >> 2);
        float score[2] = {args.row_score[r], args.row_score[r + 8]};
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 chunk = 0; chunk < kChunks; ++chunk) {
            waiter.wait(bar + 8 * (chunk & 1), (phase >> (chunk & 1)) & 1, Wait::kInput);
            phase ^= 1u << (chunk & 1);
            if (seat.leader) ptx::bulk_wait_read<0>();
            seat.sync();
            if (seat.leader && chunk >= 1 && chunk + 1 < kChunks) load(args, t, seat, chunk + 1);
            const u32 gate = gate_slab(chunk);
#pragma unroll
            for (u32 c = 0; c < 4; ++c)
                columns16(args, acc + chunk * 32 + c * 8, Place{gate, c}, seat, score, sum);
            publish(seat);
            if (seat.leader) store_chunk(args, t.n + static_cast<i32>(chunk * 64), row, gate);
        }
        write_sums(args, t, seat, r, sum);
    }

private:
    struct Place {
        u32 gate;
        u32 c;
    };

    PK_DEVICE u32 gate_slab(u32 chunk) const { return base + (chunk & 1) * 2 * layout::kSlabBytes; }

    PK_DEVICE u32 scaled_slab() const { return base + 4 * layout::kSlabBytes; }

    // Columns past the end come as zeros.
    template <class Args>
    PK_DEVICE void load(const Args& args, const pipeline::Tile& t, const Seat& seat, u32 chunk) {
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
        const i32 column = t.n + static_cast<i32>(chunk * 64);
        const u32 at = bar + 8 * (chunk & 1);
        const u32 gate = gate_slab(chunk);
        ptx::mbarrier_arrive_expect_tx(at, 2 * layout::kSlabBytes);
        ptx::tma_load_3d(gate, &args.in1, at, column, 0, row, ptx::kEvictFirst);
        ptx::tma_load_3d(
            gate + layout::kSlabBytes, &args.in1, at, column, 1, row, ptx::kEvictFirst);
    }

    template <class Args>
    PK_DEVICE void columns16(
        const Args& args, const float* dh, const Place& place, const Seat& seat,
        const float (&score)[2], float (&sum)[2]) {
        const ActivationArgs activation{args.alpha, args.clamp, args.up_offset, 0.0f};
        const u32 at = layout::fragment_offset(seat.warp * 16, place.c, seat.lane);
        const u32 up = place.gate + layout::kSlabBytes;
        u32 g[4], u[4], dg[4], du[4], sh[4];
        ptx::ldmatrix_x4(place.gate + at, g[0], g[1], g[2], g[3]);
        ptx::ldmatrix_x4(up + at, u[0], u[1], u[2], u[3]);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float s = score[i & 1];
            const float lo = dh[2 * i];
            const float hi = dh[2 * i + 1];
            const Gradient a = SwiGLU<kPlain>::backward(
                s * lo, ptx::bf16_lo(g[i]), ptx::bf16_lo(u[i]), activation);
            const Gradient b = SwiGLU<kPlain>::backward(
                s * hi, ptx::bf16_hi(g[i]), ptx::bf16_hi(u[i]), activation);
            const u32 h = ptx::pack_bf16(a.h, b.h);
            sum[i & 1] += lo * ptx::bf16_lo(h) + hi * ptx::bf16_hi(h);
            dg[i] = ptx::pack_bf16(a.dg, b.dg);
            du[i] = ptx::pack_bf16(a.du, b.du);
            sh[i] = ptx::pack_bf16(s * ptx::bf16_lo(h), s * ptx::bf16_hi(h));
        }
        ptx::stmatrix_x4(place.gate + at, dg[0], dg[1], dg[2], dg[3]);
        ptx::stmatrix_x4(up + at, du[0], du[1], du[2], du[3]);
        ptx::stmatrix_x4(scaled_slab() + at, sh[0], sh[1], sh[2], sh[3]);
    }

    template <class Args>
    PK_DEVICE void store_chunk(const Args& args, i32 column, i32 row, u32 gate) {
        if (column < static_cast<i32>(args.columns)) {
            ptx::tma_store_3d(&args.out1, gate, column, 0, row);
            ptx::tma_store_3d(&args.out1, gate + layout::kSlabBytes, column, 1, row);
            ptx::tma_store_2d(&args.out0, scaled_slab(), column, row);
        }
        ptx::bulk_commit();
    }

    // The four threads of a row add up in a fixed order.
    template <class Args>
    PK_DEVICE void write_sums(
        const Args& args, const pipeline::Tile& t, const Seat& seat, u32 r, float (&sum)[2]) {
#pragma unroll
        for (u32 m = 1; m < 4; m *= 2) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], m);
            sum[1] += __shfl_xor_sync(~0u, sum[1], m);
        }
        if ((seat.lane & 3) != 0) return;
        float* out = args.score_parts + t.n / static_cast<i32>(layout::kTileN);
        out[static_cast<u64>(r) * args.n_tiles] = sum[0];
        out[static_cast<u64>(r + 8) * args.n_tiles] = sum[1];
    }
};

}  // namespace prime::epilogue
