// SPDX-License-Identifier: Apache-2.0
// Launches in which one wait can never end: they have to come back all the same and say so.
#include <initializer_list>

#include "layer.hpp"
#include "moe/down_grad.cuh"
#include "moe/gate_up.cuh"
#include "peers_call.hpp"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;
using peers::expect;

namespace {

constexpr u32 kGrid = 2;
constexpr u32 kAstray = 0xABABABAB;  // a token of a rank that is none
constexpr u64 kSecond = 1000ull * 1000 * 1000;

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

// Runs calls of ranks of which some do only the first launches of theirs, none or a few.
struct Broken {
    peers::Size size;
    peers::Model model{64, 2};
    peers::Weights weights{size, model};
    peers::Run all{size};

    Broken(const peers::Size& s, const std::vector<u32>& tokens) : size(s) {
        all.add<true>(
            model, weights,
            std::make_unique<peers::Call>(size, tokens, all.arenas, machine.random));
        machine.stalls_allowed = true;
    }

    // What nobody has written leads astray.
    void spoil_lists() {
        const comm::RowEntry nobody{kAstray, kAstray, -1, 1.0f};
        for (const auto& plan : all.calls[0]->plans)
            plan->unlist(nobody);
        for (u32 r = 0; r < size.ranks; ++r)
            for (u32 row = 0; row < size.most_rows(); ++row)
                std::memcpy(
                    all.arenas.at(r, all.arenas.of(r).rows + row * sizeof(nobody)), &nobody,
                    sizeof(nobody));
    }

    void run() { sim::run_kernels(machine, all.streams); }

    const FaultRecord& plan(u32 rank) const { return all.calls[0]->plans[rank]->fault; }
    const FaultRecord& forward(u32 rank) const { return all.forwards[0][rank]->fault; }
};

}  // namespace

CASE(a_rank_that_never_comes_is_named_by_the_plan_and_at_the_end) {
    for (u32 absent = 0; absent < 3; ++absent) {
        Broken b({3, 6, 2, 64}, {20, 30, 10});
        b.all.streams[absent].clear();
        b.spoil_lists();
        b.run();
        for (u32 r = 0; r < 3; ++r) {
            if (r == absent) continue;
            expect(b.plan(r), Role::kPlan, Wait::kPeerCounts, absent);
            expect(b.forward(r), Role::kEnd, Wait::kPeerDone, absent);
            for (u32 e = 0; e <= b.size.local(); ++e)
                CHECK(b.all.calls[0]->plans[r]->starts[e] == 0, "rank %u has rows to multiply", r);
        }
    }
}

CASE(a_rank_that_leaves_after_its_plan_is_named_by_those_who_pull_from_it) {
    // Also when a peer may take longer than anything on one GPU does.
    for (const u64 seconds : {1, 30}) {
        Broken b({2, 4, 2, 64, 300, 0, seconds * kSecond}, {90, 100});
        b.all.streams[1].resize(1);
        b.run();
        b.all.calls[0]->plans[0]->check(*b.all.calls[0]->wanted, 0);
        peers::expect_not_ready(b.forward(0), *b.all.calls[0]->wanted, 0, 1);
    }
}

CASE(a_rank_that_nothing_is_pulled_from_is_missed_at_the_end) {
    Broken b({2, 4, 2, 64}, {50, 0});
    b.all.streams[1].resize(1);
    b.run();
    b.all.calls[0]->plans[0]->check(*b.all.calls[0]->wanted, 0);
    expect(b.forward(0), Role::kEnd, Wait::kPeerDone, 1);
    b.all.forwards[0][0]->fault = {};
    b.all.forwards[0][0]->check_pool(*b.all.calls[0], 0);
}

CASE(a_rank_that_sends_counts_but_no_rows_is_named_by_the_plan) {
    Broken b({2, 4, 2, 64}, {60, 0});
    b.all.streams[1].clear();
    const comm::Peers& p = b.all.arenas.of(0);
    std::memset(b.all.arenas.at(0, p.counts), 0, 2 * b.size.experts * 4);
    *comm::flag_at(p, 0, comm::Flag::kCounts, 1) = 1;
    b.run();
    expect(b.plan(0), Role::kPlan, Wait::kPeerRows, 1);
    expect(b.forward(0), Role::kEnd, Wait::kPeerDone, 1);
}

// Of the CTAs that wait for the same rank some give up, and then it comes.
CASE(a_rank_that_comes_when_some_have_given_up_leads_nobody_astray) {
    for (u32 round = 0; round < 6; ++round) {
        Broken b({2, 4, 2, 64}, {40, 0});
        b.spoil_lists();
        const peers::RankPlan& plan = *b.all.calls[0]->plans[0];
        const comm::Peers& p = b.all.arenas.of(0);
        const sim::Work late = sim::work_of({1, 32, 1, 0}, [&] {
            while (plan.fault.code == 0)
                sim::machine->poll("late");
            std::memset(b.all.arenas.at(0, p.counts + b.size.experts * 4), 0, b.size.experts * 4);
            *comm::flag_at(p, 0, comm::Flag::kCounts, 1) = 1;
            *comm::flag_at(p, 0, comm::Flag::kPlaced, 1) = 1;
        });
        b.all.streams = {{b.all.streams[0][0]}, {late}};
        b.run();
        expect(plan.fault, Role::kPlan, Wait::kPeerCounts, 1);
        for (i32 row = 0; row < plan.starts[b.size.local()]; ++row)
            CHECK(plan.list[row].source != kAstray, "row %d is multiplied, not listed", row);
        const bool placed = *comm::flag_at(b.all.arenas.of(1), 1, comm::Flag::kPlaced, 0) != 0;
        const auto* sent = reinterpret_cast<const comm::RowEntry*>(b.all.arenas.at(1, p.rows));
        for (u32 row = 0; placed && row < b.all.calls[0]->wanted->list[1].size(); ++row)
            CHECK(
                sent[row].source != kAstray ||
                    b.all.calls[0]->wanted->list[1][row].source == comm::kNoRow,
                "row %u is announced to its rank, not sent", row);
    }
}

CASE(a_lost_load_of_an_operand_ends_the_launch_with_a_fault) {
    lose_some<moe::GateUp<true>>(false);
}

CASE(a_lost_load_of_an_epilogue_ends_the_launch_with_a_fault) {
    lose_some<moe::DownGrad<true>>(true);
}
