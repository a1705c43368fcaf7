// SPDX-License-Identifier: Apache-2.0
// epilogue/weight_grad.cuh: writes a tile of a weight gradient, bf16 or fp32, or adds it to what is
// there (fp32).
//
// Layer:      epilogue. Op::output names the tensor map and the place of a tile.
//
// Numerics:   an element has one owner, so adding is one fp32 addition in memory: the same bits as
//             adding the overwritten gradient afterwards.
#pragma once
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "slabs.cuh"

namespace prime::epilogue {

// Where a warpgroup's 64 rows of a tile go.
struct WeightOut {
    const TensorMap* map;
    i32 row;
    i32 column;
    i32 columns;  // of the whole gradient
    i32 expert;
};

template <class Op, bool kFp32, bool kAdd = false>
struct WeightGrad {
    static_assert(kFp32 || !kAdd, "adding rounded gradients would round twice");
    static constexpr u32 kColumns = kFp32 ? 32 : 64;  // of one slab

    SlabPair slabs;

    template <class Args>
    PK_DEVICE void prefetch(const Args&, const pipeline::Tile&, const Seat&) {}

    template <class Args>
    PK_DEVICE void store(
        const Args& args, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        pipeline::Waiter&) {
        const WeightOut out = Op::output(args, t, seat.warpgroup);
#pragma unroll
        for (u32 block = 0; block < layout::kTileN / kColumns; ++block) {
            const i32 column = out.column + static_cast<i32>(block * kColumns);
            const u32 slab = slabs.acquire(seat);
            if constexpr (kFp32)
                put32_fp32(slab, seat, acc + block * 16);
            else
                put64(slab, seat, acc + block * 32);
            publish(seat);
            if (seat.leader) {
                if (column < out.columns) {
                    if constexpr (kAdd)
                        ptx::tma_add_3d(out.map, slab, column, out.row, out.expert);
                    else
                        ptx::tma_store_3d(out.map, slab, column, out.row, out.expert);
                }
                ptx::bulk_commit();
            }
        }
    }
};

}  // namespace prime::epilogue
