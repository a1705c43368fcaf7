// SPDX-License-Identifier: Apache-2.0
// moe/forward.cuh on the simulated machine: rows are pulled, both GEMMs chained, and whatever the
// order in which warps run and copies arrive, every value is right and nobody waits for ever.
#include "forward_launch.hpp"
#include "sim/grid.hpp"

#include <algorithm>
#include <initializer_list>

using namespace prime;
using Case = layer::ForwardCase;
using Launch = layer::ForwardLaunch;

namespace {

sim::Machine machine(11);

const Case kCases[] = {
    {64, 64, 2, 0, {1}},           {320, 192, 4, 2, {0, 130, 64, 0, 65}},
    {128, 448, 8, 0, {257, 1, 0}}, {576, 64, 2, 5, {129, 127}},
    {64, 128, 4, 1, {0, 0, 0}},    {128, 320, 6, 3, {70, 0, 3, 300, 64, 128, 1}},
};

void run(const Case& c) {
    Launch launch(c, machine.random);
    sim::run_kernel<moe::Forward<true>>(machine, c.grid, launch.args);
    CHECK(launch.fault.code == 0, "role %u waited too long", launch.fault.role);
    launch.check_outputs();
}

}  // namespace

CASE(every_value_is_right_whatever_runs_first) {
    for (u32 i = 0; i < 2; ++i)
        for (const Case& c : kCases)
            run(c);
}

CASE(the_same_inputs_give_the_same_bits_in_any_order) {
    const Case& c = kCases[1];
    Launch first(c, machine.random);
    sim::run_kernel<moe::Forward<true>>(machine, 2, first.args);
    for (u32 grid = 2; grid <= 8; grid += 2) {
        layer::Matrix before = first.y;
        std::fill(first.y.bits.begin(), first.y.bits.end(), 0xFFFF);
        std::fill(first.h_done.begin(), first.h_done.end(), 0);
        first.args.lag = machine.random.below(6);
        sim::run_kernel<moe::Forward<true>>(machine, grid, first.args);
        for (u32 i = 0; i < before.bits.size(); ++i)
            CHECK(
                before.bits[i] == first.y.bits[i], "grid %u lag %u row %u column %u: %04x, %04x",
                grid, first.args.lag, i / c.hidden, i % c.hidden, before.bits[i], first.y.bits[i]);
    }
}

// A wait that can never end, at every kind of place: the launch has to come back all the same.
CASE(a_copy_that_never_arrives_ends_in_a_fault_and_not_in_a_hang) {
    machine.stalls_allowed = true;
    for (const long long lost : {0, 1, 7, 20}) {
        Launch launch(kCases[3], machine.random);
        sim::loads_until_loss = lost;
        sim::run_kernel<moe::Forward<true>>(machine, 2, launch.args);
        CHECK(sim::loads_until_loss < 0, "only %lld loads", lost - sim::loads_until_loss);
        CHECK(launch.fault.code == 1, "load %lld is lost and nobody says so", lost);
        CHECK(launch.fault.wait != 0 && launch.fault.cta < 2, "wait %u", launch.fault.wait);
    }
    machine.stalls_allowed = false;
}

CASE(rows_that_never_come_end_in_a_fault_of_the_loader) {
    machine.stalls_allowed = true;
    Launch launch(kCases[3], machine.random);
    launch.h_done[1] = 1;  // a counter that passes its target without ever being equal to it
    sim::run_kernel<moe::Forward<true>>(machine, 2, launch.args);
    CHECK(launch.fault.code == 1, "nobody waits for the rows");
    CHECK(launch.fault.wait <= static_cast<u32>(Wait::kInput), "wait %u", launch.fault.wait);
    machine.stalls_allowed = false;
}
