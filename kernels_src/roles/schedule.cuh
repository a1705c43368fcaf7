// SPDX-License-Identifier: Apache-2.0
// roles/schedule.cuh: the warp that turns counts of rows into this CTA's list of tiles.
//
// Layer:      roles (arch-free). One warp, converged; lane 0 writes the ring.
//
// Invariants: both CTAs of a pair compute the same task list and take their own half of each task,
//             without talking.
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

template <class Op>
PK_DEVICE Waiter make_waiter(const typename Op::Args& args, Role role) {
    if constexpr (requires { Op::peers_ns(args); })
        return Waiter{args.fault, role, Op::peers_ns(args)};
    else
        return Waiter{args.fault, role};
}

// Walks a list of segments with a window of 32 of them in the lanes of a warp; tasks are asked for
// in ascending order. Sizes::operator()(s) is the number of tasks of segment s.
template <class Sizes>
struct SegmentWindow {
    const Sizes& sizes;
    u32 num_segments;
    u32 lane;
    u32 base = 0;   // segment of lane 0
    u32 first = 0;  // first task of that segment
    u32 size = 0;   // this lane's segment
    u32 end = 0;    // first task after this lane's segment

    PK_DEVICE void load() {
        size = base + lane < num_segments ? sizes(base + lane) : 0;
        end = size;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 left = __shfl_up_sync(~0u, end, d);
            if (lane >= d) end += left;
        }
        end += first;
    }

    // Calls fn(segment, task within it) for tasks `index`, `index + step`, ... until the list ends.
    template <class Fn>
    PK_DEVICE void for_each(u32 index, u32 step, Fn fn) {
        load();
        for (;; index += step) {
            u32 owners = __ballot_sync(~0u, index < end);
            while (owners == 0) {
                first = __shfl_sync(~0u, end, 31);
                base += 32;
                if (base >= num_segments) return;
                load();
                owners = __ballot_sync(~0u, index < end);
            }
            const u32 owner = __ffs(owners) - 1;
            const u32 start = __shfl_sync(~0u, end - size, owner);
            fn(base + owner, index - start);
            __syncwarp();
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

struct BlockSizes {
    const BlockList& list;

    PK_DEVICE u32 operator()(u32 e) const {
        return schedule::block_tasks(static_cast<u32>(list.counts[e]), list.n_tiles);
    }
};

// Task `local` of an expert, as CTA `rank` of the pair has it.
PK_DEVICE Tile block_tile(const BlockList& list, u32 expert, u32 local, u32 rank, i32 kind) {
    const u32 rows = static_cast<u32>(list.counts[expert]);
    const auto task = schedule::block_task(rows, list.n_tiles, local, rank);
    const i32 m = static_cast<i32>(task.m_block * schedule::kBlockRows);
    const i32 n = static_cast<i32>(task.n_tile * list.tile_columns);
    const i32 left = min_of(static_cast<i32>(rows) - m, static_cast<i32>(schedule::kBlockRows));
    return Tile{
        .row = list.starts[expert] + m,
        .n = n,
        .expert = static_cast<i32>(expert),
        .k0 = 0,
        .k_steps = static_cast<i32>(list.k_steps),
        .valid = n < static_cast<i32>(list.columns) ? left : 0,
        .multicast = task.multicast,
        .kind = kind};
}

// Grouped M: pushes this CTA's half of every task of its pair, then the end mark. ready(tile)
// returns once the tile's rows may be read; this warp is some tiles ahead of the others, so that
// what it waits for has mostly come, and looking takes none of the loader's time.
template <class Ready>
PK_DEVICE void schedule_blocks(const BlockList& list, TileRing ring, Waiter& waiter, Ready ready) {
    const u32 lane = threadIdx.x & 31;
    const u32 rank = ptx::cluster_cta_rank();
    const BlockSizes sizes{list};
    SegmentWindow<BlockSizes> window{sizes, list.num_experts, lane};
    window.for_each(blockIdx.x / kPair, gridDim.x / kPair, [&](u32 expert, u32 local) {
        if (lane != 0) return;
        const Tile tile = block_tile(list, expert, local, rank, 0);
        ready(tile);
        ring.push(waiter, tile);
    });
    if (lane == 0) ring.push(waiter, Tile{.k_steps = -1});
}

// Two GEMMs of which the second reads what the first wrote: segment s is expert s of the first,
// then expert s - lag of the second. Every wait points backwards in this order, so the earliest
// unfinished tile can always run.
struct ChainSizes {
    const BlockList& first;
    const BlockList& second;
    u32 lag;

    PK_DEVICE u32 of_first(u32 s) const { return s < first.num_experts ? BlockSizes{first}(s) : 0; }

    PK_DEVICE u32 operator()(u32 s) const {
        return of_first(s) + (s >= lag ? BlockSizes{second}(s - lag) : 0);
    }
};

template <class Ready>
PK_DEVICE void schedule_chain(
    const BlockList& first, const BlockList& second, u32 lag, TileRing ring, Waiter& waiter,
    Ready ready) {
    const u32 lane = threadIdx.x & 31;
    const u32 rank = ptx::cluster_cta_rank();
    const ChainSizes sizes{first, second, lag};
    SegmentWindow<ChainSizes> window{sizes, first.num_experts + lag, lane};
    window.for_each(blockIdx.x / kPair, gridDim.x / kPair, [&](u32 s, u32 local) {
        if (lane != 0) return;
        const u32 firsts = sizes.of_first(s);
        const Tile tile = local < firsts ? block_tile(first, s, local, rank, 0)
                                         : block_tile(second, s - lag, local - firsts, rank, 1);
        ready(tile);
        ring.push(waiter, tile);
    });
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
