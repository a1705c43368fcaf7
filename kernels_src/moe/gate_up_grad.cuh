// SPDX-License-Identifier: Apache-2.0
// moe/gate_up_grad.cuh: dx_row = dg W_gate + du W_up for rows grouped by expert: one reduction over
// 2I whose first half reads the gate weights and whose second half reads the up weights. Entry
// pk_gate_up_grad; pk_rows_nn for one weight.
//
// Layer:      moe.
#pragma once
#include "block_gemm.cuh"

namespace prime::moe {

struct GateUpGrad : BlockGemm<4, 2, 256, true> {
    using Epilogue = RowsEpilogue<false>;
    static constexpr LaunchShape kLaunch = roles::gemm_launch<BlockGemm<4, 2, 256, true>>();

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        const i32 split = static_cast<i32>(args.split);
        const bool first = k < split;
        const i32 block = t.n / 64 + static_cast<i32>(half * 2);
        const i32 row = (first ? k : k - split) * 64;
        load_box(first ? &args.b0 : &args.b1, {0, row, block, t.expert}, at, half, multicast);
    }

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<GateUpGrad>(args); }
};

}  // namespace prime::moe
