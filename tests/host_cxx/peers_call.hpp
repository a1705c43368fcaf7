// SPDX-License-Identifier: Apache-2.0
// peers_call.hpp: whole forward calls among peers: every rank's plan, forward and combine in its own
// stream, and what they have to leave.
#pragma once
#include <algorithm>

#include "moe/combine.cuh"
#include "moe/among_peers.cuh"
#include "moe/forward.cuh"
#include "peers.hpp"
#include "sim/grid.hpp"

namespace peers {

using layer::Layer;
using layer::Matrix;

struct Model {
    u32 intermediate;
    u32 lag = 1;
    bool keep_z = true;
    double clamp = INFINITY, alpha = 1, offset = 0;
    bool only_moves = false;
    bool apart = false;  // both GEMMs in launches of their own
};

// The experts of all ranks.
struct Weights {
    Matrix gate_up, down;

    Weights(const Size& size, const Model& model)
        : gate_up(size.experts, 2 * model.intermediate, size.hidden),
          down(size.experts, size.hidden, model.intermediate) {
        gate_up.fill(sim::machine->random, 0.0625f);
        down.fill(sim::machine->random, 0.25f);
    }
};

// What one rank's forward and combine are given in one call, and what they leave.
struct RankForward {
    const Size& size;
    const Model& model;
    const RankPlan& plan;
    Layer rows;  // of its pool
    Matrix gate_up, down, pool, h, z, y_rows, y;
    std::vector<u32> counters;
    std::vector<sim::Tensor> maps;
    FaultRecord fault{};
    moe::ForwardArgs args{};
    moe::GroupedArgs first{}, second{};  // the two GEMMs apart
    moe::CombineArgs combine{};

    RankForward(
        const Size& s, const Model& m, const Weights& weights, Call& call, Arenas& arenas, u32 rank)
        : size(s),
          model(m),
          plan(*call.plans[rank]),
          rows(s.hidden, m.intermediate, call.wanted->counts[rank], sim::machine->random),
          gate_up(share(weights.gate_up, s, rank)),
          down(share(weights.down, s, rank)),
          pool(1, rows.pool(), s.hidden),
          h(1, rows.pool(), m.intermediate),
          z(1, rows.pool(), 2 * m.intermediate),
          y_rows(1, rows.pool(), s.hidden),
          y(1, plan.routing.tokens, s.hidden) {
        const u32 half = m.intermediate, blocks = rows.used() / 64;
        maps = {
            layer::rows_of(pool),
            layer::k_major(gate_up, 0, half),
            layer::k_major(gate_up, half, half),
            layer::rows_of(h),
            layer::halves_of(z),
            layer::k_major(down, 0, s.hidden),
            layer::rows_of(y_rows)};
        // The counters that the plan zeroes.
        u32* zeroed = call.plans[rank]->counters.data();
        args = {
            .x = sim::map_of(maps[0]),
            .gate = sim::map_of(maps[1]),
            .up = sim::map_of(maps[2]),
            .h = sim::map_of(maps[3]),
            .z = sim::map_of(maps[4]),
            .down = sim::map_of(maps[5]),
            .y = sim::map_of(maps[6]),
            .counts = plan.counts.data(),
            .starts = plan.starts.data(),
            .list = plan.list.data(),
            .peers = &arenas.of(rank),
            .row_score = plan.score.data(),
            .pool = reinterpret_cast<u8*>(pool.bits.data()),
            .y_rows = reinterpret_cast<u8*>(y_rows.bits.data()),
            .arrivals = zeroed,
            .h_done = zeroed + blocks,
            .y_done = zeroed + 2 * blocks,
            .finished = zeroed + 3 * blocks,
            .fault = &fault,
            .num_experts = s.local(),
            .hidden = s.hidden,
            .intermediate = half,
            .lag = m.lag,
            .keep_z = m.keep_z,
            .only_moves = m.only_moves,
            .reserved = 0,
            .alpha = static_cast<float>(m.alpha),
            .clamp = static_cast<float>(m.clamp),
            .up_offset = static_cast<float>(m.offset)};
        combine = {
            .pool = reinterpret_cast<u8*>(y_rows.bits.data()),
            .results = arenas.at(rank, arenas.of(rank).results),
            .slot_row = plan.slot_row.data(),
            .y = reinterpret_cast<u8*>(y.bits.data()),
            .score_parts = nullptr,
            .dscore = nullptr,
            .tokens = plan.routing.tokens,
            .topk = s.topk,
            .hidden = s.hidden,
            .parts = 0,
            .rank = rank,
            .parts_by_slot = 1};
        split();
    }

    // What the chained launch is given, for the two GEMMs apart.
    void split() {
        first.a = args.x;
        first.b0 = args.gate;
        first.b1 = args.up;
        first.out0 = args.h;
        first.out1 = first.in1 = args.z;
        first.counts = args.counts;
        first.starts = args.starts;
        first.row_score = args.row_score;
        first.fault = args.fault;
        first.list = args.list;
        first.peers = args.peers;
        first.pull_dst = args.pool;
        first.pull_bytes = args.hidden * 2;
        first.arrivals = first.copied = args.arrivals;
        first.num_experts = args.num_experts;
        first.k_steps = first.split = args.hidden / 64;
        first.columns = args.intermediate;
        first.n_tiles = ceil_div(args.intermediate, 128u);
        first.keep_z = args.keep_z;
        first.alpha = args.alpha;
        first.clamp = args.clamp;
        first.up_offset = args.up_offset;
        second = first;
        second.a = args.h;
        second.b0 = second.b1 = args.down;
        second.out0 = args.y;
        second.pull_dst = nullptr;
        second.arrivals = nullptr;
        second.copied = args.h_done;
        second.out_rows = args.y_rows;
        second.out_done = args.y_done;
        second.finished = args.finished;
        second.k_steps = second.split = args.intermediate / 64;
        second.columns = args.hidden;
        second.n_tiles = ceil_div(args.hidden, 256u);
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
                    sim::machine->random.below(2) ? 8 : 24, call->plans[r]->args));
            const auto grid = [] { return 2 + 2 * sim::machine->random.below(2); };
            if (model.apart) {
                streams[r].push_back(sim::kernel_work<moe::GateUpPeers<kPlain>>(grid(), f.first));
                streams[r].push_back(sim::kernel_work<moe::DownPeers>(grid(), f.second));
            } else {
                streams[r].push_back(sim::kernel_work<moe::Forward<kPlain>>(grid(), f.args));
            }
            streams[r].push_back(sim::kernel_work<moe::Combine>(2, f.combine));
        }
        calls.push_back(std::move(call));
    }

    // A call whose forward is left out.
    void add_plan(std::unique_ptr<Call> call) {
        forwards.emplace_back();
        for (u32 r = 0; r < size.ranks; ++r)
            streams[r].push_back(sim::kernel_work<moe::PlanPeers>(8, call->plans[r]->args));
        calls.push_back(std::move(call));
    }

    void check() const {
        for (u32 c = 0; c < calls.size(); ++c)
            for (u32 r = 0; r < size.ranks; ++r) {
                calls[c]->plans[r]->check(*calls[c]->wanted, r);
                if (!forwards[c].empty()) forwards[c][r]->check_pool(*calls[c], r);
            }
        for (u32 c = 0; c < calls.size(); ++c)
            for (u32 r = 0; r < forwards[c].size(); ++r)
                check_y(c, r);
    }

    // Sums of what the experts' ranks have in their h.
    void check_y(u32 c, u32 rank) const {
        const RankPlan& plan = *calls[c]->plans[rank];
        const Matrix& y = forwards[c][rank]->y;
        for (u32 i = 0; i < y.rows * y.columns; ++i) {
            const u32 token = i / y.columns, column = i % y.columns;
            double sum = 0, slack = 0;
            for (u32 s = token * size.topk; s < (token + 1) * size.topk; ++s) {
                if (plan.slot_row[s] < 0) continue;
                const u32 place = static_cast<u32>(plan.slot_row[s]);
                const u32 row = place & ((1u << kRankShift) - 1);
                const u32 expert = static_cast<u32>(plan.routing.ids[s]) % size.local();
                sum += forwards[c][place >> kRankShift]->result(
                    row, expert, column, plan.routing.weights[s], slack);
            }
            const float value = y.get(0, token, column);
            CHECK(
                std::fabs(value - sum) <= slack + std::fabs(sum) / 128,
                "rank %u call %u y[%u][%u]: %g, not %g", rank, c, token, column, value, sum);
        }
    }
};

}  // namespace peers
