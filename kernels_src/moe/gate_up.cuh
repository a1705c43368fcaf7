// SPDX-License-Identifier: Apache-2.0
// moe/gate_up.cuh: z = x W_gate_up^T and h = SwiGLU(z) for rows grouped by expert. Entry
// pk_gate_up.
//
// Layer:      moe. A tile is 128 rows x (128 gate + 128 up columns) of the natural weights: no
//             interleaving.
#pragma once
#include "../epilogue/gate_up.cuh"
#include "block_gemm.cuh"

namespace prime::moe {

template <bool kPlain>
struct GateUp : BlockGemm<4, 2, 128, false> {
    static constexpr LaunchShape kLaunch = roles::gemm_launch<BlockGemm<4, 2, 128, false>>();

    struct Epilogue {
        epilogue::SlabPair slabs;

        PK_DEVICE void prefetch(const Args&, const Tile&, const epilogue::Seat&) {}

        PK_DEVICE void store(
            const Args& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
            roles::Waiter&) {
            const epilogue::GateUpOut out{
                args.out1,
                args.out0,
                {args.alpha, args.clamp, args.up_offset, 0.0f},
                args.columns,
                args.keep_z != 0};
            epilogue::GateUp<kPlain>::store(out, t, seat, acc, slabs);
        }
    };

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        load_box(half == 0 ? &args.b0 : &args.b1, {k * 64, t.n, 0, t.expert}, at, half, multicast);
    }

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<GateUp>(args); }
};

}  // namespace prime::moe
