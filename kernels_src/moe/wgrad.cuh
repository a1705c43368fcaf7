// SPDX-License-Identifier: Apache-2.0
// moe/wgrad.cuh: both weight gradients in one launch: dW_gate_up = dz^T x and dW_down = dy^T (score
// h), reduced over the rows of each expert. Entry pk_wgrad.
//
// Layer:      moe.
//
// Invariants: one CTA owns an output tile and adds all rows of the expert in pool order, fp32 in
//             registers: the same bits on every run. An expert without rows gets exact zeros, or is
//             left alone when adding. Rows between an expert's last and the next multiple of 64 are
//             zero in all four operands.
#pragma once
#include "../epilogue/weight_grad.cuh"
#include "../mma/sm90.cuh"
#include "../roles/grouped_gemm.cuh"
#include "gemm_args.cuh"

namespace prime::moe {

// kAdd: adds to the gradients instead of overwriting them.
template <bool kFp32, bool kAdd = false>
struct Wgrad {
    using Args = WgradArgs;
    using Tile = pipeline::Tile;
    using Smem = layout::GemmSmem<4, 2>;
    using Mma = mma::Hopper;
    using Epilogue = epilogue::WeightGrad<Wgrad, kFp32, kAdd>;
    static constexpr u32 kStages = 4;
    static constexpr bool kMnMajorA = true;
    static constexpr bool kMnMajorB = true;
    static constexpr u32 kTileM = layout::kTileM;
    static constexpr u32 kTileN = layout::kTileN;

    struct Launch {
        using Smem = layout::GemmSmem<4, 2>;
        using Mma = mma::Hopper;
    };
    static constexpr LaunchShape kLaunch = roles::gemm_launch<Launch>();

    // m-tiles of one of the two halves of dW_gate_up; its last tile may hang over.
    PK_DEVICE static u32 half_tiles(const Args& args) {
        return ceil_div(args.intermediate, kTileM);
    }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        if ((threadIdx.x & 31) != 0) return;
        const schedule::WeightTiles gate_up{
            args.do_gate_up ? 2 * half_tiles(args) : 0, ceil_div(args.hidden, kTileN)};
        const schedule::WeightTiles down{
            args.do_down ? ceil_div(args.hidden, kTileM) : 0, ceil_div(args.intermediate, kTileN)};
        roles::schedule_weights(
            {args.counts, args.starts, args.num_experts, gate_up, down}, ring, waiter);
    }

    PK_DEVICE static bool is_down(const Tile& t) { return t.kind == 1; }

    PK_DEVICE static u32 bytes(const Tile& t) {
        return layout::kStageBytesB + (t.valid ? layout::kStageBytesA : 0);
    }

    // First column of dz (or of dy) that the tile covers.
    PK_DEVICE static i32 first_column(const Args& args, const Tile& t) {
        const i32 tiles = static_cast<i32>(half_tiles(args));
        if (is_down(t) || t.row < tiles) return t.row * static_cast<i32>(kTileM);
        return static_cast<i32>(args.intermediate) + (t.row - tiles) * static_cast<i32>(kTileM);
    }

    PK_DEVICE static void load_a(
        const Args& args, const Tile& t, i32 k, const roles::StageAddr& at) {
        if (!t.valid) return;
        const TensorMap* map = is_down(t) ? &args.a1 : &args.a0;
        ptx::tma_load_4d(
            at.a, map, at.bar, 0, t.k0 + k * 64, first_column(args, t) / 64, 0, ptx::kEvictNormal);
    }

    PK_DEVICE static bool waits(const Args&) { return false; }

    PK_DEVICE static void pull(const Args&, u32) {}

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const roles::StageAddr& at, u32 half, bool) {
        const TensorMap* map = is_down(t) ? &args.b1 : &args.b0;
        const i32 block = t.n * static_cast<i32>(kTileN / 64) + static_cast<i32>(half * 2);
        ptx::tma_load_4d_multicast(
            at.b + half * (layout::kStageBytesB / 2), map, at.bar, 0, t.k0 + k * 64, block, 0,
            /*mask=*/3, ptx::kEvictNormal);
    }

    PK_DEVICE static epilogue::WeightOut output(const Args& args, const Tile& t, u32 warpgroup) {
        const i32 offset = static_cast<i32>(warpgroup * 64);
        const i32 column = t.n * static_cast<i32>(kTileN);
        const i32 tiles = static_cast<i32>(half_tiles(args));
        const bool up = !is_down(t) && t.row >= tiles;
        const i32 row = (t.row - (up ? tiles : 0)) * static_cast<i32>(kTileM) + offset;
        const TensorMap* map = is_down(t) ? &args.down : up ? &args.up : &args.gate;
        const u32 columns = is_down(t) ? args.intermediate : args.hidden;
        const u32 pitch = is_down(t) ? args.down_pitch : args.gate_up_pitch;
        const u64 matrix = is_down(t) ? args.down_matrix : args.gate_up_matrix;
        u8* memory = is_down(t) ? args.down_sum : up ? args.up_sum : args.gate_sum;
        memory += static_cast<u64>(t.expert) * matrix + static_cast<u64>(row) * pitch;
        memory += static_cast<u64>(column) * sizeof(float);
        return {map, row, column, static_cast<i32>(columns), t.expert, memory, pitch};
    }

    PK_DEVICE static bool has_rows(const Args& args, const Tile& t, u32 warpgroup) {
        const u32 rows = is_down(t) ? args.hidden : args.intermediate;
        if (kAdd && t.k_steps == 0) return false;
        return t.valid && output(args, t, warpgroup).row < static_cast<i32>(rows);
    }

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Wgrad>(args); }
};

}  // namespace prime::moe
