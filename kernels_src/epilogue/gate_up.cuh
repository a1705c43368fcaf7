// SPDX-License-Identifier: Apache-2.0
// epilogue/gate_up.cuh: from a tile of 128 gate and 128 up columns to z (when kept) and h.
//
// Layer:      epilogue.
//
// Numerics:   z is rounded to bf16 and h is computed from the rounded z, so that the backward,
//             which recomputes h from the saved z, sees the same bits.
#pragma once
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "slabs.cuh"
#include "swiglu.cuh"

namespace prime::epilogue {

struct GateUpOut {
    const TensorMap& z;  // [I, 2, rows], slabs of 64 x 1 x 64
    const TensorMap& h;  // [I, rows], slabs of 64 x 64
    ActivationArgs activation;
    u32 columns;  // I
    bool keep_z;
};

template <bool kPlain>
struct GateUp {
    PK_DEVICE static void store(
        const GateUpOut& out, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        SlabPair& slabs) {
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
#pragma unroll
        for (u32 block = 0; block < 2; ++block) {
            const i32 column = t.n + static_cast<i32>(block * 64);
            const bool exists = column < static_cast<i32>(out.columns);
            const float* g = acc + block * 32;
            const float* u = acc + 64 + block * 32;
            if (out.keep_z) {
                store_half(out.z, g, seat, {column, 0, row, exists}, slabs);
                store_half(out.z, u, seat, {column, 1, row, exists}, slabs);
            }
            float h[32];
#pragma unroll
            for (u32 i = 0; i < 32; ++i)
                h[i] = SwiGLU<kPlain>::forward(round_bf16(g[i]), round_bf16(u[i]), out.activation);
            const u32 slab = slabs.acquire(seat);
            put64(slab, seat, h);
            publish(seat);
            if (seat.leader) {
                if (exists) ptx::tma_store_2d(&out.h, slab, column, row);
                ptx::bulk_commit();
            }
        }
    }

private:
    struct At {
        i32 column, half, row;
        bool exists;
    };

    PK_DEVICE static void store_half(
        const TensorMap& map, const float* values, const Seat& seat, const At& at,
        SlabPair& slabs) {
        const u32 slab = slabs.acquire(seat);
        put64(slab, seat, values);
        publish(seat);
        if (seat.leader) {
            if (at.exists) ptx::tma_store_3d(&map, slab, at.column, at.half, at.row);
            ptx::bulk_commit();
        }
    }
};

}  // namespace prime::epilogue
