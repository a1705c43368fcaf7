// SPDX-License-Identifier: Apache-2.0
// moe/combine.cuh: y[t] = sum over slots k, ascending, of pool[slot_row[t, k]]; in the backward
// also the scores' gradients. Entry pk_combine.
//
// Layer:      moe (arch-free).
//
// Threads:    256, any number of CTAs; a thread per 8 columns of a token.
//
// Numerics:   fp32 sums in slot order, one rounding to bf16; zeros for a token without any expert.
//             The same bits on every run, whatever the grid.
#pragma once
#include "../comm/peers.cuh"
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/matrix.cuh"

namespace prime::moe {

struct CombineArgs {
    const u8* pool;            // [pool rows, H] bf16, already scaled by the scores
    const u8* results;         // [T, K, H] bf16: rows that peers sent; null where there are none
    const i32* slot_row;       // [T, K] pool row; among peers rank << 28 | row; -1: no expert
    u8* y;                     // [T, H] bf16, or null: only scores
    const float* score_parts;  // [pool rows, parts], or null
    float* dscore;             // [T, K]; 0 where there is no expert
    u32 tokens;
    u32 topk;
    u32 hidden;  // multiple of 8
    u32 parts;
    u32 rank;           // of this rank among its peers: whose rows are in the pool
    u32 parts_by_slot;  // 1: score_parts is [T K, parts]
};

struct Combine {
    using Args = CombineArgs;
    static constexpr u32 kThreads = 256;
    static constexpr u32 kColumns = 8;
    static constexpr u32 kLoads = 8;  // rows in flight per thread
    static constexpr LaunchShape kLaunch{.threads = kThreads, .min_ctas = 3};

    PK_DEVICE static void add(float (&sum)[kColumns], const uint4& v) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] += ptx::bf16_lo(words[i]);
            sum[2 * i + 1] += ptx::bf16_hi(words[i]);
        }
    }

    PK_DEVICE static const bf16* row_at(const Args& args, i32 place, u32 slot) {
        const u32 mask = args.results == nullptr ? ~0u : (1u << comm::kRankShift) - 1;
        const u32 row = static_cast<u32>(place) & mask;
        const bool here = row == static_cast<u32>(place) - (args.rank << comm::kRankShift);
        const u8* rows = here ? args.pool : args.results;
        return reinterpret_cast<const bf16*>(rows) +
               static_cast<u64>(here ? row : slot) * args.hidden;
    }

    PK_DEVICE static void sum_columns(const Args& args, u32 token, u32 column) {
        const i32* rows = args.slot_row + static_cast<u64>(token) * args.topk;
        float sum[kColumns] = {};
        for (u32 k0 = 0; k0 < args.topk; k0 += kLoads) {
            uint4 held[kLoads];
            u32 named = 0;
#pragma unroll
            for (u32 i = 0; i < kLoads; ++i) {
                const i32 place = k0 + i < args.topk ? rows[k0 + i] : -1;
                if (place < 0) continue;
                named |= 1u << i;
                held[i] = ptx::ld_nc_v4(row_at(args, place, token * args.topk + k0 + i) + column);
            }
#pragma unroll
            for (u32 i = 0; i < kLoads; ++i)
                if (named >> i & 1) add(sum, held[i]);
        }
        const uint4 packed{
            ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
            ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
        ptx::st_v4(
            args.y + (static_cast<u64>(token) * args.hidden + column) * sizeof(bf16), packed);
    }

    PK_DEVICE static void sum_scores(const Args& args) {
        const u32 slots = args.tokens * args.topk;
        for (u32 s = blockIdx.x * kThreads + threadIdx.x; s < slots; s += gridDim.x * kThreads) {
            const i32 place = args.slot_row[s];
            const u32 row = static_cast<u32>(place);
            float sum = 0.0f;
            for (u32 p = 0; place >= 0 && p < args.parts; ++p)
                sum += args.score_parts[u64{args.parts_by_slot ? s : row} * args.parts + p];
            args.dscore[s] = sum;
        }
    }

    PK_DEVICE static void run(const Args& args) {
        if (args.score_parts != nullptr) sum_scores(args);
        if (args.y == nullptr) return;
        const u32 groups = args.hidden / kColumns;
        const u64 total = static_cast<u64>(args.tokens) * groups;
        const u64 stride = static_cast<u64>(gridDim.x) * kThreads;
        for (u64 i = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x; i < total;
             i += stride) {
            const u32 token = static_cast<u32>(i / groups);
            sum_columns(args, token, (static_cast<u32>(i) - token * groups) * kColumns);
        }
    }
};

}  // namespace prime::moe
