// SPDX-License-Identifier: Apache-2.0
// schedule/grouped_k.cuh: the weight-gradient tasks of one expert, as both CTAs of a pair see them.
#include "schedule/grouped_k.cuh"

#include <vector>

#include "check.hpp"

using namespace prime;
using namespace prime::schedule;

namespace {

constexpr u32 kMaxM = 13;
constexpr u32 kMaxN = 6;

struct Shape {
    WeightTiles tiles[2];

    u32 tasks() const { return tiles[0].tasks() + tiles[1].tasks(); }

    WeightTask at(u32 index, u32 rank) const {
        return weight_task(tiles[0], tiles[1], index, rank);
    }
};

#define SHAPE_FORMAT "first %u x %u, second %u x %u"
#define SHAPE_OF(s) \
    (s).tiles[0].m_tiles, (s).tiles[0].n_tiles, (s).tiles[1].m_tiles, (s).tiles[1].n_tiles

// Every pair of small weights, one or both of them without tiles, and some as large as a model's.
template <class F>
void each_shape(F&& run) {
    for (u32 m0 = 0; m0 <= kMaxM; ++m0)
        for (u32 n0 = 1; n0 <= kMaxN; ++n0)
            for (u32 m1 = 0; m1 <= kMaxM; ++m1)
                for (u32 n1 = 1; n1 <= kMaxN; ++n1)
                    run(Shape{{{m0, n0}, {m1, n1}}});
    run(Shape{{{224, 16}, {32, 56}}});
    run(Shape{{{46, 12}, {23, 12}}});
    run(Shape{{{0, 0}, {0, 0}}});
}

std::vector<WeightTask> expected_tasks(const Shape& s, u32 rank) {
    std::vector<WeightTask> tasks;
    for (u32 w = 0; w < 2; ++w)
        for (u32 n = 0; n < s.tiles[w].n_tiles; ++n)
            for (u32 m = 0; m < s.tiles[w].m_tiles; m += 2)
                tasks.push_back({w, m + rank, n});
    return tasks;
}

}  // namespace

CASE(every_tile_of_both_weights_is_covered_exactly_once) {
    each_shape([](const Shape& s) {
        std::vector<u32> seen[2];
        for (u32 w = 0; w < 2; ++w)
            seen[w].assign(s.tiles[w].m_tiles * s.tiles[w].n_tiles, 0);
        for (u32 i = 0; i < s.tasks() * 2; ++i) {
            const WeightTask t = s.at(i / 2, i % 2);
            CHECK(
                t.weight < 2 && t.n_tile < s.tiles[t.weight].n_tiles, SHAPE_FORMAT ": task %u",
                SHAPE_OF(s), i / 2);
            const WeightTiles& tiles = s.tiles[t.weight];
            if (t.m_tile < tiles.m_tiles) ++seen[t.weight][t.m_tile * tiles.n_tiles + t.n_tile];
        }
        for (u32 w = 0; w < 2; ++w)
            for (const u32 times : seen[w])
                CHECK(
                    times == 1, SHAPE_FORMAT ": a tile of weight %u seen %u times", SHAPE_OF(s), w,
                    times);
    });
}

CASE(only_the_second_cta_gets_a_tile_past_the_end_and_only_when_the_tiles_are_odd) {
    each_shape([](const Shape& s) {
        u32 past[2] = {0, 0};
        for (u32 i = 0; i < s.tasks() * 2; ++i) {
            const WeightTask t = s.at(i / 2, i % 2);
            if (t.m_tile < s.tiles[t.weight].m_tiles) continue;
            ++past[t.weight];
            CHECK(
                i % 2 == 1 && t.m_tile == s.tiles[t.weight].m_tiles, SHAPE_FORMAT ": task %u",
                SHAPE_OF(s), i / 2);
        }
        for (u32 w = 0; w < 2; ++w)
            CHECK(
                past[w] == s.tiles[w].m_tiles % 2 * s.tiles[w].n_tiles,
                SHAPE_FORMAT ": %u past the end of weight %u", SHAPE_OF(s), past[w], w);
    });
}

CASE(the_first_weight_comes_first_and_rows_walk_fastest) {
    each_shape([](const Shape& s) {
        for (u32 rank = 0; rank < 2; ++rank) {
            const std::vector<WeightTask> expected = expected_tasks(s, rank);
            CHECK(s.tasks() == expected.size(), SHAPE_FORMAT ": %u tasks", SHAPE_OF(s), s.tasks());
            for (u32 i = 0; i < expected.size(); ++i) {
                const WeightTask t = s.at(i, rank);
                const WeightTask& e = expected[i];
                CHECK(
                    t.weight == e.weight && t.m_tile == e.m_tile && t.n_tile == e.n_tile,
                    SHAPE_FORMAT ": task %u rank %u is (%u, %u, %u)", SHAPE_OF(s), i, rank,
                    t.weight, t.m_tile, t.n_tile);
            }
        }
    });
}
