// SPDX-License-Identifier: Apache-2.0
// moe/down_grad.cuh: dh' = dy W_down for rows grouped by expert, then dz, score * h and the score's
// gradient from the saved z. Entry pk_down_grad.
//
// Layer:      moe. Three stages instead of four: the epilogue's slabs need the room.
#pragma once
#include "../epilogue/down_grad.cuh"
#include "block_gemm.cuh"

namespace prime::moe {

template <bool kPlain>
struct DownGrad : BlockGemm<3, epilogue::DownGrad<kPlain>::kSlabs, 256, true> {
    using Base = BlockGemm<3, epilogue::DownGrad<kPlain>::kSlabs, 256, true>;
    using Epilogue = epilogue::DownGrad<kPlain>;
    using typename Base::Args;
    using typename Base::Smem;
    static constexpr LaunchShape kLaunch = roles::gemm_launch<Base>();

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        const i32 block = t.n / 64 + static_cast<i32>(half * 2);
        Base::load_box(&args.b0, {0, k * 64, block, t.expert}, at, half, multicast);
    }

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {
            base + Smem::kSlab + seat.warpgroup * Epilogue::kSlabs * layout::kSlabBytes,
            base + Smem::kSlabFull + seat.warpgroup * 16};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<DownGrad>(args); }
};

}  // namespace prime::moe
