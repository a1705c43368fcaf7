// SPDX-License-Identifier: Apache-2.0
// The grouped GEMMs as they ship, on the simulated machine: every value of every output against
// plain loops, whatever the order in which warps run and copies arrive.
#include <algorithm>

#include "layer.hpp"
#include "moe/down.cuh"
#include "moe/gate_up.cuh"
#include "moe/gate_up_grad.cuh"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;

namespace {

sim::Machine machine(7);

struct Case {
    u32 hidden, intermediate, grid;
    std::vector<i32> counts;
};

// Odd tiles, ragged columns, tails of all kinds, more stages than the ring has, idle CTAs.
const Case kCases[] = {
    {64, 64, 2, {1}},           {320, 192, 4, {0, 130, 64, 0, 65}},
    {128, 448, 4, {257, 1, 0}}, {576, 64, 2, {129, 127}},
    {64, 128, 4, {0, 0, 0}},
};

template <class Kernel>
void run(const Case& c, const moe::GroupedArgs& args) {
    sim::run_kernel<Kernel>(machine, c.grid, args);
    CHECK(
        args.fault->code == 0, "role %u waited too long for %u", args.fault->role,
        args.fault->wait);
}

// Rows that a launch copies from token order to the pool while it multiplies.
struct Pull {
    Matrix tokens;
    std::vector<i32> row_src;
    std::vector<u32> arrivals;

    Pull(const Layer& l) : tokens(1, 37, l.hidden), arrivals(l.pool() / 64, 0) {
        tokens.fill(machine.random, 1.0f);
        for (u32 r = 0; r < l.pool(); ++r) {
            const i32 token = static_cast<i32>(machine.random.below(tokens.rows));
            row_src.push_back(l.expert_of(r) < l.experts() ? token : -1);
        }
    }

    // `waits`: the launch itself reads the rows, and so has to wait for them.
    void ask(moe::GroupedArgs& args, Matrix& pool, bool waits) {
        args.pull_src = reinterpret_cast<u8*>(tokens.bits.data());
        args.pull_dst = reinterpret_cast<u8*>(pool.bits.data());
        args.pull_bytes = tokens.columns * 2;
        args.row_src = row_src.data();
        args.arrivals = waits ? arrivals.data() : nullptr;
    }

    void check(const Layer& l, const Matrix& pool) const {
        layer::check_rows(l, pool, "pulled", 0, [&](u32 r, u32, u32 n) {
            return tokens.get(0, static_cast<u32>(row_src[r]), n);
        });
    }
};

template <bool kScored>
void run_down(const Case& c) {
    const Layer l(c.hidden, c.intermediate, c.counts, machine.random);
    Matrix h = l.rows(l.intermediate, 1.0f, machine.random);
    Matrix w(l.experts(), l.hidden, l.intermediate);
    w.fill(machine.random, 0.25f);
    Matrix y(1, l.pool(), l.hidden);
    FaultRecord fault{};
    const sim::Tensor a = layer::rows_of(h), b = layer::k_major(w, 0, l.hidden);
    const sim::Tensor out = layer::rows_of(y);
    moe::GroupedArgs args = layer::grouped_args(l, fault);
    args.a = sim::map_of(a);
    args.b0 = args.b1 = sim::map_of(b);
    args.out0 = sim::map_of(out);
    args.k_steps = args.split = l.intermediate / 64;
    args.columns = l.hidden;
    args.n_tiles = ceil_div(l.hidden, 256u);
    run<moe::Down<kScored>>(c, args);
    layer::check_rows(l, y, "y", 0, [&](u32 r, u32 e, u32 n) {
        return layer::dot(h, r, 0, w, e, n) * (kScored ? l.score[r] : 1.0f);
    });
}

void run_gate_up_grad(const Case& c) {
    const Layer l(c.hidden, c.intermediate, c.counts, machine.random);
    const u32 half = l.intermediate;
    Matrix dz = l.rows(2 * half, 1.0f, machine.random);
    Matrix w(l.experts(), 2 * half, l.hidden);
    w.fill(machine.random, 0.25f);
    Matrix dx(1, l.pool(), l.hidden);
    FaultRecord fault{};
    const sim::Tensor a = layer::rows_of(dz), out = layer::rows_of(dx);
    const sim::Tensor gate = layer::mn_major(w, 0, half), up = layer::mn_major(w, half, half);
    moe::GroupedArgs args = layer::grouped_args(l, fault);
    args.a = sim::map_of(a);
    args.b0 = sim::map_of(gate);
    args.b1 = sim::map_of(up);
    args.out0 = sim::map_of(out);
    args.k_steps = 2 * half / 64;
    args.split = half / 64;
    args.columns = l.hidden;
    args.n_tiles = ceil_div(l.hidden, 256u);
    Pull pull(l);
    Matrix pulled(1, l.pool(), l.hidden);
    pull.ask(args, pulled, false);
    run<moe::GateUpGrad>(c, args);
    pull.check(l, pulled);
    layer::check_rows(l, dx, "dx", 0, [&](u32 r, u32 e, u32 n) {
        return layer::dot_t(dz, r, 0, w, e, n, 0, 2 * half);
    });
}

template <bool kPlain>
void run_gate_up(const Case& c, bool keep_z, bool pulls = false) {
    const Layer l(c.hidden, c.intermediate, c.counts, machine.random);
    const u32 half = l.intermediate;
    Matrix x = l.rows(l.hidden, 1.0f, machine.random);
    Matrix w(l.experts(), 2 * half, l.hidden);
    w.fill(machine.random, 0.0625f);
    Matrix z(1, l.pool(), 2 * half), h(1, l.pool(), half);
    FaultRecord fault{};
    const sim::Tensor a = layer::rows_of(x), out = layer::rows_of(h), kept = layer::halves_of(z);
    const sim::Tensor gate = layer::k_major(w, 0, half), up = layer::k_major(w, half, half);
    moe::GroupedArgs args = layer::grouped_args(l, fault);
    args.a = sim::map_of(a);
    args.b0 = sim::map_of(gate);
    args.b1 = sim::map_of(up);
    args.out0 = sim::map_of(out);
    args.out1 = sim::map_of(kept);
    args.k_steps = args.split = l.hidden / 64;
    args.columns = half;
    args.n_tiles = ceil_div(half, 128u);
    args.keep_z = keep_z;
    const double limit = kPlain ? INFINITY : 0.75, alpha = kPlain ? 1.0 : 1.75, offset = !kPlain;
    args.clamp = static_cast<float>(limit);
    args.alpha = static_cast<float>(alpha);
    args.up_offset = static_cast<float>(offset);
    Pull pull(l);
    if (pulls) {
        std::fill(x.bits.begin(), x.bits.end(), 0xFFFF);  // the padding too
        pull.ask(args, x, true);
    }
    run<moe::GateUp<kPlain>>(c, args);
    if (pulls) pull.check(l, x);
    const auto value = [&](u32 r, u32 e, u32 n) {
        return layer::to_float(layer::to_bf16(layer::dot(x, r, 0, w, e, n)));
    };
    if (keep_z)
        layer::check_rows(l, z, "z", 0, value);
    else
        for (const u16 bits : z.bits)
            CHECK(bits == 0xFFFF, "z was written");
    layer::check_rows(l, h, "h", 1, [&](u32 r, u32 e, u32 n) {
        const double g = std::fmin(value(r, e, n), limit);
        const double u = std::fmin(std::fmax(value(r, e, half + n), -limit), limit);
        return g * layer::sigmoid(alpha * g) * (u + offset);
    });
}

}  // namespace

CASE(down_multiplies_rows_with_their_experts_weights_and_their_scores) {
    for (const Case& c : kCases)
        run_down<true>(c);
}

CASE(down_without_scores_leaves_products_as_they_are) {
    for (const Case& c : kCases)
        run_down<false>(c);
}

CASE(the_gate_up_gradient_adds_both_halves_and_pulls_rows_for_others) {
    for (const Case& c : kCases)
        run_gate_up_grad(c);
}

CASE(gate_up_keeps_z_and_activates_what_it_kept) {
    for (const Case& c : kCases)
        run_gate_up<true>(c, true);
}

CASE(gate_up_multiplies_rows_that_it_pulls_meanwhile) {
    for (u32 i = 0; i < 3; ++i)
        for (const Case& c : kCases)
            run_gate_up<true>(c, true, true);
}

CASE(gate_up_clamps_scales_and_offsets_and_can_leave_z_alone) {
    for (const Case& c : kCases)
        run_gate_up<false>(c, false);
}
