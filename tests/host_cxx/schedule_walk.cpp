// SPDX-License-Identifier: Apache-2.0
// roles/schedule.cuh through the tile ring: the scheduler warps of all CTAs of a grid run side by
// side, nine readers each, and hand out every tile of every expert exactly once.
#include "roles/schedule.cuh"

#include <array>
#include <map>

#include "check.hpp"
#include "sim/builtins.hpp"

using namespace prime;
using pipeline::Tile;

namespace {

constexpr u32 kReaders = 9;  // kernels have more; the ring asks for no number
constexpr u32 kFull = 512;   // offsets in shared memory, behind the entries
constexpr u32 kEmpty = 640;
constexpr sim::Shape kCta{0, 64, 2, 1024};

sim::Machine machine(1);

struct Experts {
    std::vector<i32> counts, starts;

    u32 size() const { return static_cast<u32>(counts.size()); }
};

// Every kind of tail, empty experts in front, between and at the end.
Experts random_experts(u32 most) {
    constexpr i32 kSpecial[] = {0, 0, 0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024, 1025};
    Experts e;
    e.starts.push_back(0);
    for (u32 n = machine.random.below(most + 1); n > 0; --n) {
        const bool special = machine.random.below(2);
        const u32 any = machine.random.below(700);
        e.counts.push_back(special ? kSpecial[machine.random.below(15)] : static_cast<i32>(any));
        e.starts.push_back(e.starts.back() + (e.counts.back() + 63) / 64 * 64);
    }
    return e;
}

using Record = std::vector<std::vector<Tile>>;  // tiles of each CTA, in order

bool same(const Tile& a, const Tile& b) {
    return std::memcmp(&a, &b, sizeof(Tile)) == 0;
}

// Runs schedule(ring, waiter) in warp 1 of every CTA; nine threads of warp 0 read what it writes.
template <class F>
Record tiles_of_all(u32 grid, F&& schedule) {
    Record record(grid);
    std::vector<std::array<u32, kReaders>> read(grid, std::array<u32, kReaders>{});
    FaultRecord fault{};
    sim::Shape shape = kCta;
    shape.grid = grid;
    sim::run_grid(machine, shape, [&] {
        const u32 base = ptx::smem_addr(nullptr);
        const u32 t = threadIdx.x;
        for (u32 i = 0; t == 0 && i < pipeline::kTileRingDepth; ++i) {
            ptx::mbarrier_init(base + kFull + 8 * i, 1);
            ptx::mbarrier_init(base + kEmpty + 8 * i, kReaders);
        }
        __syncthreads();
        roles::TileRing ring{base, base + kFull, base + kEmpty};
        if (t >= 32) schedule(ring, roles::Waiter{&fault, Role::kSchedule});
        if (t >= kReaders) return;
        roles::Waiter waiter{&fault, Role::kLoad};
        for (;;) {
            const Tile tile = ring.pop(waiter);
            if (tile.k_steps < 0) break;
            std::vector<Tile>& mine = record[blockIdx.x];
            u32& seen = read[blockIdx.x][t];
            if (seen == mine.size()) mine.push_back(tile);
            CHECK(same(mine[seen], tile), "CTA %u: readers disagree on tile %u", blockIdx.x, seen);
            ++seen;
        }
    });
    CHECK(fault.code == 0, "a wait ran out of time");
    for (u32 cta = 0; cta < grid; ++cta)
        for (const u32 seen : read[cta])
            CHECK(seen == record[cta].size(), "CTA %u: a reader got %u tiles", cta, seen);
    return record;
}

// The output of one GEMM.
struct Output {
    u32 n_tiles, tile_columns, columns, k_steps;

    explicit Output(u32 steps) : k_steps(steps) {
        tile_columns = machine.random.below(2) ? 256 : 128;
        n_tiles = 1 + machine.random.below(9);
        columns = n_tiles * tile_columns - machine.random.below(tile_columns / 64) * 64;
    }

    roles::BlockList list(const Experts& e) const {
        return {e.counts.data(), e.starts.data(), e.size(),    n_tiles,
                k_steps,         columns,         tile_columns};
    }
};

using Seen = std::map<std::array<u32, 3>, u32>;  // (expert, block, n-tile): how often

struct Blocks {
    Experts experts;
    Output output{5};
    u32 grid;

    explicit Blocks(u32 most) : experts(random_experts(most)) {
        grid = 2 + machine.random.below(66) * 2;
    }

    Record run() const {
        const roles::BlockList list = output.list(experts);
        return tiles_of_all(grid, [&](const roles::TileRing& ring, roles::Waiter waiter) {
            roles::schedule_blocks(list, ring, waiter, [](const Tile&) {});
        });
    }

    // What one tile has to be, whichever it is.
    void check_tile(const Tile& t) const {
        const u32 e = static_cast<u32>(t.expert);
        CHECK(e < experts.size() && t.kind == 0, "expert %u kind %d", e, t.kind);
        const i32 first = t.row - experts.starts[e], rows = experts.counts[e];
        CHECK(t.k_steps == static_cast<i32>(output.k_steps) && t.k0 == 0, "%d steps", t.k_steps);
        CHECK(first % 128 == 0 && first < rows, "expert %u: row %d of %d", e, first, rows);
        const bool past = t.n >= static_cast<i32>(output.columns);
        const i32 valid = past ? 0 : rows - first < 128 ? rows - first : 128;
        CHECK(t.valid == valid, "expert %u row %d: %d valid rows", e, first, t.valid);
        CHECK(!past || !t.multicast, "expert %u: an absent tile is shared", e);
    }

    void check_once(const Record& record) const {
        Seen seen;
        for (const std::vector<Tile>& tiles : record)
            for (const Tile& t : tiles) {
                check_tile(t);
                const u32 e = static_cast<u32>(t.expert);
                const u32 block = static_cast<u32>(t.row - experts.starts[e]) / 128;
                if (t.valid) ++seen[{e, block, t.n / output.tile_columns}];
            }
        u64 tiles = 0;
        for (const i32 rows : experts.counts)
            tiles += u64{static_cast<u32>(rows + 127) / 128} * output.n_tiles;
        CHECK(
            seen.size() == tiles, "%u experts, grid %u: %zu tiles, not %llu", experts.size(), grid,
            seen.size(), tiles);
        for (const auto& [tile, times] : seen)
            CHECK(
                times == 1, "grid %u: expert %u block %u tile %u: %u times", grid, tile[0], tile[1],
                tile[2], times);
    }
};

// CTAs of a pair load for each other: they need equally many steps, in the same order.
void check_pairs(const Record& record) {
    for (u32 cta = 0; cta < record.size(); cta += 2) {
        CHECK(record[cta].size() == record[cta + 1].size(), "CTA %u and the next", cta);
        for (u32 i = 0; i < record[cta].size(); ++i) {
            const Tile &a = record[cta][i], &b = record[cta + 1][i];
            CHECK(
                a.k_steps == b.k_steps && a.multicast == b.multicast && a.expert == b.expert &&
                    a.kind == b.kind && a.k0 == b.k0 && (!a.multicast || a.n == b.n),
                "CTA %u tile %u: the pair disagrees", cta, i);
        }
    }
}

struct Weights {
    Experts experts;
    schedule::WeightTiles first, second;
    u32 grid;

    explicit Weights(u32 most) : experts(random_experts(most)) {
        first = {machine.random.below(6), 1 + machine.random.below(4)};
        second = {machine.random.below(6), 1 + machine.random.below(4)};
        grid = 2 + machine.random.below(66) * 2;
    }

    Record run() const {
        const roles::WeightList list{
            experts.counts.data(), experts.starts.data(), experts.size(), first, second};
        return tiles_of_all(grid, [&](const roles::TileRing& ring, const roles::Waiter& waiter) {
            if (threadIdx.x % 32 == 0) roles::schedule_weights(list, ring, waiter);
        });
    }
};

}  // namespace

CASE(every_output_tile_of_every_expert_is_handed_out_exactly_once) {
    for (u32 i = 0; i < 24; ++i) {
        const Blocks b(i < 18 ? 40 : 130);
        b.check_once(b.run());
    }
}

CASE(both_ctas_of_a_pair_take_the_same_steps) {
    for (u32 i = 0; i < 8; ++i) {
        check_pairs(Blocks(40).run());
        check_pairs(Weights(20).run());
    }
}

CASE(every_weight_tile_of_every_expert_is_handed_out_exactly_once) {
    for (u32 i = 0; i < 40; ++i) {
        const Weights w(30);
        std::map<std::array<u32, 4>, u32> seen;
        for (const std::vector<Tile>& tiles : w.run())
            for (const Tile& t : tiles) {
                const u32 e = static_cast<u32>(t.expert), row = static_cast<u32>(t.row);
                const schedule::WeightTiles& of = t.kind == 0 ? w.first : w.second;
                CHECK(e < w.experts.size() && t.multicast, "expert %u", e);
                CHECK(t.k0 == w.experts.starts[e], "expert %u starts at %d", e, t.k0);
                CHECK(t.k_steps * 64 >= w.experts.counts[e], "expert %u: %d steps", e, t.k_steps);
                CHECK((t.k_steps - 1) * 64 < w.experts.counts[e], "expert %u: a step too many", e);
                CHECK((t.valid != 0) == (row < of.m_tiles), "expert %u tile %u", e, row);
                if (t.valid) ++seen[{e, static_cast<u32>(t.kind), row, static_cast<u32>(t.n)}];
            }
        const u32 tiles = w.first.m_tiles * w.first.n_tiles + w.second.m_tiles * w.second.n_tiles;
        CHECK(seen.size() == w.experts.size() * tiles, "round %u: %zu tiles", i, seen.size());
        for (const auto& [tile, times] : seen)
            CHECK(
                times == 1 && tile[3] < (tile[1] == 0 ? w.first : w.second).n_tiles,
                "expert %u: %u times", tile[0], times);
    }
}
