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

// Multiplies the fragment's two rows, r and r + 8, with their scores.
PK_DEVICE void scale_rows(mma::Accum& acc, float first, float second) {
#pragma unroll
    for (u32 i = 0; i < mma::kAccum; i += 4) {
        acc[i] *= first;
        acc[i + 1] *= first;
        acc[i + 2] *= second;
        acc[i + 3] *= second;
    }
}

template <bool kScored>
struct Rows {
    PK_DEVICE static void store(
        const RowsOut& out, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        SlabPair& slabs) {
        const i32 row = t.row + static_cast<i32>(seat.warpgroup * 64);
        if constexpr (kScored) {
            const float* score = out.row_score + row + seat.warp * 16 + (seat.lane >> 2);
            scale_rows(acc, score[0], score[8]);
        }
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
};

}  // namespace prime::epilogue
