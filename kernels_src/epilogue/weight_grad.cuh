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
    u8* memory;  // of the first element
    u32 pitch;   // bytes of a row
};

template <class Op, bool kFp32, bool kAdd = false>
struct WeightGrad {
    static_assert(kFp32 || !kAdd, "adding rounded gradients would round twice");
    static constexpr u32 kColumns = kFp32 ? 32 : 64;  // of one slab

    static constexpr u32 kWarpRows = 16;
    static constexpr u32 kSector = 32;

    SlabPair slabs;
    const u8* next = nullptr;  // what this lane asks for next, when adding
    u32 pitch = 0;
    i32 last_step = 0;  // 0: this lane's columns do not exist

    template <class Args>
    PK_DEVICE void prefetch(const Args& args, const pipeline::Tile& t, const Seat& seat) {
        if constexpr (kAdd) {
            const WeightOut out = Op::output(args, t, seat.warpgroup);
            const u32 byte = seat.lane * kSector;
            next = out.memory + seat.warp * kWarpRows * u64{out.pitch} + byte;
            pitch = out.pitch;
            const bool inside = out.column + static_cast<i32>(byte / sizeof(float)) < out.columns;
            last_step = inside ? kWarpRows / 2 : 0;
        }
    }

    // Brings two rows of what is added to into the L2, a lane 32 bytes of each: by the threads and
    // not by the copy engine, and a little in every step, so that the operands' own loads never
    // stand behind a whole tile of it.
    PK_DEVICE void step(i32 k)
        requires kAdd
    {
        static_assert(layout::kTileN * sizeof(float) == 32 * kSector, "a warp takes a row");
        if (k > last_step) return;
        ptx::prefetch_l2(next);
        ptx::prefetch_l2(next + pitch);
        next += u64{pitch} * 2;
    }

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
