// SPDX-License-Identifier: Apache-2.0
// moe/down_grad.cuh and moe/wgrad.cuh on the simulated machine, every value against plain loops.
#include "gradients.hpp"
#include "moe/down_grad.cuh"
#include "moe/wgrad.cuh"
#include "sim/grid.hpp"

using namespace prime;
using layer::Activation;
using layer::Gradient;
using layer::Layer;
using layer::Matrix;
using layer::Right;

namespace {

sim::Machine machine(13);

struct Case {
    u32 hidden, intermediate, grid;
    std::vector<i32> counts;
};

const Case kCases[] = {
    {64, 64, 2, {1}},           {320, 192, 4, {0, 130, 64, 0, 65}},
    {128, 448, 4, {257, 1, 0}}, {448, 64, 2, {129, 127}},
    {64, 128, 4, {0, 0, 0}},    {64, 320, 2, {700, 3}},
};

struct DownGradRun {
    Layer l;
    Matrix dy, w, z, dz, scaled;
    u32 parts;
    std::vector<float> score_parts;
    FaultRecord fault{};

    explicit DownGradRun(const Case& c)
        : l(c.hidden, c.intermediate, c.counts, machine.random),
          dy(l.rows(l.hidden, 1.0f, machine.random)),
          w(l.experts(), l.hidden, l.intermediate),
          z(l.rows(2 * l.intermediate, 0.5f, machine.random)),
          dz(1, l.pool(), 2 * l.intermediate),
          scaled(1, l.pool(), l.intermediate),
          parts(ceil_div(l.intermediate, 256u)),
          score_parts(l.pool() * parts, NAN) {
        w.fill(machine.random, 0.0625f);
    }

    template <bool kPlain>
    void run(u32 grid, const Activation& activation) {
        const sim::Tensor a = layer::rows_of(dy), b = layer::mn_major(w, 0, l.hidden);
        const sim::Tensor in = layer::halves_of(z), out = layer::halves_of(dz);
        const sim::Tensor h = layer::rows_of(scaled);
        moe::GroupedArgs args = layer::grouped_args(l, fault);
        args.a = sim::map_of(a);
        args.b0 = args.b1 = sim::map_of(b);
        args.out0 = sim::map_of(h);
        args.out1 = sim::map_of(out);
        args.in1 = sim::map_of(in);
        args.score_parts = score_parts.data();
        args.k_steps = args.split = l.hidden / 64;
        args.columns = l.intermediate;
        args.n_tiles = parts;
        args.alpha = static_cast<float>(activation.alpha);
        args.clamp = static_cast<float>(activation.limit);
        args.up_offset = static_cast<float>(activation.offset);
        sim::run_kernel<moe::DownGrad<kPlain>>(machine, grid, args);
        CHECK(fault.code == 0, "role %u waited too long", fault.role);
        check(activation);
    }

    void check(const Activation& activation) const {
        const u32 half = l.intermediate;
        const auto right = [&](u32 r, u32 e, u32 n) {
            return activation(
                z.get(0, r, n), z.get(0, r, half + n), layer::dot_t(dy, r, 0, w, e, n, 0, l.hidden),
                l.score[r]);
        };
        layer::check_rows(l, dz, "dz", 1, [&](u32 r, u32 e, u32 n) {
            const Right v = right(r, e, n % half);
            return n < half ? v.dg : v.du;
        });
        layer::check_rows(
            l, scaled, "score h", 1, [&](u32 r, u32 e, u32 n) { return right(r, e, n).scaled_h; });
        for (u32 r = 0; r < l.used(); ++r) {
            const u32 e = l.expert_of(r);
            double sum = 0, size = 1e-6, got = 0;
            for (u32 n = 0; e < l.experts() && n < half; ++n) {
                const double product = right(r, e, n).product;
                sum += product;
                size += std::fabs(product);
            }
            for (u32 p = 0; p < parts; ++p)
                got += score_parts[r * parts + p];
            if (e == l.experts()) continue;
            // h may round to the other neighbour: one part in 256 of each product.
            CHECK(std::fabs(got - sum) <= size / 256, "row %u: d score %g, not %g", r, got, sum);
        }
    }
};

template <bool kFp32, bool kAdd>
void run_wgrad(const Case& c, bool do_gate_up, bool do_down) {
    const Layer l(c.hidden, c.intermediate, c.counts, machine.random);
    const u32 half = l.intermediate, element = kFp32 ? 4 : 2;
    Matrix dz = l.rows(2 * half, 1.0f, machine.random), x = l.rows(l.hidden, 1.0f, machine.random);
    Matrix dy = l.rows(l.hidden, 1.0f, machine.random), h = l.rows(half, 1.0f, machine.random);
    Gradient gate_up(l.experts(), 2 * half, l.hidden, element, kAdd);
    Gradient down(l.experts(), l.hidden, half, element, kAdd);
    FaultRecord fault{};
    const sim::Tensor maps[] = {
        layer::mn_major(dz, 0, l.pool()),
        layer::mn_major(x, 0, l.pool()),
        layer::mn_major(dy, 0, l.pool()),
        layer::mn_major(h, 0, l.pool()),
        gate_up.map(0, half),
        gate_up.map(half, half),
        down.map(0, l.hidden)};
    const moe::WgradArgs args{
        .a0 = sim::map_of(maps[0]),
        .b0 = sim::map_of(maps[1]),
        .a1 = sim::map_of(maps[2]),
        .b1 = sim::map_of(maps[3]),
        .gate = sim::map_of(maps[4]),
        .up = sim::map_of(maps[5]),
        .down = sim::map_of(maps[6]),
        .counts = l.counts.data(),
        .starts = l.starts.data(),
        .fault = &fault,
        .gate_sum = gate_up.bytes.data(),
        .up_sum = gate_up.bytes.data() + u64{half} * l.hidden * element,
        .down_sum = down.bytes.data(),
        .gate_up_matrix = u64{2 * half} * l.hidden * element,
        .down_matrix = u64{half} * l.hidden * element,
        .gate_up_pitch = l.hidden * element,
        .down_pitch = half * element,
        .num_experts = l.experts(),
        .hidden = l.hidden,
        .intermediate = half,
        .do_gate_up = do_gate_up,
        .do_down = do_down,
        .reserved = 0};
    sim::run_kernel<moe::Wgrad<kFp32, kAdd>>(machine, c.grid, args);
    CHECK(fault.code == 0, "role %u waited too long", fault.role);
    gate_up.check(l, dz, x, kAdd, do_gate_up || kAdd);
    down.check(l, dy, h, kAdd, do_down || kAdd);
}

}  // namespace

CASE(the_down_gradient_turns_dh_and_z_into_dz_and_scores) {
    for (const Case& c : kCases)
        DownGradRun(c).run<true>(c.grid, {INFINITY, 1, 0});
}

CASE(the_down_gradient_of_a_clamped_activation_is_zero_past_the_clamp) {
    for (const Case& c : kCases)
        DownGradRun(c).run<false>(c.grid, {0.75, 1.75, 1});
}

CASE(weight_gradients_are_exact_sums_and_empty_experts_get_zeros) {
    for (const Case& c : kCases)
        run_wgrad<false, false>(c, true, true);
}

CASE(fp32_weight_gradients_are_exact_sums) {
    for (const Case& c : kCases)
        run_wgrad<true, false>(c, true, true);
}

CASE(adding_weight_gradients_keeps_what_was_there) {
    for (const Case& c : kCases)
        run_wgrad<true, true>(c, true, true);
}

CASE(a_weight_gradient_that_nobody_wants_is_not_touched) {
    run_wgrad<false, false>(kCases[1], true, false);
    run_wgrad<false, false>(kCases[1], false, true);
    run_wgrad<true, false>(kCases[1], false, false);
}
