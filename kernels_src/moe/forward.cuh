// SPDX-License-Identifier: Apache-2.0
// moe/forward.cuh: the forward in one persistent launch: rows of x are pulled into the pool,
// multiplied with gate and up, through SwiGLU, and with down, scored. Entry pk_forward.
//
// Layer:      moe.
//
// Threads:    roles/grouped_gemm.cuh. Tiles of both GEMMs interleave, down `lag` experts behind.
//
// Invariants: a gate/up tile waits for its rows' arrival counters, a down tile for the h_done
//             counters of its rows; both are raised by work that stands earlier in the tile list or
//             waits for nothing, so the list always advances.
#pragma once
#include "../epilogue/gate_up.cuh"
#include "../epilogue/rows.cuh"
#include "block_gemm.cuh"

namespace prime::moe {

template <bool kPlain>
struct Forward {
    using Base = BlockGemm<4, 2, 128, false>;
    using Args = ForwardArgs;
    using Smem = Base::Smem;
    using Mma = Base::Mma;
    static constexpr u32 kStages = Base::kStages;
    static constexpr bool kMnMajorA = false;
    static constexpr bool kMnMajorB = false;
    static constexpr LaunchShape kLaunch = roles::gemm_launch<Base>();
    static constexpr u32 kGateUpColumns = 128;  // of h per tile
    static constexpr u32 kDownColumns = 256;

    PK_DEVICE static bool is_down(const Tile& t) { return t.kind == 1; }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        const roles::BlockList gate_up{
            args.counts,      args.starts,
            args.num_experts, ceil_div(args.intermediate, kGateUpColumns),
            args.hidden / 64, args.intermediate,
            kGateUpColumns};
        const roles::BlockList down{
            args.counts,
            args.starts,
            args.num_experts,
            ceil_div(args.hidden, kDownColumns),
            args.intermediate / 64,
            args.hidden,
            kDownColumns};
        roles::schedule_chain(gate_up, down, args.lag, ring, waiter);
    }

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::pull(
            {args.pull_src, args.pull_dst, args.row_src, args.arrivals, args.hidden * 2, rows},
            warp);
    }

    PK_DEVICE static u32 bytes(const Tile& t) { return Base::bytes(t); }

    PK_DEVICE static void wait_rows(const Args& args, const Tile& t, roles::Waiter& waiter) {
        if (t.valid == 0) return;
        const u32* counter = (is_down(t) ? args.h_done : args.arrivals) + t.row / 64;
        const u32 target =
            is_down(t) ? ceil_div(args.intermediate, kGateUpColumns) : roles::kArrivalRows;
        waiter.wait_counter(counter, target, Wait::kInput);
        if (t.valid > 64) waiter.wait_counter(counter + 1, target, Wait::kInput);
        // The rows' writers, acquired above, before this thread's TMA loads.
        ptx::fence_async_global();
    }

    PK_DEVICE static void load_a(const Args& args, const Tile& t, i32 k, const StageAddr& at) {
        const TensorMap* map = is_down(t) ? &args.h : &args.x;
        if (t.valid > 0) ptx::tma_load_2d(at.a, map, at.bar, k * 64, t.row, ptx::kEvictNormal);
        if (t.valid > 64)
            ptx::tma_load_2d(
                at.a + Base::kHalfA, map, at.bar, k * 64, t.row + 64, ptx::kEvictNormal);
    }

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        if (is_down(t)) {
            const i32 n = t.n + static_cast<i32>(half * 128);
            Base::load_box(&args.down, {k * 64, n, 0, t.expert}, at, half, multicast);
        } else {
            const TensorMap* map = half == 0 ? &args.gate : &args.up;
            Base::load_box(map, {k * 64, t.n, 0, t.expert}, at, half, multicast);
        }
    }

    PK_DEVICE static bool has_rows(const Args&, const Tile& t, u32 warpgroup) {
        return t.valid > static_cast<i32>(warpgroup * 64);
    }

    struct Epilogue {
        epilogue::SlabPair slabs;

        PK_DEVICE void prefetch(const Args&, const Tile&, const epilogue::Seat&) {}

        PK_DEVICE void store(
            const Args& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
            roles::Waiter&) {
            if (is_down(t)) {
                epilogue::Rows<true>::store(
                    {args.y, args.row_score, args.hidden}, t, seat, acc, slabs);
                return;
            }
            const epilogue::GateUpOut out{
                args.z,
                args.h,
                {args.alpha, args.clamp, args.up_offset, 0.0f},
                args.intermediate,
                args.keep_z != 0};
            epilogue::GateUp<kPlain>::store(out, t, seat, acc, slabs);
            if (!seat.leader) return;
            // h complete in memory, then the counter, for TMA loads by whoever acquires it.
            ptx::bulk_wait<0>();
            ptx::fence_async_global();
            ptx::red_add_release_gpu(args.h_done + t.row / 64 + seat.warpgroup, 1);
        }
    };

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Forward>(args); }
};

}  // namespace prime::moe
