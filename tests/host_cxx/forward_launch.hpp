// SPDX-License-Identifier: Apache-2.0
// forward_launch.hpp: one launch of moe/forward.cuh on the simulated machine.
#pragma once
#include "layer.hpp"
#include "moe/forward.cuh"
#include "sim/grid.hpp"

namespace layer {

namespace moe = prime::moe;

struct ForwardCase {
    u32 hidden, intermediate, grid, lag;
    std::vector<i32> counts;
};

// Everything that one launch reads and writes.
struct ForwardLaunch {
    Layer l;
    Matrix tokens, gate_up, z, h, down, y;
    std::vector<i32> row_src;
    std::vector<u32> h_done;
    prime::FaultRecord fault{};
    sim::Tensor maps[6];
    moe::ForwardArgs args{};

    ForwardLaunch(const ForwardCase& c, test::Random& random)
        : l(c.hidden, c.intermediate, c.counts, random),
          tokens(1, 37, l.hidden),
          gate_up(l.experts(), 2 * l.intermediate, l.hidden),
          z(1, l.pool(), 2 * l.intermediate),
          h(1, l.pool(), l.intermediate),
          down(l.experts(), l.hidden, l.intermediate),
          y(1, l.pool(), l.hidden),
          h_done(l.pool() / 64, 0) {
        tokens.fill(random, 1.0f);
        gate_up.fill(random, 0.0625f);
        down.fill(random, 0.25f);
        for (u32 r = 0; r < l.pool(); ++r)
            row_src.push_back(
                l.expert_of(r) < l.experts() ? static_cast<i32>(random.below(37)) : -1);
        const u32 half = l.intermediate;
        maps[0] = k_major(gate_up, 0, half), maps[1] = k_major(gate_up, half, half);
        maps[2] = halves_of(z), maps[3] = rows_of(h);
        maps[4] = k_major(down, 0, l.hidden), maps[5] = rows_of(y);
        args = {
            .gate = sim::map_of(maps[0]),
            .up = sim::map_of(maps[1]),
            .z = sim::map_of(maps[2]),
            .h = sim::map_of(maps[3]),
            .down = sim::map_of(maps[4]),
            .y = sim::map_of(maps[5]),
            .counts = l.counts.data(),
            .starts = l.starts.data(),
            .row_score = l.score.data(),
            .x = reinterpret_cast<u8*>(tokens.bits.data()),
            .row_src = row_src.data(),
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
        check_rows(l, z, "z", 0, [&](u32 r, u32 e, u32 n) { return dot(tokens, static_cast<u32>(row_src[r]), 0, gate_up, e, n); });
        check_rows(l, h, "h", 1, [&](u32 r, u32, u32 n) {
            const double g = z.get(0, r, n), u = z.get(0, r, l.intermediate + n);
            return g * sigmoid(g) * u;
        });
        check_rows(l, y, "y", 1, [&](u32 r, u32 e, u32 n) {
            return l.score[r] * dot(h, r, 0, down, e, n);
        });
    }
};

}  // namespace layer
