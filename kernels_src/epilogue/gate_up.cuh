// SPDX-License-Identifier: Apache-2.0
// epilogue/gate_up.cuh: from a tile of 128 gate and 128 up columns to z (when kept) and h.
//
// Layer:      epilogue.
//
// Numerics:   z is rounded to bf16 and h is computed from the rounded z, so that the backward,
// which recomputes h from the
//             saved z, sees the same bits.
#pragma once
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "slabs.cuh"
#include "swiglu.cuh"

namespace prime::epilogue {

template <bool kPlain>
struct GateUp {
    SlabPair slabs;

    template <class Args>
    PK_DEVICE void prefetch(const Args&, const pipeline::Tile&, const Seat&) {}

    template <class Args>
    PK_DEVICE void store(
        const Args& args, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        pipeline::Waiter&) {
        const ActivationArgs activation{args.alpha, args.clamp, args.up_offset, 0.0f};
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
#pragma unroll
        for (u32 block = 0; block < 2; ++block) {
            const i32 column = t.n + static_cast<i32>(block * 64);
            const bool exists = column < static_cast<i32>(args.columns);
            const float* g = acc + block * 32;
            const float* u = acc + 64 + block * 32;
            if (args.store_preact) {
                store_half(args.out1, g, seat, {column, 0, row}, exists);
                store_half(args.out1, u, seat, {column, 1, row}, exists);
            }
            float h[32];
#pragma unroll
            for (u32 i = 0; i < 32; ++i)
                h[i] = SwiGLU<kPlain>::forward(round_bf16(g[i]), round_bf16(u[i]), activation);
            const u32 slab = slabs.acquire(seat);
            put64(slab, seat, h);
            publish(seat);
            if (seat.leader) {
                if (exists) ptx::tma_store_2d(&args.out0, slab, column, row);
                ptx::bulk_commit();
            }
        }
    }

private:
    struct At {
        i32 column, half, row;
    };

    PK_DEVICE void store_half(
        const TensorMap& map, const float* values, const Seat& seat, const At& at, bool exists) {
        const u32 slab = slabs.acquire(seat);
        put64(slab, seat, values);
        publish(seat);
        if (seat.leader) {
            if (exists) ptx::tma_store_3d(&map, slab, at.column, at.half, at.row);
            ptx::bulk_commit();
        }
    }
};

}  // namespace prime::epilogue
