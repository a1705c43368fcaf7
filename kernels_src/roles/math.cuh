// SPDX-License-Identifier: Apache-2.0
// roles/math.cuh: the two warpgroups that multiply and then run their own epilogue, 64 rows each,
// without waiting for one another: while one is in its epilogue the other has the tensor cores.
//
// Layer:      roles (arch-free; the architecture is behind mma/).
#pragma once
#include "../common/types.cuh"
#include "../epilogue/slabs.cuh"
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "../pipeline/tile_ring.cuh"
#include "../ptx/mbarrier.cuh"
#include "schedule.cuh"

namespace prime::roles {

// Tells the loaders of both CTAs that this warp is done with a stage.
PK_DEVICE void release_stage(u32 bar, u32 lane) {
    if (lane < kPair) ptx::mbarrier_arrive_remote(bar, lane);
}

// Where a warpgroup stands in the ring of operand stages.
template <class Op>
struct Stages {
    u32 base;  // of shared memory
    pipeline::Ring<Op::kStages>& ring;
    Waiter& waiter;
};

// Runs the stages of a tile. A warpgroup without rows only keeps the protocol. An epilogue that has
// step(k) gets a turn in every round, while the tensor cores work.
template <class Op>
PK_DEVICE void accumulate(
    mma::Accum& acc, const Stages<Op>& stages, const epilogue::Seat& seat, i32 k_steps,
    typename Op::Epilogue& epilogue) {
    using Smem = typename Op::Smem;
    using Mma = typename Op::Mma;
    const u32 base = stages.base;
    auto& ring = stages.ring;
    const u32 a_offset = base + Smem::kA + seat.warpgroup * (layout::kStageBytesA / 2);
    const auto start = [&](bool add) {
        stages.waiter.wait(base + Smem::kStageFull + 8 * ring.stage, ring.phase, Wait::kStageFull);
        Mma::template start_stage<Op::kMnMajorA, Op::kMnMajorB>(
            acc, a_offset + ring.stage * layout::kStageBytesA,
            base + Smem::kB + ring.stage * layout::kStageBytesB, add);
    };
    // The first stage is peeled: a conditional wait or overwrite in the loop makes the compiler
    // serialise it.
    start(false);
    u32 previous = ring.stage;
    ring.advance();
    for (i32 k = 1; k < k_steps; ++k, ring.advance()) {
        start(true);
        if constexpr (requires { epilogue.step(k); }) epilogue.step(k);
        Mma::template wait_stages<1>();
        release_stage(base + Smem::kStageEmpty + 8 * previous, seat.lane);
        previous = ring.stage;
    }
    Mma::template wait_stages<0>();
    Mma::finish(acc);
    release_stage(base + Smem::kStageEmpty + 8 * previous, seat.lane);
}

template <class Op>
PK_DEVICE void skip(const Stages<Op>& stages, const epilogue::Seat& seat, i32 k_steps) {
    using Smem = typename Op::Smem;
    const u32 base = stages.base;
    auto& ring = stages.ring;
    for (i32 k = 0; k < k_steps; ++k, ring.advance()) {
        stages.waiter.wait(base + Smem::kStageFull + 8 * ring.stage, ring.phase, Wait::kStageFull);
        // No instruction here keeps the warp together, and a lane left two rounds behind would take
        // the parity for its own.
        __syncwarp();
        release_stage(base + Smem::kStageEmpty + 8 * ring.stage, seat.lane);
    }
}

template <class Op>
PK_DEVICE void math(const typename Op::Args& args, u32 base, TileRing tiles, u32 warpgroup) {
    const epilogue::Seat seat{
        warpgroup, (threadIdx.x >> 5) & 3, threadIdx.x & 31, (threadIdx.x & 127) == 0};
    Waiter waiter = make_waiter<Op>(args, Role::kMath);
    pipeline::Ring<Op::kStages> ring;
    const Stages<Op> stages{base, ring, waiter};
    mma::Accum acc;
    auto epilogue = Op::make_epilogue(base, seat);
    for (;;) {
        if constexpr (requires { epilogue.idle(seat); })
            if (!tiles.has_next()) epilogue.idle(seat);
        const Tile tile = tiles.pop(waiter);
        // Before this tile is waited for, which may need what an earlier one has not announced yet.
        if constexpr (requires { epilogue.settle(args, tile, seat); })
            epilogue.settle(args, tile, seat);
        // Together, also when only one warp ran out of time: the others would meet it nowhere.
        if (seat.any(tile.k_steps < 0)) break;
        const u32 timeline_begin = waiter.timeline.now();
        if (!Op::has_rows(args, tile, warpgroup)) {
            skip<Op>(stages, seat, tile.k_steps);
            waiter.timeline.end_tile(timeline_begin, profile::Event::kSkip, tile);
            continue;
        }
        epilogue.prefetch(args, tile, seat);
        if (tile.k_steps > 0) {
            accumulate<Op>(acc, stages, seat, tile.k_steps, epilogue);
        } else {
#pragma unroll
            for (u32 i = 0; i < mma::kAccum; ++i)
                acc[i] = 0.0f;
        }
        const u32 timeline_store =
            waiter.timeline.end_tile(timeline_begin, profile::Event::kMultiply, tile);
        epilogue.store(args, tile, seat, acc, waiter);
        waiter.timeline.end(timeline_store, profile::Event::kEpilogue);
    }
    if (seat.leader) ptx::bulk_wait<0>();
    if constexpr (requires { epilogue.finish(); }) epilogue.finish();
}

}  // namespace prime::roles
