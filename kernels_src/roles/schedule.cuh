// SPDX-License-Identifier: Apache-2.0
// roles/schedule.cuh: the warp that turns counts of rows into this CTA's list of tiles.
//
// Layer:      roles (arch-free). One warp, converged; lane 0 writes the ring.
//
// Invariants: both CTAs of a pair compute the same task list and take their own half of each task,
// without talking.
#pragma once
#include "../common/types.cuh"
#include "../pipeline/tile_ring.cuh"
#include "../ptx/cluster.cuh"
#include "../schedule/grouped_k.cuh"
#include "../schedule/grouped_m.cuh"

namespace prime::roles {

using pipeline::Tile;
using pipeline::TileRing;
using pipeline::Waiter;

constexpr u32 kPair = 2;  // CTAs of a cluster

// Walks the experts with a window of 32 of them in the lanes of a warp; tasks are asked for in
// ascending order.
struct ExpertWindow {
    const i32* counts;
    u32 num_experts;
    u32 n_tiles;
    u32 lane;
    u32 base = 0;   // expert of lane 0
    u32 first = 0;  // first task of that expert
    u32 rows = 0;   // this lane's expert
    u32 end = 0;    // first task after this lane's expert

    PK_DEVICE void load() {
        const u32 e = base + lane;
        rows = e < num_experts ? static_cast<u32>(counts[e]) : 0;
        end = schedule::block_tasks(rows, n_tiles);
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 left = __shfl_up_sync(~0u, end, d);
            if (lane >= d) end += left;
        }
        end += first;
    }

    // The lane whose expert owns task `index`; moves the window as needed. 32: no such task.
    PK_DEVICE u32 find(u32 index) {
        for (;;) {
            const u32 owners = __ballot_sync(~0u, index < end);
            if (owners != 0) return __ffs(owners) - 1;
            first = __shfl_sync(~0u, end, 31);
            base += 32;
            if (base >= num_experts) return 32;
            load();
        }
    }
};

struct BlockList {
    const i32* counts;
    const i32* starts;
    u32 num_experts;
    u32 n_tiles;
    u32 k_steps;
    u32 columns;
    u32 tile_columns;  // columns of the output that one tile covers
};

PK_DEVICE Tile
block_tile(const BlockList& list, u32 expert, u32 rows, const schedule::BlockTask& t) {
    const i32 m = static_cast<i32>(t.m_block * schedule::kBlockRows);
    const i32 n = static_cast<i32>(t.n_tile * list.tile_columns);
    const bool exists = n < static_cast<i32>(list.columns);
    return Tile{
        .row = list.starts[expert] + m,
        .n = n,
        .expert = static_cast<i32>(expert),
        .k0 = 0,
        .k_steps = static_cast<i32>(list.k_steps),
        .valid =
            exists ? min_of(static_cast<i32>(rows) - m, static_cast<i32>(schedule::kBlockRows)) : 0,
        .multicast = t.multicast,
        .kind = 0};
}

// Grouped M: pushes this CTA's half of every task of its pair, then the end mark.
PK_DEVICE void schedule_blocks(const BlockList& list, TileRing ring, Waiter waiter) {
    const u32 lane = threadIdx.x & 31;
    const u32 rank = ptx::cluster_cta_rank();
    ExpertWindow window{list.counts, list.num_experts, list.n_tiles, lane};
    window.load();
    for (u32 index = blockIdx.x / kPair;; index += gridDim.x / kPair) {
        const u32 owner = window.find(index);
        if (owner == 32) break;
        const u32 rows = __shfl_sync(~0u, window.rows, owner);
        const u32 end = __shfl_sync(~0u, window.end, owner);
        const u32 local = index - (end - schedule::block_tasks(rows, list.n_tiles));
        const auto task = schedule::block_task(rows, list.n_tiles, local, rank);
        if (lane == 0) ring.push(waiter, block_tile(list, window.base + owner, rows, task));
        __syncwarp();
    }
    if (lane == 0) ring.push(waiter, Tile{.k_steps = -1});
}

struct WeightList {
    const i32* counts;
    const i32* starts;
    u32 num_experts;
    schedule::WeightTiles first;
    schedule::WeightTiles second;
};

// Grouped K: one lane.
PK_DEVICE void schedule_weights(const WeightList& list, TileRing ring, Waiter waiter) {
    const u32 rank = ptx::cluster_cta_rank();
    const u32 per_expert = list.first.tasks() + list.second.tasks();
    const u32 total = per_expert * list.num_experts;
    for (u32 index = blockIdx.x / kPair; index < total; index += gridDim.x / kPair) {
        const u32 expert = index / per_expert;
        const auto task = schedule::weight_task(list.first, list.second, index % per_expert, rank);
        const u32 m_tiles = task.weight == 0 ? list.first.m_tiles : list.second.m_tiles;
        ring.push(
            waiter, Tile{
                        .row = static_cast<i32>(task.m_tile),
                        .n = static_cast<i32>(task.n_tile),
                        .expert = static_cast<i32>(expert),
                        .k0 = list.starts[expert],
                        .k_steps = ceil_div(list.counts[expert], 64),
                        .valid = task.m_tile < m_tiles,
                        .multicast = 1,
                        .kind = static_cast<i32>(task.weight)});
    }
    ring.push(waiter, Tile{.k_steps = -1});
}

}  // namespace prime::roles
