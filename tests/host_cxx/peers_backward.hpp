// SPDX-License-Identifier: Apache-2.0
// peers_backward.hpp: whole backward calls among peers: every rank's launches in its own stream, as
// prime_kernels/moe/cuda_peers.py asks for them, and what they have to leave.
#pragma once
#include "gradients.hpp"
#include "moe/among_peers.cuh"
#include "moe/stage_peers.cuh"
#include "moe/wgrad.cuh"
#include "peers_call.hpp"

namespace peers {

// What the forward kept.
enum class Save { kInputs, kZ, kFull };

// What one rank asks of a backward; what its peers need of it is done all the same.
struct Needs {
    bool x = true, scores = true, weights = true;
};

// What one rank's backward is given in one call, and what it leaves.
struct RankBackward {
    const Size& size;
    const Model& model;
    const RankPlan& plan;
    Save save;
    Needs needs;
    Layer rows;  // of its pool
    Matrix gate_up, down, dy, own_z, own_x, dy_rows, dz, scaled, dx_rows, dx;
    Matrix& z;       // of the forward, or its own
    Matrix& x_rows;  // the same
    u32 parts, blocks;
    std::vector<float> score, score_parts, dscore;
    std::vector<u32> counters;
    layer::Gradient dw_gate_up, dw_down;
    std::vector<sim::Tensor> maps;
    FaultRecord fault{};
    moe::StagePeersArgs stage{};
    moe::GroupedArgs again{}, down_grad{}, gate_up_grad{};
    moe::WgradArgs wgrad{};
    moe::CombineArgs combine{};

    // Without a forward of the same call, z is made up here.
    RankBackward(
        const Size& s, const Model& m, const Weights& weights, const Call& call, Arenas& arenas,
        u32 rank, Save kept, const Needs& wants, RankForward* forward)
        : size(s),
          model(m),
          plan(*call.plans[rank]),
          save(kept),
          needs(wants),
          rows(s.hidden, m.intermediate, call.wanted->counts[rank], sim::machine->random),
          gate_up(RankForward::share(weights.gate_up, s, rank)),
          down(RankForward::share(weights.down, s, rank)),
          dy(1, plan.routing.tokens, s.hidden),
          own_z(1, rows.pool(), 2 * m.intermediate),
          own_x(1, rows.pool(), s.hidden),
          dy_rows(1, rows.pool(), s.hidden),
          dz(1, rows.pool(), 2 * m.intermediate),
          scaled(1, rows.pool(), m.intermediate),
          dx_rows(1, rows.pool(), s.hidden),
          dx(1, plan.routing.tokens, s.hidden),
          z(forward != nullptr && kept != Save::kInputs ? forward->z : own_z),
          x_rows(forward != nullptr && kept == Save::kFull ? forward->pool : own_x),
          parts(ceil_div(m.intermediate, 256u)),
          blocks(rows.used() / 64),
          score(rows.pool(), NAN),
          score_parts(rows.pool() * parts, NAN),
          dscore(plan.routing.ids.size(), NAN),
          counters(3 * blocks + 1, ~0u),
          dw_gate_up(s.local(), 2 * m.intermediate, s.hidden, 4, false),
          dw_down(s.local(), s.hidden, m.intermediate, 4, false) {
        dy.fill(sim::machine->random, 1.0f);
        if (forward == nullptr && kept != Save::kInputs)
            own_z = rows.rows(own_z.columns, 0.5f, sim::machine->random);
        make_maps();
        make_stage(arenas, rank);
        make_multiplications(arenas, rank);
        make_wgrad();
        make_combine(arenas, rank);
    }

    bool pulls_x_late() const { return save == Save::kZ && needs.weights; }

    // Adds its launches to the rank's stream.
    template <bool kPlain>
    void add_to(sim::Stream& stream) const {
        const auto grid = [] { return 2 + 2 * sim::machine->random.below(2); };
        stream.push_back(
            sim::kernel_work<moe::StagePeers>(1 + sim::machine->random.below(3), stage));
        if (save == Save::kInputs)
            stream.push_back(sim::kernel_work<moe::GateUpPeers<kPlain>>(grid(), again));
        stream.push_back(sim::kernel_work<moe::DownGradPeers<kPlain>>(grid(), down_grad));
        stream.push_back(sim::kernel_work<moe::GateUpGradPeers>(grid(), gate_up_grad));
        if (needs.weights) stream.push_back(sim::kernel_work<moe::Wgrad<true>>(2, wgrad));
        if (needs.x || needs.scores) stream.push_back(sim::kernel_work<moe::Combine>(2, combine));
    }

    // Everything that stays in this rank's memory. `of(owner)` is that rank's backward.
    template <class F>
    void check_pool(const Call& call, u32 rank, const layer::Activation& activation, F&& of) const {
        CHECK(
            fault.code == 0, "rank %u: role %u waited too long for %u of %u", rank, fault.role,
            fault.wait, fault.peer);
        const auto& list = call.wanted->list[rank];
        const auto token_of = [&](u32 r) { return list[r].source & 0xFFFFFF; };
        const auto owner_of = [&](u32 r) { return list[r].source >> 24; };
        for (u32 r = 0; r < rows.used(); ++r)
            CHECK(score[r] == list[r].score, "rank %u row %u: score %g", rank, r, score[r]);
        layer::check_rows(rows, dy_rows, "dy", 0, [&](u32 r, u32, u32 n) {
            return of(owner_of(r)).dy.get(0, token_of(r), n);
        });
        if (needs.weights || save == Save::kInputs)
            layer::check_rows(rows, x_rows, "x", 0, [&](u32 r, u32, u32 n) {
                return call.plans[owner_of(r)]->x.get(0, token_of(r), n);
            });
        const u32 half = model.intermediate;
        if (save == Save::kInputs)
            layer::check_rows(rows, z, "z", 0, [&](u32 r, u32 e, u32 n) {
                return layer::dot(x_rows, r, 0, gate_up, e, n);
            });
        std::vector<layer::Right> right(u64{rows.pool()} * half);
        for (u32 i = 0; i < rows.used() * half; ++i) {
            const u32 r = i / half, n = i % half, e = rows.expert_of(r);
            if (e == rows.experts()) continue;
            right[i] = activation(
                z.get(0, r, n), z.get(0, r, half + n),
                layer::dot_t(dy_rows, r, 0, down, e, n, 0, size.hidden), score[r]);
        }
        layer::check_rows(rows, dz, "dz", 1, [&](u32 r, u32, u32 n) {
            const layer::Right& v = right[r * half + n % half];
            return n < half ? v.dg : v.du;
        });
        layer::check_rows(rows, scaled, "score h", 1, [&](u32 r, u32, u32 n) {
            return right[r * half + n].scaled_h;
        });
        check_dscore(call, rank, right, of);
        if (!needs.weights) return;
        dw_gate_up.check_near(rows, dz, x_rows);
        dw_down.check_near(rows, dy_rows, scaled);
    }

    // One rounded row of `gate_up`, transposed, as it is sent.
    float result(u32 row, u32 expert, u32 column, double& slack) const {
        double sum = 0, size_of_sum = 0;
        for (u32 k = 0; k < dz.columns; ++k) {
            const double part = dz.get(0, row, k) * gate_up.get(expert, k, column);
            sum += part;
            size_of_sum += std::fabs(part);
        }
        slack += size_of_sum * 1e-6 + std::fabs(sum) / 128;
        return layer::to_float(layer::to_bf16(static_cast<float>(sum)));
    }

private:
    // In the owners' results, whether they asked for them or not.
    template <class F>
    void check_dscore(
        const Call& call, u32 rank, const std::vector<layer::Right>& right, F&& of) const {
        for (u32 r = 0; r < rows.used(); ++r) {
            const RowEntry& entry = call.wanted->list[rank][r];
            if (entry.source == comm::kNoRow) continue;
            const RankBackward& owner = of(entry.source >> 24);
            if (!owner.needs.scores) continue;
            double sum = 0, size_of_sum = 1e-6;
            for (u32 n = 0; n < model.intermediate; ++n) {
                const double product = right[u64{r} * model.intermediate + n].product;
                sum += product;
                size_of_sum += std::fabs(product);
            }
            const float got = owner.dscore[entry.slot];
            // h may round to the other neighbour: one part in 256 of each product.
            CHECK(
                std::fabs(got - sum) <= size_of_sum / 256, "rank %u row %u: d score %g, not %g",
                rank, r, got, sum);
        }
    }

    void make_maps() {
        const u32 half = model.intermediate;
        maps = {
            layer::rows_of(x_rows),
            layer::k_major(gate_up, 0, half),
            layer::k_major(gate_up, half, half),
            layer::rows_of(scaled),
            layer::halves_of(z),
            layer::rows_of(dy_rows),
            layer::mn_major(down, 0, size.hidden),
            layer::halves_of(dz),
            layer::rows_of(dz),
            layer::mn_major(gate_up, 0, half),
            layer::mn_major(gate_up, half, half),
            layer::rows_of(dx_rows),
            layer::mn_major(dz, 0, rows.pool()),
            layer::mn_major(x_rows, 0, rows.pool()),
            layer::mn_major(dy_rows, 0, rows.pool()),
            layer::mn_major(scaled, 0, rows.pool()),
            dw_gate_up.map(0, half),
            dw_gate_up.map(half, half),
            dw_down.map(0, size.hidden)};
    }

    void make_stage(Arenas& arenas, u32 rank) {
        stage = {
            .grads = reinterpret_cast<u8*>(dy.bits.data()),
            .tokens =
                save == Save::kFull ? nullptr : reinterpret_cast<const u8*>(plan.x.bits.data()),
            .starts = plan.starts.data(),
            .list = plan.list.data(),
            .peers = &arenas.of(rank),
            .row_score = score.data(),
            .counters = counters.data(),
            .num_tokens = plan.routing.tokens,
            .row_bytes = size.hidden * 2,
            .num_experts = size.local(),
            .num_counters = static_cast<u32>(counters.size())};
    }

    // What every grouped GEMM among peers is given; `set` of its counters.
    moe::GroupedArgs among_peers(Arenas& arenas, u32 rank, u32 set) {
        moe::GroupedArgs args = layer::grouped_args(rows, fault);
        args.counts = plan.counts.data();
        args.starts = plan.starts.data();
        args.row_score = nullptr;
        args.list = plan.list.data();
        args.peers = &arenas.of(rank);
        args.copied = counters.data() + set * blocks;
        args.pull_bytes = size.hidden * 2;
        args.alpha = static_cast<float>(model.alpha);
        args.clamp = static_cast<float>(model.clamp);
        args.up_offset = static_cast<float>(model.offset);
        return args;
    }

    void make_multiplications(Arenas& arenas, u32 rank) {
        const u32 half = model.intermediate;
        again = among_peers(arenas, rank, 1);
        again.a = sim::map_of(maps[0]);
        again.b0 = sim::map_of(maps[1]);
        again.b1 = sim::map_of(maps[2]);
        again.out0 = sim::map_of(maps[3]);
        again.out1 = sim::map_of(maps[4]);
        again.pull_dst = reinterpret_cast<u8*>(x_rows.bits.data());
        again.arrivals = again.copied;
        again.k_steps = again.split = size.hidden / 64;
        again.columns = half;
        again.n_tiles = ceil_div(half, 128u);
        again.keep_z = 1;
        down_grad = among_peers(arenas, rank, 0);
        down_grad.a = sim::map_of(maps[5]);
        down_grad.b0 = down_grad.b1 = sim::map_of(maps[6]);
        down_grad.out0 = sim::map_of(maps[3]);
        down_grad.out1 = sim::map_of(maps[7]);
        down_grad.in1 = sim::map_of(maps[4]);
        down_grad.row_score = score.data();
        down_grad.score_parts = score_parts.data();
        down_grad.pull_dst = reinterpret_cast<u8*>(dy_rows.bits.data());
        down_grad.arrivals = down_grad.copied;
        down_grad.pull_grads = 1;
        down_grad.k_steps = down_grad.split = size.hidden / 64;
        down_grad.columns = half;
        down_grad.n_tiles = parts;
        gate_up_grad = among_peers(arenas, rank, 1);
        gate_up_grad.a = sim::map_of(maps[8]);
        gate_up_grad.b0 = sim::map_of(maps[9]);
        gate_up_grad.b1 = sim::map_of(maps[10]);
        gate_up_grad.out0 = sim::map_of(maps[11]);
        if (pulls_x_late()) gate_up_grad.pull_dst = reinterpret_cast<u8*>(x_rows.bits.data());
        gate_up_grad.out_rows = reinterpret_cast<u8*>(dx_rows.bits.data());
        gate_up_grad.out_done = counters.data() + 2 * blocks;
        gate_up_grad.finished = counters.data() + 3 * blocks;
        gate_up_grad.parts = parts;
        gate_up_grad.score_parts = score_parts.data();
        gate_up_grad.k_steps = 2 * half / 64;
        gate_up_grad.split = half / 64;
        gate_up_grad.columns = size.hidden;
        gate_up_grad.n_tiles = ceil_div(size.hidden, 256u);
    }

    void make_wgrad() {
        wgrad = {
            .a0 = sim::map_of(maps[12]),
            .b0 = sim::map_of(maps[13]),
            .a1 = sim::map_of(maps[14]),
            .b1 = sim::map_of(maps[15]),
            .gate = sim::map_of(maps[16]),
            .up = sim::map_of(maps[17]),
            .down = sim::map_of(maps[18]),
            .counts = plan.counts.data(),
            .starts = plan.starts.data(),
            .fault = &fault,
            .gate_sum = nullptr,
            .up_sum = nullptr,
            .down_sum = nullptr,
            .gate_up_matrix = 0,
            .down_matrix = 0,
            .gate_up_pitch = 0,
            .down_pitch = 0,
            .num_experts = size.local(),
            .hidden = size.hidden,
            .intermediate = model.intermediate,
            .do_gate_up = 1,
            .do_down = 1,
            .reserved = 0};
    }

    void make_combine(Arenas& arenas, u32 rank) {
        const comm::Peers& p = arenas.of(rank);
        const auto* sums = reinterpret_cast<const float*>(arenas.at(rank, p.dscore));
        combine = {
            .pool = reinterpret_cast<u8*>(dx_rows.bits.data()),
            .results = arenas.at(rank, p.results),
            .slot_row = plan.slot_row.data(),
            .y = needs.x ? reinterpret_cast<u8*>(dx.bits.data()) : nullptr,
            .score_parts = needs.scores ? sums : nullptr,
            .dscore = needs.scores ? dscore.data() : nullptr,
            .tokens = plan.routing.tokens,
            .topk = size.topk,
            .hidden = size.hidden,
            .parts = needs.scores ? 1u : 0u,
            .rank = rank,
            .parts_by_slot = 1};
    }
};

// Backwards of calls of `run`, behind whatever the run's streams hold already.
struct Backwards {
    Run& run;
    struct OfCall {
        const Call* call;
        std::vector<std::unique_ptr<RankBackward>> ranks;
    };
    std::vector<OfCall> calls;

    // `needs` of every rank; those that are not named want all.
    template <bool kPlain>
    void add(
        const Model& model, const Weights& weights, u32 c, Save save,
        const std::vector<Needs>& needs = {}) {
        OfCall& added = calls.emplace_back(OfCall{run.calls[c].get(), {}});
        for (u32 r = 0; r < run.size.ranks; ++r) {
            RankForward* forward = run.forwards[c].empty() ? nullptr : run.forwards[c][r].get();
            added.ranks.push_back(
                std::make_unique<RankBackward>(
                    run.size, model, weights, *added.call, run.arenas, r, save,
                    r < needs.size() ? needs[r] : Needs{}, forward));
            added.ranks.back()->add_to<kPlain>(run.streams[r]);
        }
    }

    void check() const {
        for (const OfCall& c : calls) {
            for (u32 r = 0; r < run.size.ranks; ++r) {
                const Model& m = c.ranks[r]->model;
                c.ranks[r]->check_pool(
                    *c.call, r, {m.clamp, m.alpha, m.offset},
                    [&](u32 owner) -> const RankBackward& { return *c.ranks[owner]; });
            }
            for (u32 r = 0; r < run.size.ranks; ++r)
                check_tokens(c, r);
        }
    }

private:
    // Sums of what the experts' ranks have in their dz; nothing where nothing was asked for.
    void check_tokens(const OfCall& c, u32 rank) const {
        const RankBackward& own = *c.ranks[rank];
        const RankPlan& plan = own.plan;
        for (u32 s = 0; s < own.dscore.size(); ++s) {
            const float value = own.dscore[s];
            const bool fine =
                !own.needs.scores ? std::isnan(value) : plan.slot_row[s] >= 0 || value == 0.0f;
            CHECK(fine, "rank %u slot %u: d score %g", rank, s, value);
        }
        for (u32 i = 0; i < own.dx.rows * own.dx.columns; ++i) {
            const u32 token = i / own.dx.columns, column = i % own.dx.columns;
            double sum = 0, slack = 0;
            for (u32 s = token * own.size.topk; s < (token + 1) * own.size.topk; ++s) {
                if (plan.slot_row[s] < 0) continue;
                const u32 place = static_cast<u32>(plan.slot_row[s]);
                const u32 row = place & ((1u << kRankShift) - 1);
                const u32 expert = static_cast<u32>(plan.routing.ids[s]) % own.size.local();
                sum += c.ranks[place >> kRankShift]->result(row, expert, column, slack);
            }
            const float value = own.dx.get(0, token, column);
            const bool fine = own.needs.x ? std::fabs(value - sum) <= slack + std::fabs(sum) / 128
                                          : std::isnan(value);
            CHECK(fine, "rank %u dx[%u][%u]: %g, not %g", rank, token, column, value, sum);
        }
    }
};

}  // namespace peers
