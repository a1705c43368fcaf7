// SPDX-License-Identifier: Apache-2.0
// moe/forward.cuh on the simulated machine: rows are pulled, both GEMMs chained, and whatever the
// order in which warps run and copies arrive, every value is right and nobody waits for ever.
#include "moe/forward.cuh"

#include "layer.hpp"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;

namespace {

sim::Machine machine(11);

struct Case {
    u32 hidden, intermediate, grid, lag;
    std::vector<i32> counts;
};

const Case kCases[] = {
    {64, 64, 2, 0, {1}},           {320, 192, 4, 2, {0, 130, 64, 0, 65}},
    {128, 448, 8, 0, {257, 1, 0}}, {576, 64, 2, 5, {129, 127}},
    {64, 128, 4, 1, {0, 0, 0}},    {128, 320, 6, 3, {70, 0, 3, 300, 64, 128, 1}},
};

// Everything that one launch reads and writes.
struct Launch {
    Layer l;
    Matrix tokens, x, gate_up, z, h, down, y;
    std::vector<i32> row_src;
    std::vector<u32> arrivals, h_done;
    FaultRecord fault{};
    sim::Tensor maps[7];
    moe::ForwardArgs args{};

    explicit Launch(const Case& c)
        : l(c.hidden, c.intermediate, c.counts, machine.random),
          tokens(1, 37, l.hidden),
          x(1, l.pool(), l.hidden),
          gate_up(l.experts(), 2 * l.intermediate, l.hidden),
          z(1, l.pool(), 2 * l.intermediate),
          h(1, l.pool(), l.intermediate),
          down(l.experts(), l.hidden, l.intermediate),
          y(1, l.pool(), l.hidden),
          arrivals(l.pool() / 64, 0),
          h_done(l.pool() / 64, 0) {
        tokens.fill(machine.random, 1.0f);
        gate_up.fill(machine.random, 0.0625f);
        down.fill(machine.random, 0.25f);
        for (u32 r = 0; r < l.pool(); ++r)
            row_src.push_back(
                l.expert_of(r) < l.experts() ? static_cast<i32>(machine.random.below(37)) : -1);
        const u32 half = l.intermediate;
        maps[0] = layer::rows_of(x), maps[1] = layer::k_major(gate_up, 0, half);
        maps[2] = layer::k_major(gate_up, half, half), maps[3] = layer::halves_of(z);
        maps[4] = layer::rows_of(h), maps[5] = layer::k_major(down, 0, l.hidden);
        maps[6] = layer::rows_of(y);
        args = {
            .x = sim::map_of(maps[0]),
            .gate = sim::map_of(maps[1]),
            .up = sim::map_of(maps[2]),
            .z = sim::map_of(maps[3]),
            .h = sim::map_of(maps[4]),
            .down = sim::map_of(maps[5]),
            .y = sim::map_of(maps[6]),
            .counts = l.counts.data(),
            .starts = l.starts.data(),
            .row_score = l.score.data(),
            .pull_src = reinterpret_cast<u8*>(tokens.bits.data()),
            .pull_dst = reinterpret_cast<u8*>(x.bits.data()),
            .row_src = row_src.data(),
            .arrivals = arrivals.data(),
            .h_done = h_done.data(),
            .fault = &fault,
            .num_experts = l.experts(),
            .hidden = l.hidden,
            .intermediate = half,
            .lag = c.lag,
            .keep_z = 1,
            .alpha = 1.0f,
            .clamp = INFINITY,
            .up_offset = 0.0f};
    }

    void check_outputs() const {
        layer::check_rows(l, x, "x", 0, [&](u32 r, u32, u32 c) {
            return tokens.get(0, static_cast<u32>(row_src[r]), c);
        });
        layer::check_rows(
            l, z, "z", 0, [&](u32 r, u32 e, u32 n) { return layer::dot(x, r, 0, gate_up, e, n); });
        layer::check_rows(l, h, "h", 1, [&](u32 r, u32, u32 n) {
            const double g = z.get(0, r, n), u = z.get(0, r, l.intermediate + n);
            return g * layer::sigmoid(g) * u;
        });
        layer::check_rows(l, y, "y", 1, [&](u32 r, u32 e, u32 n) {
            return l.score[r] * layer::dot(h, r, 0, down, e, n);
        });
    }
};

void run(const Case& c) {
    Launch launch(c);
    sim::run_kernel<moe::Forward<true>>(machine, c.grid, launch.args);
    CHECK(launch.fault.code == 0, "role %u waited too long", launch.fault.role);
    launch.check_outputs();
}

}  // namespace

CASE(every_value_is_right_whatever_runs_first) {
    for (u32 i = 0; i < 3; ++i)
        for (const Case& c : kCases)
            run(c);
}

CASE(the_same_inputs_give_the_same_bits_in_any_order) {
    const Case& c = kCases[1];
    Launch first(c);
    sim::run_kernel<moe::Forward<true>>(machine, 2, first.args);
    for (u32 grid = 2; grid <= 8; grid += 2) {
        Matrix before = first.y;
        std::fill(first.y.bits.begin(), first.y.bits.end(), 0xFFFF);
        std::fill(first.arrivals.begin(), first.arrivals.end(), 0);
        std::fill(first.h_done.begin(), first.h_done.end(), 0);
        first.args.lag = machine.random.below(6);
        sim::run_kernel<moe::Forward<true>>(machine, grid, first.args);
        for (u32 i = 0; i < before.bits.size(); ++i)
            CHECK(
                before.bits[i] == first.y.bits[i], "grid %u lag %u row %u column %u: %04x, %04x",
                grid, first.args.lag, i / c.hidden, i % c.hidden, before.bits[i], first.y.bits[i]);
    }
}
