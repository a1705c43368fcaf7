// SPDX-License-Identifier: Apache-2.0
// moe/block_gemm.cuh: what the four GEMMs with rows grouped by expert have in common.
//
// Layer:      moe.
#pragma once
#include "../epilogue/rows.cuh"
#include "../mma/sm90.cuh"
#include "../roles/grouped_gemm.cuh"
#include "gemm_args.cuh"

namespace prime::moe {

using pipeline::Tile;
using roles::StageAddr;

// kColumns: output columns that one tile covers (128 where a tile holds a gate and an up half).
template <u32 kStages_, u32 kSlabs, u32 kColumns, bool kMnMajorB_>
struct BlockGemm {
    using Args = GroupedArgs;
    using Smem = layout::GemmSmem<kStages_, kSlabs>;
    using Mma = mma::Hopper;
    static constexpr u32 kStages = kStages_;
    static constexpr bool kMnMajorA = false;
    static constexpr bool kMnMajorB = kMnMajorB_;
    static constexpr u32 kHalfA = layout::kStageBytesA / 2;
    static constexpr u32 kHalfB = layout::kStageBytesB / 2;

    // Only the half blocks of A that hold rows are loaded.
    PK_DEVICE static u32 bytes(const Tile& t) {
        const u32 a = t.valid > 64 ? 2 * kHalfA : t.valid > 0 ? kHalfA : 0;
        return a + (t.valid > 0 || t.multicast ? 2 * kHalfB : 0);
    }

    PK_DEVICE static void load_rows(
        const TensorMap* map, const Tile& t, i32 k, const StageAddr& at) {
        if (t.valid > 0) ptx::tma_load_2d(at.a, map, at.bar, k * 64, t.row, ptx::kEvictNormal);
        if (t.valid > 64)
            ptx::tma_load_2d(at.a + kHalfA, map, at.bar, k * 64, t.row + 64, ptx::kEvictNormal);
    }

    PK_DEVICE static void load_a(const Args& args, const Tile& t, i32 k, const StageAddr& at) {
        load_rows(&args.a, t, k, at);
    }

    // A is in memory from the start, unless this launch pulls it.
    PK_DEVICE static bool waits(const Args& args) { return args.arrivals != nullptr; }

    PK_DEVICE static void wait_rows(const Args& args, const Tile& t, roles::Waiter& waiter) {
        if (args.arrivals == nullptr || t.valid == 0) return;
        waiter.wait_counters(
            args.arrivals + t.row / 64, t.valid > 64, roles::kArrivalRows, Wait::kInput);
    }

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        if (args.pull_src == nullptr) return;
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::PullList list{args.pull_src, args.pull_dst,   args.row_src,
                             args.arrivals, args.pull_bytes, rows};
        list.timeline = profile::Timeline{args.fault};
        roles::pull(list, warp);
    }

    PK_DEVICE static bool has_rows(const Args&, const Tile& t, u32 warpgroup) {
        return t.valid > static_cast<i32>(warpgroup * 64);
    }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        const roles::BlockList list{args.counts,  args.starts,  args.num_experts, args.n_tiles,
                                    args.k_steps, args.columns, kColumns};
        roles::schedule_blocks(
            list, ring, waiter, [&](const Tile& t) { wait_rows(args, t, waiter); });
    }

    struct Box {
        i32 c0, c1, c2, c3;
    };

    PK_DEVICE static void load_box(
        const TensorMap* map, const Box& c, const StageAddr& at, u32 half, bool multicast) {
        const u32 dst = at.b + half * kHalfB;
        if (multicast)
            ptx::tma_load_4d_multicast(
                dst, map, at.bar, c.c0, c.c1, c.c2, c.c3, /*mask=*/3, ptx::kEvictNormal);
        else
            ptx::tma_load_4d(dst, map, at.bar, c.c0, c.c1, c.c2, c.c3, ptx::kEvictNormal);
    }
};

// The epilogue of the GEMMs whose result is rows: out0, times row_score when scored.
template <bool kScored>
struct RowsEpilogue {
    epilogue::SlabPair slabs;

    PK_DEVICE void prefetch(const GroupedArgs&, const Tile&, const epilogue::Seat&) {}

    PK_DEVICE void store(
        const GroupedArgs& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
        roles::Waiter&) {
        epilogue::Rows<kScored>::store(
            {args.out0, args.row_score, args.columns}, t, seat, acc, slabs);
    }
};

}  // namespace prime::moe
