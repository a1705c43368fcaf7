// SPDX-License-Identifier: Apache-2.0
// The row GEMMs as the module with DeepGEMM's names launches them: one weight, groups in any order
// with gaps between them, operands that end inside a block.
#include "layer.hpp"
#include "moe/down.cuh"
#include "moe/gate_up_grad.cuh"
#include "sim/grid.hpp"

using namespace prime;
using layer::Matrix;

namespace {

sim::Machine machine(11);

struct Case {
    u32 n, k, grid, rows;
    std::vector<i32> counts, starts;

    // Group whose product a row gets: its own, or that of the group it follows within 64 rows.
    i32 owner(u32 row) const {
        for (u32 g = 0; g < counts.size(); ++g) {
            const u32 first = static_cast<u32>(starts[g]);
            const u32 reach = static_cast<u32>(counts[g] + 63) / 64 * 64;
            if (row >= first && row < first + reach) return static_cast<i32>(g);
        }
        return -1;
    }
};

const Case kCases[] = {
    {192, 128, 4, 600, {64, 0, 128, 192}, {256, 0, 320, 0}},
    {320, 64, 2, 164, {64, 36}, {0, 128}},
    {64, 448, 4, 777, {1, 257, 65}, {704, 128, 0}},
    {576, 64, 6, 64, {0, 0}, {0, 0}},
};

template <class Kernel, bool kTransposed>
void run(const Case& c) {
    const u32 groups = static_cast<u32>(c.counts.size());
    Matrix a(1, c.rows, c.k), d(1, c.rows, c.n);
    Matrix w(groups, kTransposed ? c.n : c.k, kTransposed ? c.k : c.n);
    a.fill(machine.random, 1.0f);
    w.fill(machine.random, 0.25f);
    const sim::Tensor rows = layer::rows_of(a), out = layer::rows_of(d);
    const sim::Tensor weights =
        kTransposed ? layer::k_major(w, 0, c.n) : layer::mn_major(w, 0, c.k);
    FaultRecord fault{};
    moe::GroupedArgs args{};
    // Maps that these kernels do not read repeat one that they do.
    args.a = args.out1 = args.in1 = sim::map_of(rows);
    args.b0 = args.b1 = sim::map_of(weights);
    args.out0 = sim::map_of(out);
    std::vector<i32> starts = c.starts;
    starts.push_back(static_cast<i32>(c.rows));
    args.counts = c.counts.data();
    args.starts = starts.data();
    args.fault = &fault;
    args.num_experts = groups;
    args.k_steps = args.split = c.k / 64;
    args.columns = c.n;
    args.n_tiles = ceil_div(c.n, 256u);
    sim::run_kernel<Kernel>(machine, c.grid, args);
    CHECK(fault.code == 0, "role %u waited too long for %u", fault.role, fault.wait);
    for (u32 r = 0; r < c.rows; ++r)
        for (u32 n = 0; n < c.n; ++n) {
            const float value = d.get(0, r, n);
            const i32 g = c.owner(r);
            if (g < 0) {
                CHECK(std::isnan(value), "row %u of nobody column %u: %g", r, n, value);
                continue;
            }
            const float right = kTransposed
                                    ? layer::dot(a, r, 0, w, static_cast<u32>(g), n)
                                    : layer::dot_t(a, r, 0, w, static_cast<u32>(g), n, 0, c.k);
            CHECK(layer::close(value, right, 0), "row %u column %u: %g", r, n, value);
        }
}

}  // namespace

CASE(rows_meet_their_groups_weights_wherever_the_groups_stand) {
    for (const Case& c : kCases)
        run<moe::Down<false>, true>(c);
}

CASE(and_weights_that_are_not_transposed) {
    for (const Case& c : kCases)
        run<moe::GateUpGrad, false>(c);
}
