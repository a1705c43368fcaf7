// SPDX-License-Identifier: Apache-2.0
// moe/plan_peers.cuh among ranks that begin when they like and run as fast as they like.
#include "moe/plan_peers.cuh"

#include "peers.hpp"
#include "sim/grid.hpp"

using namespace prime;
using peers::Arenas;
using peers::Call;
using peers::Size;

namespace {

sim::Machine machine(23);

// Plans `calls` calls in a row on the same arenas, each with tokens of its own.
void run(const Size& size, const std::vector<std::vector<u32>>& tokens) {
    Arenas arenas(size);
    std::vector<std::unique_ptr<Call>> calls;
    std::vector<sim::Stream> streams(size.ranks);
    for (const std::vector<u32>& t : tokens) {
        calls.push_back(std::make_unique<Call>(size, t, arenas, machine.random));
        for (u32 r = 0; r < size.ranks; ++r)
            streams[r].push_back(
                sim::kernel_work<moe::PlanPeers>(
                    machine.random.below(2) ? 24 : 8, calls.back()->plans[r]->args));
    }
    sim::run_kernels(machine, streams);
    for (u32 r = 0; r < size.ranks; ++r) {
        for (const auto& call : calls) {
            call->plans[r]->check(*call->wanted, r);
            for (const u32 counter : call->plans[r]->counters)
                CHECK(counter == 0, "a counter is %u", counter);
        }
        CHECK(arenas.epoch(r) == tokens.size(), "epoch %llu", arenas.epoch(r));
        const layer::Matrix& x = calls.back()->plans[r]->x;
        const bool staged =
            std::memcmp(arenas.at(r, arenas.of(r).tokens), x.bits.data(), x.bits.size() * 2) == 0;
        CHECK(staged, "rank %u: its tokens are not in its arena", r);
    }
}

}  // namespace

CASE(one_rank_plans_for_itself) {
    run({1, 7, 3, 64}, {{100}});
    run({1, 40, 1, 64}, {{0}, {1}, {300}});
}

CASE(ranks_write_one_anothers_lists_in_the_order_of_owners) {
    run({2, 8, 2, 64}, {{90, 200}});
    run({3, 9, 4, 128}, {{0, 64, 129}});
    run({4, 8, 8, 64}, {{30, 0, 300, 1}});
}

CASE(any_number_of_experts_for_a_token_and_on_a_rank) {
    for (u32 topk = 1; topk <= 9; topk += 1 + machine.random.below(2))
        run({2, 2 * (1 + machine.random.below(50)), topk, 64}, {{70, machine.random.below(90)}});
}

CASE(calls_follow_one_another_on_the_same_arenas) {
    for (u32 round = 0; round < 2; ++round)
        run({3, 12, 3, 64}, {{50, 0, 40}, {0, 90, 31}, {33, 32, 64}});
}

CASE(many_slots_give_every_warp_several_groups) {
    run({2, 6, 9, 64, 2500}, {{2500, 700}});
}

CASE(more_experts_than_a_table_for_every_warp_has_room_for) {
    run({2, 1300, 2, 64}, {{300, 111}});
}
