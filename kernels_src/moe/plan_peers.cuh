// SPDX-License-Identifier: Apache-2.0
// moe/plan_peers.cuh: gives every (token, slot) of this rank its pool row on the rank that holds
// its expert, and tells that rank. Entry pk_plan_peers.
//
// Layer:      moe (arch-free).
//
// Threads:    clusters of eight CTAs of 1,024. The first one plans, as moe/plan.cuh does, with one
//             exchange of counts between counting and placing; any others copy tokens to the arena.
//
// Every rank writes its own rows into the lists of the others, so planning takes as long for many
// ranks as for one.
//
// Invariants: within an expert, rows stand by owner, then by (token, slot): as one rank would have
//             them that had all tokens, so weight gradients have the same bits, too. The same
//             routing gives the same plan, bit for bit. A call counts the epoch up. It ends when
//             every peer's entries are in this rank's list; the tables that the backward needs are
//             then copied out of the arena.
#pragma once
#include "../comm/peers.cuh"
#include "../comm/stage.cuh"
#include "plan.cuh"

namespace prime::moe {

struct PlanPeersArgs {
    PlanArgs plan;         // row_src: not written; num_experts: of all ranks; slot_row: below
    comm::RowEntry* list;  // [pool rows] the rows of this rank's experts, for the launches to come
    const comm::Peers* peers;  // in this rank's arena
    const u8* tokens;          // [T, row_bytes]
    u32 row_bytes;
    u32 reserved;
};

struct PlanPeers {
    using Args = PlanPeersArgs;
    using Tables = Plan::Tables;
    using Range = Plan::Range;
    static constexpr u32 kThreads = Plan::kThreads;
    static constexpr u32 kCtas = Plan::kCtas;
    static_assert(kCtas >= comm::kMaxPeers, "a CTA writes to a peer");
    static constexpr LaunchShape kLaunch{
        .threads = kThreads,
        .smem_bytes = Plan::kLaunch.smem_bytes,
        .cluster = kCtas,
        .min_ctas = 1,
        .protocol = comm::kProtocol};

    static constexpr u32 kRankShift = comm::kRankShift;  // of slot_row; kNoRow: no expert
    static constexpr u32 kGaveUp = ~0u;                  // instead of a CTA's first row of expert 0

    struct Context {
        const Args& args;
        const comm::Peers& peers;
        Tables tables;
        u32 cta;
        u32 rank;
        u32 ranks;
        u32 local;  // experts of a rank
        u32 epoch;  // of this call
    };

    PK_DEVICE static void stage(const Args& args, u32 cta, u32 ctas) {
        const comm::Peers& p = *args.peers;
        u8* dst = reinterpret_cast<u8*>(p.arena[p.rank]) + p.tokens;
        const u64 bytes = static_cast<u64>(args.plan.tokens) * args.row_bytes;
        comm::stage<kThreads>(dst, args.tokens, bytes, cta, ctas);
    }

    PK_DEVICE static i32* counts_at(const comm::Peers& p, u32 owner) {
        return reinterpret_cast<i32*>(p.arena[owner] + p.counts);
    }

    // CTA c tells rank c how many rows of every expert come from here.
    PK_DEVICE static void send_counts(const Context& c) {
        if (c.cta >= c.ranks) return;
        const u32 experts = c.args.plan.num_experts;
        i32* out = counts_at(c.peers, c.cta) + u64{c.rank} * experts;
        for (u32 e = threadIdx.x; e < experts; e += kThreads) {
            u32 sum = 0;
            for (u32 i = 0; i < kCtas; ++i)
                sum += ptx::ld_cluster_u32(c.tables.by_cta + e, i);
            out[e] = static_cast<i32>(sum);
        }
        __syncthreads();
        if (threadIdx.x == 0) comm::tell(c.peers, c.cta, comm::Flag::kCounts, c.epoch);
    }

    // Whether all peers came, the same in all threads of the CTA. If not, this rank's experts get
    // no rows, so that the launches to come find nothing to do.
    PK_DEVICE static bool wait_all(const Context& c, comm::Flag kind, Wait what) {
        comm::PeerWaiter waiter{c.peers, c.args.plan.fault, Role::kPlan};
        if (threadIdx.x < c.ranks) waiter.wait(kind, threadIdx.x, c.epoch, what);
        if (__syncthreads_and(!waiter.dead)) return true;
        drop_rows(c);
        return false;
    }

    PK_DEVICE static void drop_rows(const Context& c) {
        for (u32 e = threadIdx.x; e < c.local; e += kThreads) {
            c.args.plan.counts[e] = 0;
            c.args.plan.starts[e] = c.args.plan.starts[e + 1] = 0;
        }
    }

    // Whether all CTAs have placed and sent their share: a peer may have come when some of them had
    // just given up. The same in the whole cluster; after a cluster_sync.
    PK_DEVICE static bool all_placed(const Context& c) {
        const u32 lane = threadIdx.x & 31;
        const bool missing = lane < kCtas && ptx::ld_cluster_u32(c.tables.next, lane) == kGaveUp;
        return __ballot_sync(~0u, missing) == 0;
    }

    struct Rows {
        u32 all = 0;    // of an expert
        u32 ahead = 0;  // of them, those that stand before this rank's
        u32 mine = 0;
    };

    PK_DEVICE static Rows rows_of(const Context& c, u32 expert) {
        const i32* counts = counts_at(c.peers, c.rank);
        Rows rows;
        for (u32 s = 0; s < c.ranks; ++s) {
            const u32 n = static_cast<u32>(counts[u64{s} * c.args.plan.num_experts + expert]);
            rows.all += n;
            rows.ahead += s < c.rank ? n : 0;
            if (s == c.rank) rows.mine = n;
        }
        return rows;
    }

    // Warp `owner` walks the experts of that rank. next[e]: pool row there of this CTA's first row.
    PK_DEVICE static void place_experts(const Context& c, u32 owner) {
        const u32 lane = threadIdx.x & 31;
        u32 start = 0;
        for (u32 base = 0; base < c.local; base += 32) {
            const bool exists = base + lane < c.local;
            const u32 e = owner * c.local + base + lane;
            const Rows rows = exists ? rows_of(c, e) : Rows{};
            u32 before = rows.ahead;
            for (u32 i = 0; exists && i < c.cta; ++i)
                before += ptx::ld_cluster_u32(c.tables.by_cta + e, i);
            const u32 padded = align_up(rows.all, kPoolAlign);
            u32 end = padded;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 left = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += left;
            }
            end += start;
            if (exists) {
                c.tables.next[e] = end - padded + before;
                if (c.cta == 0) publish(c, e, rows, owner, end - padded, end);
            }
            start = __shfl_sync(~0u, end, 31);
        }
    }

    PK_DEVICE static void publish(
        const Context& c, u32 e, const Rows& rows, u32 owner, u32 start, u32 end) {
        const PlanArgs& plan = c.args.plan;
        plan.tokens_per_expert[e] = static_cast<i32>(rows.mine);
        if (owner != c.rank) return;
        const u32 local = e - owner * c.local;
        plan.counts[local] = static_cast<i32>(rows.all);
        plan.recv_per_expert[local] = static_cast<i32>(rows.all);
        plan.starts[local] = static_cast<i32>(start);
        if (local + 1 == c.local) plan.starts[local + 1] = static_cast<i32>(end);
        comm::RowEntry* list = list_at(c.peers, owner);
        for (u32 row = start + rows.all; row < end; ++row)
            list[row] = comm::RowEntry{comm::kNoRow, 0, -1, 0.0f};
    }

    PK_DEVICE static comm::RowEntry* list_at(const comm::Peers& p, u32 owner) {
        return reinterpret_cast<comm::RowEntry*>(p.arena[owner] + p.rows);
    }

    PK_DEVICE static void place_slots(const Context& c, const Range& range) {
        const PlanArgs& plan = c.args.plan;
        u32* mine = c.tables.by_warp + threadIdx.x / 32 * plan.num_experts;
        u32 bad = 0;
        Plan::for_slots<false>(plan, range, [&](const Plan::Slot& s) {
            const bool named = s.expert < plan.num_experts;
            const u32 row = named ? c.tables.next[s.expert] + mine[s.expert] + s.earlier : 0;
            __syncwarp();
            if (named && s.earlier == 0) mine[s.expert] += s.same;
            if (s.index >= range.end) return;
            const u32 place = s.expert / c.local << kRankShift | row;
            plan.slot_row[s.index] = static_cast<i32>(named ? place : comm::kNoRow);
            bad += !named && Plan::is_bad(plan, s.index);
        });
        if (bad != 0) atomicAdd(&plan.fault->bad_ids, bad);
    }

    // The token's first row on the same rank, if a copy of it may wait for that one.
    PK_DEVICE static i32 first_copy(const Context& c, u32 token, u32 place) {
        const u32 topk = c.args.plan.topk;
        const i32* places = c.args.plan.slot_row + static_cast<u64>(token) * topk;
        u32 first = place;
        for (u32 k = 0; k < topk; ++k) {
            const u32 other = static_cast<u32>(places[k]);
            if (other >> kRankShift == place >> kRankShift) first = min_of(first, other);
        }
        const u32 mask = (1u << kRankShift) - 1;
        const u32 row = first & mask;
        return row / kPoolAlign < (place & mask) / kPoolAlign ? static_cast<i32>(row) : -1;
    }

    PK_DEVICE static void send_rows(const Context& c) {
        const PlanArgs& plan = c.args.plan;
        const u32 slots = plan.tokens * plan.topk;
        for (u32 s = c.cta * kThreads + threadIdx.x; s < slots; s += kCtas * kThreads) {
            const u32 place = static_cast<u32>(plan.slot_row[s]);
            if (place == comm::kNoRow) continue;
            const u32 token = s / plan.topk;
            const u32 row = place & ((1u << kRankShift) - 1);
            const uint4 entry{
                c.rank << 24 | token, s, static_cast<u32>(first_copy(c, token, place)),
                __float_as_uint(plan.weights[s])};
            ptx::st_v4(list_at(c.peers, place >> kRankShift) + row, entry);
        }
    }

    PK_DEVICE static void keep_row(const Args& args, u32 row, const uint4& entry) {
        ptx::st_v4(args.list + row, entry);
        args.plan.row_score[row] = __uint_as_float(entry.w);
    }

    // The complete list, out of the arena, where the next call will write.
    PK_DEVICE static void keep_list(const Context& c) {
        const comm::RowEntry* from = list_at(c.peers, c.rank);
        const u32 rows = static_cast<u32>(c.args.plan.starts[c.local]);
        for (u32 r = c.cta * kThreads + threadIdx.x; r < rows; r += kCtas * kThreads)
            keep_row(c.args, r, ptx::ld_v4(from + r));
    }

    PK_DEVICE static void plan(const Context& c) {
        const Range range = Plan::my_range(c.args.plan, c.tables, c.cta);
        for (u32 i = c.cta * kThreads + threadIdx.x; i < c.args.plan.num_counters;
             i += kCtas * kThreads)
            c.args.plan.counters[i] = 0;
        Plan::count(c.args.plan, c.tables, range);
        ptx::cluster_sync();
        send_counts(c);
        const bool counted = wait_all(c, comm::Flag::kCounts, Wait::kPeerCounts);
        if (counted && threadIdx.x / 32 < c.ranks) place_experts(c, threadIdx.x / 32);
        if (!counted && threadIdx.x == 0) c.tables.next[0] = kGaveUp;
        __syncthreads();
        if (counted) place_slots(c, range);
        // Every slot's place, for the threads that look for a token's first copy.
        ptx::cluster_sync();
        if (counted) send_rows(c);
        ptx::cluster_sync();
        const bool placed = all_placed(c);
        if (threadIdx.x == 0 && placed && c.cta < c.ranks)
            comm::tell(c.peers, c.cta, comm::Flag::kPlaced, c.epoch);
        if (!placed)
            drop_rows(c);
        else if (wait_all(c, comm::Flag::kPlaced, Wait::kPeerRows))
            keep_list(c);
        // After every CTA has read the old one.
        if (threadIdx.x == 0 && c.cta == 0) comm::state_of(c.peers, c.rank)->epoch = c.epoch;
    }

    PK_DEVICE static void run(const Args& args) {
        if (blockIdx.x >= kCtas || gridDim.x == kCtas) {
            const u32 planners = gridDim.x == kCtas ? 0 : kCtas;
            stage(args, blockIdx.x - planners, gridDim.x - planners);
        }
        if (blockIdx.x < kCtas) {
            const comm::Peers& p = *args.peers;
            const u32 ranks = static_cast<u32>(p.size);
            plan(
                Context{
                    args, p, Plan::tables(args.plan), ptx::cluster_cta_rank(),
                    static_cast<u32>(p.rank), ranks, args.plan.num_experts / ranks,
                    comm::epoch_of(p) + 1});
        }
        // The others may still be reading this CTA's counts.
        ptx::cluster_sync();
    }
};

}  // namespace prime::moe
