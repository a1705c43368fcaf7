// SPDX-License-Identifier: Apache-2.0
// moe/dispatch.cuh: places every (token, slot) in the pool, rows grouped by expert, and copies x
// there. Entry pk_dispatch.
//
// Layer:      moe (arch-free).
//
// Threads:    1,024, one CTA per SM, any number of CTAs: each counts all ids (order-free
// shared-memory atomics), so that no
//             CTA waits for another, then places and copies its own share of the tokens.
//
// Invariants: within an expert, rows stand in (token, slot) order: the same routing gives the same
// pool, bit for bit,
//             whatever the grid. Experts start at multiples of 64 rows; rows between them are zero.
#pragma once
#include "../common/fault.cuh"
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "token_rows.cuh"

namespace prime::moe {

struct DispatchArgs {
    const u8* ids;           // [T, K] int32 or int64
    const float* weights;    // [T, K]
    const u8* x;             // [T, row_bytes]
    u8* pool;                // [pool rows, row_bytes]
    i32* counts;             // [E] rows per expert
    i32* starts;             // [E + 1] first row per expert
    i32* slot_row;           // [T, K] pool row, -1: no expert
    i32* tokens_per_expert;  // [E] the counts again, for the caller
    i32* recv_per_expert;    // [E] and as the receiver sees them
    float* row_score;        // [pool rows]; 0 between experts
    FaultRecord* fault;      // counts ids that name no expert
    u32 tokens;
    u32 topk;
    u32 num_experts;
    u32 row_bytes;
    u32 wide_ids;  // 1: ids are int64
    u32 reserved;
};

struct Dispatch {
    using Args = DispatchArgs;
    static constexpr u32 kThreads = 1024;
    static constexpr u32 kMaxExperts = 4096;
    static constexpr LaunchShape kLaunch{
        .threads = kThreads, .smem_bytes = 2 * kMaxExperts * sizeof(u32), .min_ctas = 1};

    struct Share {
        u32 first_token;
        u32 end_token;
    };

    PK_DEVICE static Share my_share(const Args& args) {
        const u32 each = ceil_div(args.tokens, gridDim.x);
        const u32 first = min_of(blockIdx.x * each, args.tokens);
        return {first, min_of(first + each, args.tokens)};
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

    // before[e]: rows of e in earlier CTAs' shares; rest[e]: all other rows of e.
    PK_DEVICE static void count(const Args& args, u32 first_slot, u32* before, u32* rest) {
        const u32 total = args.tokens * args.topk;
        for (u32 e = threadIdx.x; e < args.num_experts; e += kThreads)
            before[e] = rest[e] = 0;
        __syncthreads();
        constexpr u32 kUnroll = 8;
        for (u32 base = threadIdx.x; base < total; base += kUnroll * kThreads) {
            u32 expert[kUnroll];
#pragma unroll
            for (u32 i = 0; i < kUnroll; ++i) {
                const u32 slot = base + i * kThreads;
                expert[i] = slot < total ? expert_of(args, slot) : args.num_experts;
            }
#pragma unroll
            for (u32 i = 0; i < kUnroll; ++i) {
                if (expert[i] == args.num_experts) continue;
                atomicAdd((base + i * kThreads < first_slot ? before : rest) + expert[i], 1u);
            }
        }
        __syncthreads();
    }

    // Turns before[e] into the pool row of this share's first row of e, rest[e] into the rows of e.
    // First warp.
    PK_DEVICE static void place_experts(const Args& args, u32* before, u32* rest) {
        const u32 lane = threadIdx.x & 31;
        u32 start = 0;
        for (u32 base = 0; base < args.num_experts; base += 32) {
            const u32 e = base + lane;
            const u32 ahead = e < args.num_experts ? before[e] : 0;
            const u32 rows = e < args.num_experts ? ahead + rest[e] : 0;
            u32 end = align_up(rows, kPoolAlign);
            const u32 padded = end;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u32 left = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += left;
            }
            end += start;
            if (e < args.num_experts) {
                before[e] = end - padded + ahead;
                rest[e] = rows;
                if (blockIdx.x == 0) {
                    args.counts[e] = static_cast<i32>(rows);
                    args.tokens_per_expert[e] = static_cast<i32>(rows);
                    args.recv_per_expert[e] = static_cast<i32>(rows);
                    args.starts[e] = static_cast<i32>(end - padded);
                    if (e + 1 == args.num_experts) args.starts[e + 1] = static_cast<i32>(end);
                }
            }
            start = __shfl_sync(~0u, end, 31);
        }
    }

    // Gives this share's slots their rows, in order. First warp; next[e] is the next row of e.
    PK_DEVICE static void place_slots(const Args& args, const Share& share, u32* next) {
        const u32 lane = threadIdx.x & 31;
        const u32 end = share.end_token * args.topk;
        u32 bad = 0;
        for (u32 base = share.first_token * args.topk; base < end; base += 32) {
            const u32 slot = base + lane;
            const u32 expert = slot < end ? expert_of(args, slot) : args.num_experts;
            const bool named = expert < args.num_experts;
            const u32 peers = __match_any_sync(~0u, expert);
            const u32 earlier = __popc(peers & ((1u << lane) - 1));
            const u32 row = named ? next[expert] + earlier : 0;
            __syncwarp();
            if (named && earlier == 0) next[expert] += __popc(peers);
            __syncwarp();
            if (slot >= end) continue;
            args.slot_row[slot] = named ? static_cast<i32>(row) : -1;
            if (named) args.row_score[row] = args.weights[slot];
            bad += !named && is_bad(args, slot);
        }
        if (bad != 0) atomicAdd(&args.fault->bad_ids, bad);
    }

    PK_DEVICE static void run(const Args& args) {
        extern __shared__ u32 tables[];
        u32* before = tables;
        u32* rest = tables + args.num_experts;
        const Share share = my_share(args);
        const u32 warp = threadIdx.x / 32;
        const u32 lane = threadIdx.x & 31;
        count(args, share.first_token * args.topk, before, rest);
        if (warp == 0) {
            place_experts(args, before, rest);
            __syncwarp();
            // The pads are computed from rest[] below; before[] is consumed here.
            place_slots(args, share, before);
        }
        __syncthreads();
        const RowCopy copy{args.x, args.pool};
        for (u32 t = share.first_token + warp; t < share.end_token; t += kThreads / 32) {
            const i32 row = lane < args.topk ? args.slot_row[t * args.topk + lane] : -1;
            copy_to_slots(copy, t, row, args.topk, args.row_bytes);
        }
        clear_pads(args, rest);
    }

    // Expert e's pad rows are cleared by CTA e mod grid.
    PK_DEVICE static void clear_pads(const Args& args, const u32* rows) {
        u32 start = 0;
        for (u32 e = 0; e < args.num_experts; ++e) {
            const u32 first = start + rows[e];
            start += align_up(rows[e], kPoolAlign);
            if (e % gridDim.x != blockIdx.x || first == start) continue;
            clear_rows(args.pool, first, start, args.row_bytes);
            for (u32 r = first + threadIdx.x; r < start; r += kThreads)
                args.row_score[r] = 0.0f;
        }
    }
};

}  // namespace prime::moe
