// SPDX-License-Identifier: Apache-2.0
// Whole forward calls among peers: every rank's plan, forward and combine in its own stream, calls
// back to back on the same arenas, against plain loops.
#include "moe/forward.cuh"

#include <algorithm>

#include "moe/combine.cuh"
#include "peers.hpp"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;
using peers::Arenas;
using peers::Call;
using peers::Size;

namespace {

sim::Machine machine(29);

struct Model {
    u32 intermediate;
    u32 lag = 1;
    bool keep_z = true;
    double clamp = INFINITY, alpha = 1, offset = 0;
};

// The experts of all ranks.
struct Weights {
    Matrix gate_up, down;

    Weights(const Size& size, const Model& model)
        : gate_up(size.experts, 2 * model.intermediate, size.hidden),
          down(size.experts, size.hidden, model.intermediate) {
        gate_up.fill(machine.random, 0.0625f);
        down.fill(machine.random, 0.25f);
    }
};

// What one rank's forward and combine are given in one call, and what they leave.
struct RankForward {
    const Size& size;
    const Model& model;
    const peers::RankPlan& plan;
    Layer rows;  // of its pool
    Matrix gate_up, down, pool, h, z, y;
    std::vector<u32> counters;
    std::vector<sim::Tensor> maps;
    FaultRecord fault{};
    moe::ForwardArgs args{};
    moe::CombineArgs combine{};

    RankForward(
        const Size& s, const Model& m, const Weights& weights, Call& call, Arenas& arenas, u32 rank)
        : size(s),
          model(m),
          plan(*call.plans[rank]),
          rows(s.hidden, m.intermediate, call.wanted->counts[rank], machine.random),
          gate_up(share(weights.gate_up, s, rank)),
          down(share(weights.down, s, rank)),
          pool(1, rows.pool(), s.hidden),
          h(1, rows.pool(), m.intermediate),
          z(1, rows.pool(), 2 * m.intermediate),
          y(1, plan.routing.tokens, s.hidden) {
        const u32 half = m.intermediate, blocks = rows.used() / 64;
        maps = {
            layer::rows_of(pool),
            layer::k_major(gate_up, 0, half),
            layer::k_major(gate_up, half, half),
            layer::rows_of(h),
            layer::halves_of(z),
            layer::k_major(down, 0, s.hidden)};
        // The counters that the plan zeroes.
        u32* zeroed = call.plans[rank]->counters.data();
        args = {
            .x = sim::map_of(maps[0]),
            .gate = sim::map_of(maps[1]),
            .up = sim::map_of(maps[2]),
            .h = sim::map_of(maps[3]),
            .z = sim::map_of(maps[4]),
            .down = sim::map_of(maps[5]),
            .counts = plan.counts.data(),
            .starts = plan.starts.data(),
            .list = plan.list.data(),
            .peers = &arenas.of(rank),
            .pool = reinterpret_cast<u8*>(pool.bits.data()),
            .arrivals = zeroed,
            .h_done = zeroed + blocks,
            .finished = zeroed + 2 * blocks,
            .fault = &fault,
            .num_experts = s.local(),
            .hidden = s.hidden,
            .intermediate = half,
            .lag = m.lag,
            .keep_z = m.keep_z,
            .alpha = static_cast<float>(m.alpha),
            .clamp = static_cast<float>(m.clamp),
            .up_offset = static_cast<float>(m.offset)};
        combine = {
            .pool = arenas.at(rank, arenas.of(rank).results),
            .slot_row = plan.slot_row.data(),
            .y = reinterpret_cast<u8*>(y.bits.data()),
            .score_parts = nullptr,
            .dscore = nullptr,
            .tokens = plan.routing.tokens,
            .topk = s.topk,
            .hidden = s.hidden,
            .parts = 0,
            .by_slot = 1,
            .reserved = 0};
    }

    static Matrix share(const Matrix& all, const Size& size, u32 rank) {
        Matrix part(size.local(), all.rows, all.columns);
        const auto first = all.bits.begin() + u64{rank} * part.bits.size();
        std::copy(first, first + part.bits.size(), part.bits.begin());
        return part;
    }

    // Everything that stays in this rank's memory.
    void check_pool(const Call& call, u32 rank) const {
        CHECK(
            fault.code == 0, "rank %u: role %u waited too long for %u of %u", rank, fault.role,
            fault.wait, fault.peer);
        const auto& list = call.wanted->list[rank];
        layer::check_rows(rows, pool, "x", 0, [&](u32 r, u32, u32 n) {
            const u32 owner = list[r].source >> 24, token = list[r].source & 0xFFFFFF;
            return call.plans[owner]->x.get(0, token, n);
        });
        const u32 half = model.intermediate;
        const auto value = [&](u32 r, u32 e, u32 n) {
            return layer::to_float(layer::to_bf16(layer::dot(pool, r, 0, gate_up, e, n)));
        };
        if (model.keep_z)
            layer::check_rows(rows, z, "z", 0, value);
        else
            for (const u16 bits : z.bits)
                CHECK(bits == 0xFFFF, "z was written");
        layer::check_rows(rows, h, "h", 1, [&](u32 r, u32 e, u32 n) {
            const double g = std::fmin(value(r, e, n), model.clamp);
            const double u = std::fmin(std::fmax(value(r, e, half + n), -model.clamp), model.clamp);
            return g * layer::sigmoid(model.alpha * g) * (u + model.offset);
        });
    }

    // One rounded row of `down`, as it is sent.
    float result(u32 row, u32 expert, u32 column, float score, double& slack) const {
        double sum = 0, size_of_sum = 0;
        for (u32 k = 0; k < h.columns; ++k) {
            const double part = h.get(0, row, k) * down.get(expert, column, k);
            sum += part;
            size_of_sum += std::fabs(part);
        }
        slack += std::fabs(score) * (size_of_sum * 1e-6 + std::fabs(sum) / 128);
        return layer::to_float(layer::to_bf16(static_cast<float>(sum * score)));
    }
};

struct Run {
    const Size& size;
    Arenas arenas;
    std::vector<std::unique_ptr<Call>> calls;
    std::vector<std::vector<std::unique_ptr<RankForward>>> forwards;  // [call][rank]
    std::vector<sim::Stream> streams;

    explicit Run(const Size& s) : size(s), arenas(s), streams(s.ranks) {}

    template <bool kPlain>
    void add(const Model& model, const Weights& weights, std::unique_ptr<Call> call) {
        forwards.emplace_back();
        for (u32 r = 0; r < size.ranks; ++r) {
            forwards.back().push_back(
                std::make_unique<RankForward>(size, model, weights, *call, arenas, r));
            const RankForward& f = *forwards.back().back();
            streams[r].push_back(
                sim::kernel_work<moe::PlanPeers>(
                    machine.random.below(3) ? 8 : 24, call->plans[r]->args));
            streams[r].push_back(
                sim::kernel_work<moe::Forward<kPlain>>(2 + 2 * machine.random.below(2), f.args));
            streams[r].push_back(sim::kernel_work<moe::Combine>(2, f.combine));
        }
        calls.push_back(std::move(call));
    }

    void check() const {
        for (u32 c = 0; c < calls.size(); ++c)
            for (u32 r = 0; r < size.ranks; ++r) {
                calls[c]->plans[r]->check(*calls[c]->wanted, r);
                forwards[c][r]->check_pool(*calls[c], r);
            }
        for (u32 c = 0; c < calls.size(); ++c)
            for (u32 r = 0; r < size.ranks; ++r)
                check_y(c, r);
    }

    // Sums of what the experts' ranks have in their h.
    void check_y(u32 c, u32 rank) const {
        const peers::RankPlan& plan = *calls[c]->plans[rank];
        const Matrix& y = forwards[c][rank]->y;
        for (u32 i = 0; i < y.rows * y.columns; ++i) {
            const u32 token = i / y.columns, column = i % y.columns;
            double sum = 0, slack = 0;
            for (u32 s = token * size.topk; s < (token + 1) * size.topk; ++s) {
                if (plan.slot_row[s] < 0) continue;
                const u32 place = static_cast<u32>(plan.slot_row[s]);
                const u32 row = place & ((1u << peers::kRankShift) - 1);
                const u32 expert = static_cast<u32>(plan.routing.ids[s]) % size.local();
                sum += forwards[c][place >> peers::kRankShift]->result(
                    row, expert, column, plan.routing.weights[s], slack);
            }
            const float value = y.get(0, token, column);
            CHECK(
                std::fabs(value - sum) <= slack + std::fabs(sum) / 128,
                "rank %u call %u y[%u][%u]: %g, not %g", rank, c, token, column, value, sum);
        }
    }
};

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
    run<true>({1, 3, 2, 64}, {64, 1}, {{70}});
    run<true>({1, 4, 3, 320}, {192, 2}, {{50}, {0}, {33}});
}

CASE(two_ranks_send_one_another_tokens_and_results) {
    run<true>({2, 6, 2, 128}, {192, 1}, {{90, 61}});
    run<true>({2, 4, 3, 64}, {320, 3, false}, {{1, 130}});
}

CASE(ranks_without_tokens_still_multiply_for_the_others) {
    run<true>({3, 6, 2, 64}, {64, 2}, {{0, 70, 0}, {40, 0, 1}});
}

CASE(four_ranks_and_a_second_gemm_that_stays_behind_all_of_the_first) {
    run<true>({4, 8, 4, 64}, {128, 9}, {{20, 30, 0, 41}});
}

CASE(calls_back_to_back_reuse_arenas) {
    run<true>({2, 4, 2, 64}, {64, 1}, {{40, 50}, {50, 10}, {9, 70}, {64, 0}});
}

CASE(paced_links_change_no_value) {
    run<true>({2, 4, 2, 64, 300, 40}, {64, 1}, {{40, 50}, {50, 10}});
}

CASE(clamped_activations_among_peers) {
    run<false>({2, 4, 2, 64}, {128, 1, true, 0.75, 1.75, 1}, {{40, 50}});
}

CASE(any_number_of_ranks_computes_the_same_bits) {
    const Size size{1, 12, 3, 128};
    const Model model{64, 2};
    const Weights weights(size, model);
    const peers::Routing routing(size, 90, machine.random);
    Matrix x(1, 90, size.hidden);
    x.fill(machine.random, 1.0f);
    const std::vector<u16> alone = y_of(size, model, weights, routing, x, {90});
    for (const auto& tokens : {std::vector<u32>{20, 70}, {0, 89, 1}, {30, 7, 0, 53}})
        CHECK(
            y_of(size, model, weights, routing, x, tokens) == alone, "%zu ranks: other bits",
            tokens.size());
}
