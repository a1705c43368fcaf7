// SPDX-License-Identifier: Apache-2.0
// moe/down.cuh: y_row = score * (h W_down^T) for rows grouped by expert. Entry pk_down; pk_rows_nt
// without scores.
//
// Layer:      moe.
#pragma once
#include "block_gemm.cuh"

namespace prime::moe {

template <bool kScored>
struct Down : BlockGemm<4, 2, 256, false> {
    using Epilogue = RowsEpilogue<kScored>;
    static constexpr LaunchShape kLaunch = roles::gemm_launch<BlockGemm<4, 2, 256, false>>();

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        const i32 n = t.n + static_cast<i32>(half * 128);
        load_box(&args.b0, {k * 64, n, 0, t.expert}, at, half, multicast);
    }

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Down>(args); }
};

}  // namespace prime::moe
