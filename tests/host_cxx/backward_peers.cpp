// SPDX-License-Identifier: Apache-2.0
// Whole backward calls among peers against plain loops, behind a plan or between forwards on the
// same arenas.
#include <algorithm>

#include "peers_backward.hpp"
#include "sim/grid.hpp"

using namespace prime;
using layer::Matrix;
using peers::Backwards;
using peers::Call;
using peers::Model;
using peers::Needs;
using peers::Run;
using peers::Save;
using peers::Size;
using peers::Weights;

namespace {

sim::Machine machine(31);

std::unique_ptr<Call> make_call(Run& all, const std::vector<u32>& tokens) {
    return std::make_unique<Call>(all.size, tokens, all.arenas, machine.random);
}

// A plan and a backward.
template <bool kPlain = true>
void run(
    const Size& size, const Model& model, const std::vector<u32>& tokens, Save save,
    const std::vector<Needs>& needs = {}) {
    const Weights weights(size, model);
    Run all(size);
    all.add_plan(make_call(all, tokens));
    Backwards backwards{all, {}};
    backwards.add<kPlain>(model, weights, 0, save, needs);
    sim::run_kernels(machine, all.streams);
    all.check();
    backwards.check();
}

// Whole steps, one after the other on the same arenas, then one more forward.
void train(
    const Size& size, const Model& model, const std::vector<std::vector<u32>>& tokens, Save save) {
    const Weights weights(size, model);
    Run all(size);
    Backwards backwards{all, {}};
    for (u32 i = 0; i < tokens.size(); ++i) {
        all.add<true>(model, weights, make_call(all, tokens[i]));
        if (i + 1 < tokens.size()) backwards.add<true>(model, weights, i, save);
    }
    sim::run_kernels(machine, all.streams);
    all.check();
    backwards.check();
    for (u32 r = 0; r < size.ranks; ++r)
        CHECK(
            all.arenas.epoch(r) == all.calls.size() + backwards.calls.size(), "epoch %llu",
            all.arenas.epoch(r));
}

// Two forwards, whose backwards come in the other order: what the arenas held for the first is gone.
void reverse(
    const Size& size, const Model& model, const std::vector<u32>& first,
    const std::vector<u32>& second, Save save) {
    const Weights weights(size, model);
    Run all(size);
    Backwards backwards{all, {}};
    for (const auto& tokens : {first, second})
        all.add<true>(model, weights, make_call(all, tokens));
    for (const u32 c : {1u, 0u})
        backwards.add<true>(model, weights, c, save);
    sim::run_kernels(machine, all.streams);
    all.check();
    backwards.check();
}

struct Bits {
    std::vector<u16> dx;
    std::vector<float> dscore;
};

// Of all tokens, the ranks' one after the other, when some ranks share out `tokens`.
Bits bits_of(
    Size size, const Model& model, const Weights& weights, const peers::Routing& routing,
    const Matrix& x, const Matrix& dy, const std::vector<u32>& tokens) {
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
    all.add_plan(std::move(call));
    Backwards backwards{all, {}};
    backwards.add<true>(model, weights, 0, Save::kInputs);
    from = dy.bits.begin();
    for (const auto& b : backwards.calls[0].ranks) {
        std::copy(from, from + b->dy.bits.size(), b->dy.bits.begin());
        from += b->dy.bits.size();
    }
    sim::run_kernels(machine, all.streams);
    all.check();
    backwards.check();
    Bits bits;
    for (const auto& b : backwards.calls[0].ranks) {
        bits.dx.insert(bits.dx.end(), b->dx.bits.begin(), b->dx.bits.end());
        bits.dscore.insert(bits.dscore.end(), b->dscore.begin(), b->dscore.end());
    }
    return bits;
}

// Of the streams' launches, in a plan and a backward that keeps z and is asked for all.
enum Launch : u32 { kPlan, kStage, kDownGrad, kGateUpGrad };

// A backward in which rank 1 does not do launch `left` nor any after it.
struct Left {
    Size size{3, 6, 2, 64};
    Model model{64};
    Weights weights{size, model};
    Run all{size};
    Backwards backwards{all, {}};

    Left(const std::vector<u32>& tokens, Save save, u32 left) {
        all.add_plan(make_call(all, tokens));
        backwards.add<true>(model, weights, 0, save);
        all.streams[1].resize(left);
        machine.stalls_allowed = true;
        sim::run_kernels(machine, all.streams);
        all.check();
    }

    const peers::RankBackward& of(u32 rank) const { return *backwards.calls[0].ranks[rank]; }

    // Whose results would be taken for complete.
    void check_silent(u32 rank) const {
        const u32 epoch = static_cast<u32>(all.arenas.epoch(rank));
        for (u32 peer = 0; peer < size.ranks; ++peer) {
            const u32* flag = comm::flag_at(all.arenas.of(peer), peer, comm::Flag::kDone, rank);
            CHECK(*flag != epoch, "rank %u tells rank %u that it is done", rank, peer);
        }
    }
};

}  // namespace

CASE(one_rank_is_its_own_peer_in_the_backward) {
    run({1, 3, 2, 64}, {64}, {70}, Save::kZ);
    run({1, 4, 3, 320}, {192}, {50}, Save::kInputs);
    run({1, 2, 2, 64}, {64}, {0}, Save::kZ);
}

CASE(two_ranks_send_one_another_gradients_of_tokens_and_scores) {
    run({2, 6, 2, 128}, {192}, {90, 61}, Save::kZ);
    run({2, 4, 3, 64}, {320}, {1, 130}, Save::kZ);
}

CASE(z_that_was_not_kept_is_computed_again_from_tokens_that_are_pulled_again) {
    run({2, 4, 3, 64}, {192}, {70, 41}, Save::kInputs);
    run({3, 6, 2, 64}, {64}, {0, 50, 60}, Save::kInputs);
}

CASE(ranks_without_tokens_still_send_gradients_to_the_others) {
    run({3, 6, 2, 64}, {64}, {0, 70, 0}, Save::kZ);
    run({4, 8, 4, 64}, {64}, {20, 30, 0, 41}, Save::kZ);
}

CASE(a_rank_that_wants_nothing_serves_the_others) {
    const Needs nothing{false, false, false};
    run({2, 4, 2, 64}, {64}, {50, 60}, Save::kZ, {nothing});
    run({3, 3, 2, 64}, {64}, {30, 40, 20}, Save::kInputs, {{}, nothing, {false, true, false}});
    run({2, 4, 2, 64}, {64}, {50, 60}, Save::kZ, {{true, false, false}, {false, false, true}});
}

CASE(forwards_and_backwards_take_turns_on_the_same_arenas) {
    train({2, 4, 2, 64}, {64, 1}, {{40, 50}, {50, 10}}, Save::kZ);
    train({2, 2, 2, 64}, {64, 1}, {{20, 30}, {30, 10}, {9, 30}}, Save::kInputs);
    train({3, 6, 2, 64}, {64, 1}, {{20, 0, 35}, {30, 10, 0}}, Save::kFull);
}

CASE(backwards_do_without_what_their_forwards_left_in_the_arenas) {
    reverse({2, 4, 2, 64}, {64, 1}, {40, 30}, {50, 45}, Save::kZ);
    reverse({2, 4, 2, 64}, {64, 1}, {20, 50}, {50, 10}, Save::kInputs);
    reverse({3, 3, 2, 64}, {64, 1}, {20, 0, 31}, {5, 30, 10}, Save::kFull);
}

CASE(paced_links_change_no_value_of_a_backward) {
    run({2, 4, 2, 64, 300, 40}, {64}, {40, 50}, Save::kZ);
    run({3, 6, 2, 64, 300, 40}, {64}, {10, 50, 30}, Save::kInputs);
}

CASE(clamped_activations_in_a_backward_among_peers) {
    run<false>({2, 4, 2, 64}, {128, 1, true, 0.75, 1.75, 1}, {40, 50}, Save::kZ);
}

CASE(any_number_of_ranks_computes_the_same_bits_backwards) {
    const Size size{1, 12, 3, 64};
    const Model model{64};
    const Weights weights(size, model);
    const peers::Routing routing(size, 90, machine.random);
    Matrix x(1, 90, size.hidden), dy(1, 90, size.hidden);
    x.fill(machine.random, 1.0f);
    dy.fill(machine.random, 1.0f);
    const Bits alone = bits_of(size, model, weights, routing, x, dy, {90});
    for (const auto& tokens : {std::vector<u32>{20, 70}, {0, 89, 1}, {30, 7, 0, 53}}) {
        const Bits bits = bits_of(size, model, weights, routing, x, dy, tokens);
        CHECK(bits.dx == alone.dx, "%zu ranks: other bits of dx", tokens.size());
        CHECK(bits.dscore == alone.dscore, "%zu ranks: other bits of d score", tokens.size());
    }
}

CASE(a_rank_that_never_comes_to_the_backward_is_named_by_those_who_pull_from_it) {
    for (const Save save : {Save::kZ, Save::kInputs})
        for (const u32 left : {kStage, kDownGrad}) {
            if (save == Save::kInputs && left == kDownGrad) continue;
            const Left l({40, 50, 30}, save, left);
            for (const u32 rank : {0u, 2u}) {
                const FaultRecord& fault = l.of(rank).fault;
                if (peers::pulls_from(*l.all.calls[0]->wanted, rank, 1)) {
                    peers::expect(fault, Role::kPull, Wait::kPeerReady, 1);
                    l.check_silent(rank);
                } else {  // it may miss one that has given up itself
                    CHECK(
                        fault.code == 1 && fault.role == static_cast<u32>(Role::kEnd),
                        "code %u role %u", fault.code, fault.role);
                }
            }
        }
}

CASE(a_rank_without_tokens_that_never_comes_to_the_backward_is_missed_at_the_end) {
    // It has rows of the others and does not send their gradients.
    const Left l({40, 0, 30}, Save::kZ, kStage);
    for (const u32 rank : {0u, 2u})
        peers::expect(l.of(rank).fault, Role::kEnd, Wait::kPeerDone, 1);
}

CASE(a_rank_that_leaves_before_it_sends_gradients_is_missed_at_the_end) {
    const Left l({40, 50, 30}, Save::kZ, kGateUpGrad);
    for (const u32 rank : {0u, 2u})
        peers::expect(l.of(rank).fault, Role::kEnd, Wait::kPeerDone, 1);
}
