// SPDX-License-Identifier: Apache-2.0
// moe/replay.cuh: the backward's dispatch: copies dy (and x) to the pool rows that the forward's
// plan gave. Entry pk_replay.
//
// Layer:      moe (arch-free).
//
// Threads:    512, any number of CTAs; a warp per token.
#pragma once
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "token_rows.cuh"

namespace prime::moe {

struct ReplayArgs {
    const u8* dy;  // [T, row_bytes]
    const u8* x;   // [T, row_bytes], or null: only dy
    u8* dy_pool;   // [pool rows, row_bytes]
    u8* x_pool;
    const i32* slot_row;   // [T, K]
    const i32* counts;     // [E]
    const i32* starts;     // [E + 1]
    const float* weights;  // [T, K]
    float* row_score;      // [pool rows]
    u32 tokens;
    u32 topk;
    u32 num_experts;
    u32 row_bytes;
};

struct Replay {
    using Args = ReplayArgs;
    static constexpr u32 kThreads = 512;
    static constexpr LaunchShape kLaunch{.threads = kThreads, .min_ctas = 1};

    PK_DEVICE static void run(const Args& args) {
        const u32 lane = threadIdx.x & 31;
        const u32 warps = gridDim.x * (kThreads / 32);
        for (u32 t = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; t < args.tokens; t += warps) {
            const u32 slot = t * args.topk + lane;
            const i32 row = lane < args.topk ? args.slot_row[slot] : -1;
            if (row >= 0) args.row_score[row] = args.weights[slot];
            copy_to_slots({args.dy, args.dy_pool}, t, row, args.topk, args.row_bytes);
            if (args.x != nullptr)
                copy_to_slots({args.x, args.x_pool}, t, row, args.topk, args.row_bytes);
        }
        for (u32 e = blockIdx.x; e < args.num_experts; e += gridDim.x)
            clear_pads(args, e);
    }

    PK_DEVICE static void clear_pads(const Args& args, u32 expert) {
        const u32 first = args.starts[expert] + args.counts[expert];
        const u32 end = args.starts[expert + 1];
        if (first == end) return;
        clear_rows(args.dy_pool, first, end, args.row_bytes);
        if (args.x != nullptr) clear_rows(args.x_pool, first, end, args.row_bytes);
        for (u32 r = first + threadIdx.x; r < end; r += kThreads)
            args.row_score[r] = 0.0f;
    }
};

}  // namespace prime::moe
