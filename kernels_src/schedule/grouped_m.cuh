// SPDX-License-Identifier: Apache-2.0
// schedule/grouped_m.cuh: the order of output tiles of a GEMM whose rows are grouped by expert.
//
// Layer:      schedule (arch-free, host and device).
//
// A task is what a pair of CTAs does at once: two m-blocks of 128 rows with the same n-tile
// (weights multicast), or, for an expert's odd last block, one m-block with two n-tiles. Within an
// expert, units of eight m-blocks walk m fastest, so that one slab of weights serves the unit from
// L2.
//
// Invariants: the tasks of all experts, in order, cover every (m-block, n-tile) exactly once
//             (tests/host_cxx).
#pragma once
#include "../common/types.cuh"

namespace prime::schedule {

constexpr u32 kBlockRows = 128;
constexpr u32 kUnitPairs = 4;

struct BlockTask {
    u32 m_block;  // of this CTA, within the expert
    u32 n_tile;   // may be one past the end for the second CTA of an odd block
    bool multicast;
};

PK_HOST_DEVICE constexpr u32 block_tasks(u32 rows, u32 n_tiles) {
    const u32 blocks = ceil_div(rows, kBlockRows);
    return blocks / 2 * n_tiles + (blocks & 1) * ceil_div(n_tiles, 2u);
}

// Task `index` of an expert with `rows` rows, as CTA `rank` (0 or 1) of the pair sees it.
PK_HOST_DEVICE constexpr BlockTask block_task(u32 rows, u32 n_tiles, u32 index, u32 rank) {
    const u32 blocks = ceil_div(rows, kBlockRows);
    const u32 pairs = blocks / 2;
    if (index >= pairs * n_tiles) return {blocks - 1, (index - pairs * n_tiles) * 2 + rank, false};
    const u32 unit = index / (kUnitPairs * n_tiles);
    const u32 in_unit = index - unit * kUnitPairs * n_tiles;
    const u32 unit_pairs = min_of(kUnitPairs, pairs - unit * kUnitPairs);
    const u32 pair = unit * kUnitPairs + in_unit % unit_pairs;
    return {pair * 2 + rank, in_unit / unit_pairs, true};
}

}  // namespace prime::schedule
