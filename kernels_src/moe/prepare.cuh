// SPDX-License-Identifier: Apache-2.0
// moe/prepare.cuh: what the backward's kernels need beside the forward's plan: a score per pool
// row, counters at zero. Entry pk_prepare.
//
// Layer:      moe (arch-free).
#pragma once
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"

namespace prime::moe {

struct PrepareArgs {
    const i32* slot_row;   // [T, K]
    const i32* counts;     // [E]
    const i32* starts;     // [E + 1]
    const float* weights;  // [T, K]
    float* row_score;      // [pool rows]; 0 between experts
    u32* counters;         // [num_counters]
    u32 slots;             // T * K
    u32 num_experts;
    u32 num_counters;
    u32 reserved;
};

struct Prepare {
    using Args = PrepareArgs;
    static constexpr u32 kThreads = 256;
    static constexpr LaunchShape kLaunch{.threads = kThreads, .min_ctas = 4};

    PK_DEVICE static void run(const Args& args) {
        const u32 first = blockIdx.x * kThreads + threadIdx.x;
        const u32 step = gridDim.x * kThreads;
        for (u32 s = first; s < args.slots; s += step) {
            const i32 row = args.slot_row[s];
            if (row >= 0) args.row_score[row] = args.weights[s];
        }
        for (u32 i = first; i < args.num_counters; i += step)
            args.counters[i] = 0;
        for (u32 e = first / 64; e < args.num_experts; e += step / 64) {
            const i32 pad = args.starts[e] + args.counts[e] + static_cast<i32>(first % 64);
            if (pad < args.starts[e + 1]) args.row_score[pad] = 0.0f;
        }
    }
};

}  // namespace prime::moe
