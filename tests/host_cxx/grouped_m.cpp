// SPDX-License-Identifier: Apache-2.0
// schedule/grouped_m.cuh: the tasks of one expert, as both CTAs of a pair see them.
#include "schedule/grouped_m.cuh"

#include <vector>

#include "check.hpp"

using namespace prime;
using namespace prime::schedule;

namespace {

constexpr u32 kMaxTiles = 17;

template <class F>
void each_shape(F&& run) {
    for (u32 n_tiles = 1; n_tiles <= kMaxTiles; ++n_tiles) {
        for (u32 rows = 0; rows <= 1100; ++rows)
            run(rows, n_tiles);
        for (const u32 rows : {2047u, 2048u, 2049u, 16384u, 32769u, 262143u})
            run(rows, n_tiles);
    }
}

u32 blocks_of(u32 rows) {
    u32 blocks = 0;
    for (u64 covered = 0; covered < rows; covered += 128)
        ++blocks;
    return blocks;
}

// What the page at the top of the header says, as loops instead of arithmetic.
std::vector<BlockTask> expected_tasks(u32 rows, u32 n_tiles, u32 rank) {
    const u32 blocks = blocks_of(rows);
    const u32 even = blocks - blocks % 2;
    std::vector<BlockTask> tasks;
    for (u32 unit = 0; unit < even; unit += 8)
        for (u32 n = 0; n < n_tiles; ++n)
            for (u32 m = unit; m < even && m < unit + 8; m += 2)
                tasks.push_back({m + rank, n, true});
    for (u32 n = 0; even != blocks && n < n_tiles; n += 2)
        tasks.push_back({even, n + rank, false});
    return tasks;
}

}  // namespace

CASE(every_block_and_column_tile_is_covered_exactly_once) {
    each_shape([](u32 rows, u32 n_tiles) {
        const u32 blocks = blocks_of(rows);
        std::vector<u32> seen(blocks * n_tiles, 0);
        for (u32 i = 0; i < block_tasks(rows, n_tiles); ++i) {
            for (u32 rank = 0; rank < 2; ++rank) {
                const BlockTask t = block_task(rows, n_tiles, i, rank);
                CHECK(
                    t.m_block < blocks, "rows %u n_tiles %u task %u: block %u", rows, n_tiles, i,
                    t.m_block);
                if (t.n_tile < n_tiles) ++seen[t.m_block * n_tiles + t.n_tile];
            }
        }
        for (u32 i = 0; i < seen.size(); ++i)
            CHECK(
                seen[i] == 1, "rows %u n_tiles %u: block %u tile %u seen %u times", rows, n_tiles,
                i / n_tiles, i % n_tiles, seen[i]);
    });
}

CASE(only_the_second_cta_of_an_odd_block_with_odd_tiles_gets_a_task_past_the_end) {
    each_shape([](u32 rows, u32 n_tiles) {
        u32 past = 0;
        const u32 tasks = block_tasks(rows, n_tiles);
        for (u32 i = 0; i < tasks; ++i) {
            CHECK(
                block_task(rows, n_tiles, i, 0).n_tile < n_tiles, "rows %u n_tiles %u task %u",
                rows, n_tiles, i);
            const BlockTask t = block_task(rows, n_tiles, i, 1);
            if (t.n_tile < n_tiles) continue;
            ++past;
            CHECK(
                !t.multicast && t.n_tile == n_tiles && i + 1 == tasks,
                "rows %u n_tiles %u task %u: tile %u", rows, n_tiles, i, t.n_tile);
        }
        CHECK(
            past == blocks_of(rows) % 2 * (n_tiles % 2), "rows %u n_tiles %u: %u past the end",
            rows, n_tiles, past);
    });
}

CASE(a_multicast_pair_shares_its_columns_and_has_adjacent_blocks) {
    each_shape([](u32 rows, u32 n_tiles) {
        for (u32 i = 0; i < block_tasks(rows, n_tiles); ++i) {
            const BlockTask a = block_task(rows, n_tiles, i, 0),
                            b = block_task(rows, n_tiles, i, 1);
            CHECK(a.multicast == b.multicast, "rows %u n_tiles %u task %u", rows, n_tiles, i);
            if (a.multicast)
                CHECK(
                    a.n_tile == b.n_tile && a.m_block % 2 == 0 && b.m_block == a.m_block + 1,
                    "rows %u n_tiles %u task %u", rows, n_tiles, i);
            else
                CHECK(
                    a.m_block == b.m_block && a.n_tile % 2 == 0 && b.n_tile == a.n_tile + 1,
                    "rows %u n_tiles %u task %u", rows, n_tiles, i);
        }
    });
}

CASE(units_of_eight_blocks_walk_rows_fastest_and_an_odd_block_comes_last) {
    each_shape([](u32 rows, u32 n_tiles) {
        for (u32 rank = 0; rank < 2; ++rank) {
            const std::vector<BlockTask> expected = expected_tasks(rows, n_tiles, rank);
            CHECK(
                block_tasks(rows, n_tiles) == expected.size(),
                "rows %u n_tiles %u: %u tasks, not %zu", rows, n_tiles, block_tasks(rows, n_tiles),
                expected.size());
            for (u32 i = 0; i < expected.size(); ++i) {
                const BlockTask t = block_task(rows, n_tiles, i, rank);
                const BlockTask& e = expected[i];
                CHECK(
                    t.m_block == e.m_block && t.n_tile == e.n_tile && t.multicast == e.multicast,
                    "rows %u n_tiles %u task %u rank %u: (%u, %u), not (%u, %u)", rows, n_tiles, i,
                    rank, t.m_block, t.n_tile, e.m_block, e.n_tile);
            }
        }
    });
}
