// SPDX-License-Identifier: Apache-2.0
// roles/load.cuh: the thread that fills the operand stages.
//
// Layer:      roles (arch-free). One thread.
//
// Op gives, for a tile and a step: bytes(tile) that this CTA's stage receives, load_a(...) and
// load_b(...); and waits(args), whether rows are written during the launch. With multicast each CTA
// of the pair loads half of B into both; a CTA without a tile of its own still loads its half for
// the other.
//
// Invariants: a stage is refilled only after the math warps of both CTAs have released it, because
//             either CTA may write into the other's stage. Returns only when every copy into this
//             CTA has been consumed.
#pragma once
#include "../common/types.cuh"
#include "../layout/gemm_smem.cuh"
#include "../pipeline/tile_ring.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/mbarrier.cuh"
#include "schedule.cuh"

namespace prime::roles {

struct StageAddr {
    u32 a;
    u32 b;
    u32 bar;
};

template <class Op>
PK_DEVICE void load(const typename Op::Args& args, u32 base, TileRing tiles, Waiter waiter) {
    using Smem = typename Op::Smem;
    pipeline::Ring<Op::kStages> ring;
    const u32 rank = ptx::cluster_cta_rank();
    for (;;) {
        const Tile tile = tiles.pop(waiter);
        if (tile.k_steps < 0) break;
        // The scheduler acquired the rows of this tile before it gave it out; their writers' stores
        // before this thread's TMA loads of them.
        if (Op::waits(args)) ptx::fence_async_global();
        const u32 bytes = Op::bytes(tile);
        for (i32 k = 0; k < tile.k_steps; ++k, ring.advance()) {
            waiter.wait(
                base + Smem::kStageEmpty + 8 * ring.stage, ring.phase ^ 1, Wait::kStageFree);
            if (waiter.dead) continue;
            const StageAddr at{
                base + Smem::kA + ring.stage * layout::kStageBytesA,
                base + Smem::kB + ring.stage * layout::kStageBytesB,
                base + Smem::kStageFull + 8 * ring.stage};
            ptx::mbarrier_arrive_expect_tx(at.bar, bytes);
            if (tile.multicast) {
                Op::load_b(args, tile, k, at, rank, true);
            } else if (tile.valid > 0) {
                Op::load_b(args, tile, k, at, 0, false);
                Op::load_b(args, tile, k, at, 1, false);
            }
            Op::load_a(args, tile, k, at);
        }
    }
    for (u32 s = 0; s < Op::kStages; ++s, ring.advance())
        waiter.wait(base + Smem::kStageEmpty + 8 * ring.stage, ring.phase ^ 1, Wait::kStageFree);
}

}  // namespace prime::roles
