// SPDX-License-Identifier: Apache-2.0
// Launches in which one wait can never end: they have to come back all the same and say so.
#include <initializer_list>

#include "layer.hpp"
#include "moe/down_grad.cuh"
#include "moe/gate_up.cuh"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;

namespace {

constexpr u32 kGrid = 2;

sim::Machine machine(17);

// Runs a GEMM of 256 rows, hidden 448 and intermediate 64 in which one load is lost.
template <class Kernel>
FaultRecord lose(long long load, bool mn_major) {
    const Layer l(448, 64, {129, 127}, machine.random);
    const u32 half = l.intermediate;
    Matrix a = l.rows(l.hidden, 1.0f, machine.random);
    Matrix gate_up(l.experts(), 2 * half, l.hidden), down(l.experts(), l.hidden, half);
    Matrix z = l.rows(2 * half, 0.5f, machine.random), out(1, l.pool(), 2 * half);
    Matrix h(1, l.pool(), half);
    gate_up.fill(machine.random, 0.25f);
    down.fill(machine.random, 0.25f);
    std::vector<float> parts(l.pool(), 0.0f);
    const sim::Tensor rows = layer::rows_of(a), written = layer::rows_of(h);
    const sim::Tensor in = layer::halves_of(z), halves = layer::halves_of(out);
    const sim::Tensor first =
        mn_major ? layer::mn_major(down, 0, l.hidden) : layer::k_major(gate_up, 0, half);
    const sim::Tensor second = layer::k_major(gate_up, half, half);
    FaultRecord fault{};
    moe::GroupedArgs args = layer::grouped_args(l, fault);
    args.a = sim::map_of(rows);
    args.b0 = sim::map_of(first);
    args.b1 = mn_major ? args.b0 : sim::map_of(second);
    args.out0 = sim::map_of(written);
    args.out1 = sim::map_of(halves);
    args.in1 = sim::map_of(in);
    args.score_parts = parts.data();
    args.k_steps = args.split = l.hidden / 64;
    args.columns = half;
    args.n_tiles = 1;
    args.keep_z = 1;
    sim::loads_until_loss = load;
    machine.stalls_allowed = true;
    sim::run_kernel<Kernel>(machine, kGrid, args);
    CHECK(sim::loads_until_loss < 0, "the launch has fewer than %lld loads", load);
    return fault;
}

template <class Kernel>
void lose_some(bool mn_major) {
    for (const u32 load : {1u, 13u}) {
        const FaultRecord fault = lose<Kernel>(load, mn_major);
        CHECK(fault.code == 1, "load %u is lost and nobody says so", load);
        CHECK(fault.cta < kGrid, "load %u: CTA %u", load, fault.cta);
        CHECK(fault.role != 0 && fault.wait != 0, "load %u: a fault without a place", load);
    }
}

}  // namespace

CASE(a_lost_load_of_an_operand_ends_the_launch_with_a_fault) {
    lose_some<moe::GateUp<true>>(false);
}

CASE(a_lost_load_of_an_epilogue_ends_the_launch_with_a_fault) {
    lose_some<moe::DownGrad<true>>(true);
}
