// SPDX-License-Identifier: Apache-2.0
// schedule/grouped_k.cuh: the order of weight-gradient tiles, whose reduction runs over the rows of
// one expert.
//
// Layer:      schedule (arch-free, host and device).
//
// Every expert has the same tasks: a pair of CTAs takes two m-tiles of 128 with the same n-tile,
// for both weight gradients in turn. All tasks of an expert stand together, so that its rows are
// read from L2.
//
// Invariants: the tasks of an expert cover every (weight, m-tile, n-tile) exactly once
//             (tests/host_cxx).
#pragma once
#include "../common/types.cuh"

namespace prime::schedule {

struct WeightTiles {
    u32 m_tiles;
    u32 n_tiles;

    PK_HOST_DEVICE constexpr u32 tasks() const { return ceil_div(m_tiles, 2u) * n_tiles; }
};

struct WeightTask {
    u32 weight;  // 0 or 1
    u32 m_tile;  // may be one past the end for the second CTA
    u32 n_tile;
};

// Task `index` within an expert, as CTA `rank` of the pair sees it.
PK_HOST_DEVICE constexpr WeightTask weight_task(
    WeightTiles first, WeightTiles second, u32 index, u32 rank) {
    const u32 weight = index < first.tasks() ? 0 : 1;
    const u32 local = weight == 0 ? index : index - first.tasks();
    const u32 pairs = ceil_div(weight == 0 ? first.m_tiles : second.m_tiles, 2u);
    return {weight, local % pairs * 2 + rank, local / pairs};
}

}  // namespace prime::schedule
