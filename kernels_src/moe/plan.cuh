// SPDX-License-Identifier: Apache-2.0
// moe/plan.cuh: gives every (token, slot) its pool row, rows grouped by expert. Entry pk_plan.
//
// Layer:      moe (arch-free).
//
// Threads:    one cluster of eight CTAs of 1,024. Every warp owns a contiguous range of slots: it
//             counts them per expert, prefix sums over warps and CTAs turn the counts into first
//             rows, and it walks its range again to place them.
//
// Invariants: within an expert, rows stand in (token, slot) order: no atomics decide an order, so
//             the same routing gives the same plan, bit for bit. Experts start at multiples of 64
//             rows; rows between them have row_src -1, score 0.
#pragma once
#include "../common/fault.cuh"
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::moe {

constexpr u32 kPoolAlign = 64;  // half an m-block, one step of a weight gradient

struct PlanArgs {
    const u8* ids;           // [T, K] int32 or int64
    const float* weights;    // [T, K]
    i32* counts;             // [E] rows per expert
    i32* starts;             // [E + 1] first row per expert
    i32* slot_row;           // [T, K] pool row, -1: no expert
    i32* row_src;            // [pool rows] token of the row, -1: padding
    i32* tokens_per_expert;  // [E] the counts again, for the caller
    i32* recv_per_expert;    // [E] and as the receiver sees them
    float* row_score;        // [pool rows]
    u32* counters;           // [num_counters] set to 0 for the kernels that follow
    FaultRecord* fault;      // counts ids that name no expert
    u32 tokens;
    u32 topk;
    u32 num_experts;
    u32 num_counters;
    u32 pool_rows;
    u32 wide_ids;  // 1: ids are int64
};

struct Plan {
    using Args = PlanArgs;
    static constexpr u32 kThreads = 1024;
    static constexpr u32 kCtas = 8;
    static constexpr u32 kMaxExperts = 4096;
    static constexpr u32 kTableBytes = 128 * 1024;  // 32 warps x 1,024 experts, or 8 x 4,096
    static constexpr LaunchShape kLaunch{
        .threads = kThreads,
        .smem_bytes = kTableBytes + 2 * kMaxExperts * sizeof(u32),
        .cluster = kCtas,
        .min_ctas = 1};

    struct Range {
        u32 first;
        u32 end;
    };

    // Shared memory: per-warp counts [warps][E], this CTA's counts [E], first rows [E].
    struct Tables {
        u32* by_warp;
        u32* by_cta;
        u32* next;
        u32 warps;  // that own slots
    };

    PK_DEVICE static Tables tables(const Args& args) {
        u32* base = ptx::dynamic_smem_words();
        const u32 fit = kTableBytes / sizeof(u32) / max_of(args.num_experts, 1u);
        u32* by_cta = base + kTableBytes / sizeof(u32);
        return {base, by_cta, by_cta + kMaxExperts, min_of(fit, kThreads / 32)};
    }

    PK_DEVICE static Range my_range(const Args& args, const Tables& t, u32 cta) {
        const u32 total = args.tokens * args.topk;
        const u32 each = align_up(ceil_div(total, kCtas * t.warps), 32u);
        const u32 first = (cta * t.warps + threadIdx.x / 32) * each;
        if (threadIdx.x / 32 >= t.warps) return {0, 0};
        return {min_of(first, total), min_of(first + each, total)};
    }

    // The expert of a slot, or num_experts when it has none.
    PK_DEVICE static u32 expert_of(const Args& args, u32 slot) {
        if (args.wide_ids) {
            const i64 id = reinterpret_cast<const i64*>(args.ids)[slot];
            return id < 0 || id >= args.num_experts ? args.num_experts : static_cast<u32>(id);
        }
        const i32 id = reinterpret_cast<const i32*>(args.ids)[slot];
        return min_of(static_cast<u32>(id), args.num_experts);
    }

    PK_DEVICE static bool is_bad(const Args& args, u32 slot) {
        const i64 id = args.wide_ids ? reinterpret_cast<const i64*>(args.ids)[slot]
                                     : reinterpret_cast<const i32*>(args.ids)[slot];
        return id < -1 || id >= args.num_experts;
    }

    struct Slot {
        u32 index;    // at or past the range's end: no slot
        u32 expert;   // num_experts: none
        u32 earlier;  // lanes before mine with the same expert
        u32 same;     // lanes with it
        float weight;
    };

    // Calls fn(Slot) for 32 slots at a time. Memory is asked for four groups ahead: one group at a
    // time would wait for it every time.
    template <bool kWeights, class Fn>
    PK_DEVICE static void for_slots(const Args& args, const Range& range, Fn fn) {
        constexpr u32 kAhead = 4;
        const u32 lane = threadIdx.x & 31;
        for (u32 base = range.first; base < range.end; base += 32 * kAhead) {
            u32 expert[kAhead];
            float weight[kAhead];
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                const u32 slot = base + i * 32 + lane;
                expert[i] = slot < range.end ? expert_of(args, slot) : args.num_experts;
                weight[i] = kWeights && slot < range.end ? args.weights[slot] : 0.0f;
            }
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                const u32 peers = __match_any_sync(~0u, expert[i]);
                const u32 earlier = __popc(peers & ((1u << lane) - 1));
                fn(Slot{
                    base + i * 32 + lane, expert[i], earlier, static_cast<u32>(__popc(peers)),
                    weight[i]});
                __syncwarp();
            }
        }
    }

    PK_DEVICE static void count(const Args& args, const Tables& t, const Range& range) {
        u32* mine = t.by_warp + threadIdx.x / 32 * args.num_experts;
        for (u32 i = threadIdx.x; i < t.warps * args.num_experts; i += kThreads)
            t.by_warp[i] = 0;
        __syncthreads();
        for_slots<false>(args, range, [&](const Slot& s) {
            if (s.expert < args.num_experts && s.earlier == 0) mine[s.expert] += s.same;
        });
        __syncthreads();
        // Counts per warp become rows of earlier warps.
        for (u32 e = threadIdx.x; e < args.num_experts; e += kThreads) {
            u32 sum = 0;
            for (u32 w = 0; w < t.warps; ++w) {
                const u32 rows = t.by_warp[w * args.num_experts + e];
                t.by_warp[w * args.num_experts + e] = sum;
                sum += rows;
            }
            t.by_cta[e] = sum;
        }
    }

    // next[e]: pool row of this CTA's first row of e. First warp; writes the tables of the plan
    // from CTA 0.
    PK_DEVICE static void place_experts(const Args& args, const Tables& t, u32 cta) {
        const u32 lane = threadIdx.x & 31;
        u32 start = 0;
        for (u32 base = 0; base < args.num_experts; base += 32) {
            const u32 e = base + lane;
            // All asked for before any is added up: each takes as long as all.
            u32 part[kCtas];
#pragma unroll
            for (u32 c = 0; c < kCtas; ++c)
                part[c] = e < args.num_experts ? ptx::ld_cluster_u32(t.by_cta + e, c) : 0;
            u32 before = 0;
            u32 rows = 0;
#pragma unroll
            for (u32 c = 0; c < kCtas; ++c) {
                before += c < cta ? part[c] : 0;
                rows += part[c];
            }
            const u32 padded = align_up(rows, kPoolAlign);
            u32 end = padded;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 left = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += left;
            }
            end += start;
            if (e < args.num_experts) {
                t.next[e] = end - padded + before;
                if (cta == 0) publish(args, e, rows, end - padded, end);
            }
            start = __shfl_sync(~0u, end, 31);
        }
    }

    PK_DEVICE static void publish(const Args& args, u32 e, u32 rows, u32 start, u32 end) {
        args.counts[e] = static_cast<i32>(rows);
        args.tokens_per_expert[e] = static_cast<i32>(rows);
        args.recv_per_expert[e] = static_cast<i32>(rows);
        args.starts[e] = static_cast<i32>(start);
        if (e + 1 == args.num_experts) args.starts[e + 1] = static_cast<i32>(end);
    }

    PK_DEVICE static void place_slots(const Args& args, const Tables& t, const Range& range) {
        u32* mine = t.by_warp + threadIdx.x / 32 * args.num_experts;
        u32 bad = 0;
        for_slots<true>(args, range, [&](const Slot& s) {
            const bool named = s.expert < args.num_experts;
            const u32 row = named ? t.next[s.expert] + mine[s.expert] + s.earlier : 0;
            __syncwarp();
            if (named && s.earlier == 0) mine[s.expert] += s.same;
            if (s.index >= range.end) return;
            args.slot_row[s.index] = named ? static_cast<i32>(row) : -1;
            if (named) {
                args.row_src[row] = static_cast<i32>(s.index / args.topk);
                args.row_score[row] = s.weight;
            }
            bad += !named && is_bad(args, s.index);
        });
        if (bad != 0) atomicAdd(&args.fault->bad_ids, bad);
    }

    PK_DEVICE static void run(const Args& args) {
        const Tables t = tables(args);
        const u32 cta = ptx::cluster_cta_rank();
        const Range range = my_range(args, t, cta);
        const u32 first = cta * kThreads + threadIdx.x;
        for (u32 i = first; i < args.num_counters; i += kCtas * kThreads)
            args.counters[i] = 0;
        // Every row is padding until it is placed, which comes after the cluster's barrier.
        for (u32 r = first; r < args.pool_rows; r += kCtas * kThreads) {
            args.row_src[r] = -1;
            args.row_score[r] = 0.0f;
        }
        count(args, t, range);
        ptx::cluster_sync();
        if (threadIdx.x < 32) place_experts(args, t, cta);
        __syncthreads();
        place_slots(args, t, range);
        // The others may still be reading this CTA's counts.
        ptx::cluster_sync();
    }
};

}  // namespace prime::moe
