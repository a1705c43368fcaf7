// SPDX-License-Identifier: Apache-2.0
// Whole forward calls among peers against plain loops, also back to back on the same arenas.
#include <algorithm>

#include "peers_call.hpp"
#include "sim/grid.hpp"

using namespace prime;
using layer::Matrix;
using peers::Call;
using peers::Model;
using peers::Run;
using peers::Size;
using peers::Weights;

namespace {

sim::Machine machine(29);

template <bool kPlain>
void run(const Size& size, const Model& model, const std::vector<std::vector<u32>>& tokens) {
    const Weights weights(size, model);
    Run all(size);
    for (const std::vector<u32>& t : tokens)
        all.add<kPlain>(
            model, weights, std::make_unique<Call>(size, t, all.arenas, machine.random));
    sim::run_kernels(machine, all.streams);
    all.check();
}

// Both forms of the forward: its GEMMs in launches of their own, and chained in one.
template <bool kPlain>
void run_both(const Size& size, Model model, const std::vector<std::vector<u32>>& tokens) {
    run<kPlain>(size, model, tokens);
    model.apart = true;
    run<kPlain>(size, model, tokens);
}

// y of all tokens, the ranks' one after the other, when `ranks` ranks share out `tokens`.
std::vector<u16> y_of(
    Size size, const Model& model, const Weights& weights, const peers::Routing& routing,
    const Matrix& x, const std::vector<u32>& tokens) {
    size.ranks = static_cast<u32>(tokens.size());
    Run all(size);
    std::vector<peers::Routing> parts;
    u32 first = 0;
    for (const u32 t : tokens) {
        parts.push_back(routing.part(size, first, t));
        first += t;
    }
    auto call = std::make_unique<Call>(size, parts, all.arenas, machine.random);
    auto from = x.bits.begin();
    for (const auto& plan : call->plans) {
        std::copy(from, from + plan->x.bits.size(), plan->x.bits.begin());
        from += plan->x.bits.size();
    }
    all.add<true>(model, weights, std::move(call));
    sim::run_kernels(machine, all.streams);
    all.check();
    std::vector<u16> y;
    for (const auto& f : all.forwards[0])
        y.insert(y.end(), f->y.bits.begin(), f->y.bits.end());
    return y;
}

}  // namespace

CASE(one_rank_is_its_own_peer) {
    run_both<true>({1, 3, 2, 64}, {64, 1}, {{70}});
    run_both<true>({1, 4, 3, 320}, {192, 2}, {{50}, {0}, {33}});
}

CASE(two_ranks_send_one_another_tokens_and_results) {
    run_both<true>({2, 6, 2, 128}, {192, 1}, {{90, 61}});
    run_both<true>({2, 4, 3, 64}, {320, 3, false}, {{1, 130}});
}

CASE(ranks_without_tokens_still_multiply_for_the_others) {
    run_both<true>({3, 6, 2, 64}, {64, 2}, {{0, 70, 0}, {40, 0, 1}});
}

CASE(four_ranks_and_a_second_gemm_that_stays_behind_all_of_the_first) {
    run_both<true>({4, 8, 4, 64}, {128, 9}, {{20, 30, 0, 41}});
}

CASE(calls_back_to_back_reuse_arenas) {
    for (u32 round = 0; round < 2; ++round)
        run_both<true>({2, 2, 2, 64}, {64, 1}, {{20, 30}, {30, 10}, {9, 30}, {31, 0}});
    run_both<true>({2, 4, 2, 64}, {64, 1}, {{40, 50}, {50, 10}, {9, 70}, {64, 0}});
}

CASE(paced_links_change_no_value) {
    run_both<true>({2, 4, 2, 64, 300, 40}, {64, 1}, {{40, 50}, {50, 10}});
}

CASE(clamped_activations_among_peers) {
    run_both<false>({2, 4, 2, 64}, {128, 1, true, 0.75, 1.75, 1}, {{40, 50}});
}

CASE(any_number_of_ranks_computes_the_same_bits) {
    const Size size{1, 12, 3, 128};
    Model model{64, 2};
    const Weights weights(size, model);
    const peers::Routing routing(size, 90, machine.random);
    Matrix x(1, 90, size.hidden);
    x.fill(machine.random, 1.0f);
    const std::vector<u16> alone = y_of(size, model, weights, routing, x, {90});
    for (const auto& tokens : {std::vector<u32>{20, 70}, {0, 89, 1}, {30, 7, 0, 53}})
        CHECK(
            y_of(size, model, weights, routing, x, tokens) == alone, "%zu ranks: other bits",
            tokens.size());
    model.apart = true;
    CHECK(y_of(size, model, weights, routing, x, {20, 70}) == alone, "apart: other bits");
}

CASE(transport_alone_brings_every_token_and_sends_what_the_pool_holds) {
    const Size size{2, 4, 2, 64};
    const Model model{128, 1, true, INFINITY, 1, 0, true};
    const Weights weights(size, model);
    Run all(size);
    for (u32 i = 0; i < 2; ++i)
        all.add<true>(
            model, weights,
            std::make_unique<Call>(size, std::vector<u32>{70, 33}, all.arenas, machine.random));
    for (const auto& forwards : all.forwards)
        for (const auto& f : forwards)
            std::fill(f->y_rows.bits.begin(), f->y_rows.bits.end(), u16{0});
    sim::run_kernels(machine, all.streams);
    for (const auto& forwards : all.forwards)
        for (const auto& f : forwards)
            for (const u16 bits : f->y.bits)
                CHECK((bits & 0x7FFF) == 0, "y has %04x", bits);
}
