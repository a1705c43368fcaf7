// SPDX-License-Identifier: Apache-2.0
// epilogue/rows.cuh: writes a tile's rows as bf16, optionally times a score per row.
//
// Layer:      epilogue.
//
// Numerics:   one rounding, after the score.
#pragma once
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "slabs.cuh"

namespace prime::epilogue {

struct RowsOut {
    const TensorMap& rows;   // [columns, rows], slabs of 64 x 64
    const float* row_score;  // read when scored
    u32 columns;
};

template <bool kScored>
struct Rows {
    PK_DEVICE static void store(
        const RowsOut& out, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        SlabPair& slabs) {
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
        if constexpr (kScored) scale(out.row_score + row, seat, acc);
#pragma unroll
        for (u32 block = 0; block < layout::kTileN / 64; ++block) {
            const i32 column = t.n + static_cast<i32>(block * 64);
            const u32 slab = slabs.acquire(seat);
            put64(slab, seat, acc + block * 32);
            publish(seat);
            if (seat.leader) {
                if (column < static_cast<i32>(out.columns))
                    ptx::tma_store_2d(&out.rows, slab, column, row);
                ptx::bulk_commit();
            }
        }
    }

private:
    PK_DEVICE static void scale(const float* scores, const Seat& seat, mma::Accum& acc) {
        const u32 r = seat.warp * 16 + (seat.lane >> 2);
        const float s0 = scores[r];
        const float s1 = scores[r + 8];
#pragma unroll
        for (u32 i = 0; i < mma::kAccum; i += 4) {
            acc[i] *= s0;
            acc[i + 1] *= s0;
            acc[i + 2] *= s1;
            acc[i + 3] *= s1;
        }
    }
};

}  // namespace prime::epilogue
