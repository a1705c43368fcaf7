// SPDX-License-Identifier: Apache-2.0
// peers.hpp: ranks of an expert-parallel group on the simulated machine: their arenas, their
// routing, and what a plan of it has to be.
#pragma once
#include <memory>

#include "comm/peers.cuh"
#include "layer.hpp"
#include "moe/plan_peers.cuh"

namespace peers {

using namespace prime;
using comm::RowEntry;

constexpr u32 kRankShift = 28;
constexpr u64 kTimeoutNs = 1000ull * 1000 * 1000;

struct Size {
    u32 ranks, experts, topk, hidden;
    u32 most_tokens = 300;  // of a rank
    u64 bytes_per_us = 0;
    u64 timeout_ns = kTimeoutNs;

    u32 local() const { return experts / ranks; }
    u32 most_rows() const { return ranks * most_tokens * topk + local() * 64; }
};

// One rank's share of a call: the experts that its tokens want.
struct Routing {
    u32 tokens = 0;
    std::vector<i64> ids;  // [T, K]
    std::vector<float> weights;
    u32 bad = 0;

    Routing(const Size& size, u32 t, test::Random& random) : tokens(t) {
        // Some ranks send nearly everything to a few experts, some tokens name one twice.
        const u32 spread = random.below(3) == 0 ? 1 + random.below(3) : size.experts;
        const u32 base = random.below(size.experts);
        for (u32 s = 0; s < t * size.topk; ++s) {
            i64 id = (base + random.below(spread)) % size.experts;
            if (s % size.topk != 0 && random.below(8) == 0) id = ids.back();
            if (random.below(12) == 0) id = -1;
            if (random.below(200) == 0) id = random.below(2) ? -2 : i64{size.experts};
            bad += id < -1 || id >= size.experts;
            ids.push_back(id);
            weights.push_back(layer::Layer::pick(random));
        }
    }

    // Tokens [first, first + count) of these.
    Routing part(const Size& size, u32 first, u32 count) const {
        Routing r = *this;
        r.tokens = count;
        const u32 begin = first * size.topk, end = (first + count) * size.topk;
        r.ids.assign(ids.begin() + begin, ids.begin() + end);
        r.weights.assign(weights.begin() + begin, weights.begin() + end);
        r.bad = 0;
        for (const i64 id : r.ids)
            r.bad += id < -1 || id >= size.experts;
        return r;
    }

    // As int64, where bad ids have their low half in range, or as int32.
    std::vector<u8> bytes(bool wide, u32 experts) const {
        std::vector<u8> out(ids.size() * (wide ? 8 : 4));
        for (u32 s = 0; s < ids.size(); ++s) {
            const bool bad_one = ids[s] < -1 || ids[s] >= experts;
            const i64 id = wide && bad_one ? ids[s] * (i64{1} << 32) : ids[s];
            const i32 narrow = static_cast<i32>(id);
            std::memcpy(
                out.data() + s * (wide ? 8 : 4), wide ? static_cast<const void*>(&id) : &narrow,
                wide ? 8 : 4);
        }
        return out;
    }
};

// What the ranks have to agree on, by plain loops.
struct Wanted {
    std::vector<std::vector<i32>> counts;     // [R][E_l] rows of every local expert
    std::vector<std::vector<i32>> sent;       // [R][E] rows that a rank sends
    std::vector<std::vector<RowEntry>> list;  // [R][pool rows]
    std::vector<std::vector<i32>> slot_row;   // [R][T K]
    std::vector<std::vector<i32>> starts;     // [R][E_l + 1]

    Wanted(const Size& size, const std::vector<Routing>& all) {
        counts.resize(size.ranks), list.resize(size.ranks), starts.resize(size.ranks);
        for (const Routing& r : all) {
            sent.emplace_back(size.experts, 0);
            slot_row.emplace_back(r.ids.size(), -1);
        }
        for (u32 e = 0; e < size.experts; ++e)
            add_expert(size, all, e);
        for (u32 g = 0; g < size.ranks; ++g)
            starts[g].push_back(static_cast<i32>(list[g].size()));
        link(size);
    }

private:
    void add_expert(const Size& size, const std::vector<Routing>& all, u32 e) {
        const u32 g = e / size.local();
        std::vector<RowEntry>& rows = list[g];
        starts[g].push_back(static_cast<i32>(rows.size()));
        for (u32 owner = 0; owner < size.ranks; ++owner) {
            const Routing& r = all[owner];
            for (u32 s = 0; s < r.ids.size(); ++s) {
                if (r.ids[s] != i64{e}) continue;
                slot_row[owner][s] = static_cast<i32>(g << kRankShift | rows.size());
                rows.push_back({owner << 24 | s / size.topk, s, -1, r.weights[s]});
                ++sent[owner][e];
            }
        }
        counts[g].push_back(static_cast<i32>(rows.size()) - starts[g].back());
        while (rows.size() % 64 != 0)
            rows.push_back({comm::kNoRow, 0, -1, 0.0f});
    }

    // A row that stands in a later block of 64 than the first of its token is a copy of that one.
    void link(const Size& size) {
        for (u32 g = 0; g < size.ranks; ++g) {
            std::map<u32, u32> first;
            for (u32 row = 0; row < list[g].size(); ++row) {
                if (list[g][row].source == comm::kNoRow) continue;
                const u32 found = first.emplace(list[g][row].source, row).first->second;
                if (found / 64 < row / 64) list[g][row].copy_of = static_cast<i32>(found);
            }
        }
    }
};

// The memory of all ranks. What is not a flag or an epoch is NaN or nonsense until it is written.
struct Arenas {
    std::vector<std::vector<u64>> words;

    explicit Arenas(const Size& size) {
        comm::Peers p{};
        u64 end = 1024;
        const auto take = [&](u64 bytes) {
            const u64 at = end;
            end += (bytes + 127) / 128 * 128;
            return at;
        };
        p.size = size.ranks;
        p.flags = take(4 * comm::kMaxPeers * comm::kFlagBytes);
        const u64 flags_end = end;
        p.counts = take(u64{size.ranks} * size.experts * 4);
        p.rows = take(u64{size.most_rows()} * sizeof(RowEntry));
        p.tokens = take(u64{size.most_tokens} * size.hidden * 2);
        p.grads = take(u64{size.most_tokens} * size.hidden * 2);
        p.results = take(u64{size.most_tokens} * size.topk * size.hidden * 2);
        p.dscore = take(u64{size.most_tokens} * size.topk * 4);
        p.timeout_ns = size.timeout_ns;
        p.bytes_per_us = size.bytes_per_us;
        words.assign(size.ranks, std::vector<u64>(end / 8, ~0ull));
        sim::remote.regions.clear();
        for (u32 r = 0; r < size.ranks; ++r) {
            p.arena[r] = reinterpret_cast<u64>(words[r].data());
            sim::remote.regions.push_back({at(r, 0), end, r});
        }
        for (u32 r = 0; r < size.ranks; ++r) {
            std::memset(at(r, 0), 0, flags_end);
            p.rank = r;
            std::memcpy(at(r, 0), &p, sizeof(p));
        }
    }

    u8* at(u32 rank, u64 offset) { return reinterpret_cast<u8*>(words[rank].data()) + offset; }
    const comm::Peers& of(u32 rank) const {
        return *reinterpret_cast<const comm::Peers*>(words[rank].data());
    }
    u64 epoch(u32 rank) const { return comm::state_of(of(rank), rank)->epoch; }
};

// A rank's plan in one call, and the launch that makes it.
struct RankPlan {
    const Routing& routing;
    std::vector<u8> ids;
    layer::Matrix x;
    std::vector<i32> counts, starts, slot_row, tokens_per_expert, recv_per_expert;
    std::vector<u32> counters;
    std::vector<float> score;              // of the pool's rows
    RowEntry unlisted{77, 77, 77, 77.0f};  // what rows hold until a plan has them
    std::vector<RowEntry> list;
    FaultRecord fault{};
    moe::PlanPeersArgs args{};

    static constexpr u32 kSpare = 128;  // rows that no plan uses

    RankPlan(
        const Size& size, const Routing& r, Arenas& arenas, u32 rank, u32 rows,
        test::Random& random)
        : routing(r),
          x(1, r.tokens, size.hidden),
          counts(size.local(), -77),
          starts(size.local() + 1, -77),
          slot_row(r.ids.size(), -77),
          tokens_per_expert(size.experts, -77),
          recv_per_expert(size.local(), -77),
          counters(3 * rows / 64 + 1, ~0u),
          score(rows, NAN),
          list(rows + kSpare, unlisted) {
        const bool wide = random.below(2) != 0;
        ids = r.bytes(wide, size.experts);
        x.fill(random, 1.0f);
        args.plan = {
            .ids = ids.data(),
            .weights = r.weights.data(),
            .counts = counts.data(),
            .starts = starts.data(),
            .slot_row = slot_row.data(),
            .row_src = nullptr,
            .tokens_per_expert = tokens_per_expert.data(),
            .recv_per_expert = recv_per_expert.data(),
            .row_score = score.data(),
            .counters = counters.data(),
            .fault = &fault,
            .tokens = r.tokens,
            .topk = size.topk,
            .num_experts = size.experts,
            .num_counters = static_cast<u32>(counters.size()),
            .pool_rows = rows,
            .wide_ids = wide};
        args.list = list.data();
        args.peers = &arenas.of(rank);
        args.tokens = reinterpret_cast<const u8*>(x.bits.data());
        args.row_bytes = size.hidden * 2;
    }

    void unlist(const RowEntry& with) {
        unlisted = with;
        list.assign(list.size(), with);
    }

    void check(const Wanted& wanted, u32 rank) const {
        CHECK(
            fault.code == 0, "rank %u: role %u waited too long for %u of %u", rank, fault.role,
            fault.wait, fault.peer);
        CHECK(fault.bad_ids == routing.bad, "%u bad ids, not %u", fault.bad_ids, routing.bad);
        same(counts, wanted.counts[rank], "counts", rank);
        same(recv_per_expert, wanted.counts[rank], "recv_per_expert", rank);
        same(starts, wanted.starts[rank], "starts", rank);
        same(tokens_per_expert, wanted.sent[rank], "tokens_per_expert", rank);
        same(slot_row, wanted.slot_row[rank], "slot_row", rank);
        const std::vector<RowEntry>& right = wanted.list[rank];
        for (u32 r = 0; r < list.size(); ++r) {
            const RowEntry& got = list[r];
            const RowEntry want = r < right.size() ? right[r] : unlisted;
            CHECK(
                std::memcmp(&got, &want, sizeof(got)) == 0,
                "rank %u row %u: %08x slot %u copy of %d score %g, not %08x %u %d %g", rank, r,
                got.source, got.slot, got.copy_of, got.score, want.source, want.slot, want.copy_of,
                want.score);
        }
    }

private:
    static void same(
        const std::vector<i32>& got, const std::vector<i32>& want, const char* what, u32 rank) {
        CHECK(got.size() == want.size(), "%s: %zu, not %zu", what, got.size(), want.size());
        for (u32 i = 0; i < got.size(); ++i)
            CHECK(got[i] == want[i], "rank %u %s[%u]: %d, not %d", rank, what, i, got[i], want[i]);
    }
};

// A call of all ranks.
struct Call {
    std::vector<Routing> routing;
    std::unique_ptr<Wanted> wanted;
    std::vector<std::unique_ptr<RankPlan>> plans;

    Call(const Size& size, const std::vector<u32>& tokens, Arenas& arenas, test::Random& random)
        : Call(size, routings(size, tokens, random), arenas, random) {}

    Call(const Size& size, std::vector<Routing> all, Arenas& arenas, test::Random& random)
        : routing(std::move(all)) {
        wanted = std::make_unique<Wanted>(size, routing);
        for (u32 r = 0; r < size.ranks; ++r) {
            const u32 rows = static_cast<u32>(wanted->list[r].size());
            plans.push_back(std::make_unique<RankPlan>(size, routing[r], arenas, r, rows, random));
        }
    }

private:
    static std::vector<Routing> routings(
        const Size& size, const std::vector<u32>& tokens, test::Random& random) {
        std::vector<Routing> all;
        for (const u32 t : tokens)
            all.emplace_back(size, t, random);
        return all;
    }
};

// That a launch has given up waiting for `peer`.
inline void expect(const FaultRecord& fault, Role role, Wait wait, u32 peer) {
    CHECK(
        fault.code == 1 && fault.role == static_cast<u32>(role) &&
            fault.wait == static_cast<u32>(wait) && fault.peer == peer + 1,
        "code %u: role %u waited for %u of %u, not %u for %u of %u", fault.code, fault.role,
        fault.wait, fault.peer, static_cast<u32>(role), static_cast<u32>(wait), peer + 1);
}

inline bool pulls_from(const Wanted& wanted, u32 rank, u32 peer) {
    for (const RowEntry& entry : wanted.list[rank])
        if (entry.source != comm::kNoRow && entry.source >> 24 == peer) return true;
    return false;
}

// The same where `peer` has never said that its tokens may be read.
inline void expect_not_ready(const FaultRecord& fault, const Wanted& wanted, u32 rank, u32 peer) {
    if (pulls_from(wanted, rank, peer))
        expect(fault, Role::kPull, Wait::kPeerReady, peer);
    else
        expect(fault, Role::kEnd, Wait::kPeerDone, peer);
}

}  // namespace peers
