// SPDX-License-Identifier: Apache-2.0
// moe/topk_sum.cuh: y[t] = sum over k, ascending, of w[t, k] * slots[t, k], skipping ids of -1.
//
// Layer:      moe (arch-free). Entry pk_topk_sum.
//
// Threads:    one thread per 8 columns of a token; a grid-stride loop over (token, column group).
//
// Numerics:   fp32, one product and one sum rounded separately, k ascending, one rounding to bf16.
//             The same bits as the same loop in plain fp32 code; without weights no product.
#pragma once
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/matrix.cuh"

namespace prime::moe {

struct TopkSumArgs {
    const u8* slots;       // [T, K, H] bf16
    const i32* ids;        // [T, K]; -1: the slot is not read
    const float* weights;  // [T, K], or null: every weight is 1
    u8* y;                 // [T, H] bf16; zeros for a token without any expert
    u32 tokens;
    u32 topk;
    u32 hidden;  // multiple of 8
    u32 reserved;
};

struct TopkSumPolicy {
    u32 threads;
};

template <TopkSumPolicy P>
struct TopkSum {
    using Args = TopkSumArgs;
    static constexpr LaunchShape kLaunch{.threads = P.threads, .min_ctas = 4};
    static constexpr u32 kColumns = 8;  // one 16-byte vector of bf16
    static constexpr u32 kBytes = 2;

    PK_DEVICE static void add(float (&sum)[kColumns], uint4 v, bool weighted, float weight) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float lo = ptx::bf16_lo(words[i]);
            const float hi = ptx::bf16_hi(words[i]);
            sum[2 * i] = __fadd_rn(sum[2 * i], weighted ? __fmul_rn(weight, lo) : lo);
            sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], weighted ? __fmul_rn(weight, hi) : hi);
        }
    }

    PK_DEVICE static void token_columns(const Args& args, u32 token, u32 column) {
        const bool weighted = args.weights != nullptr;
        const u64 first_slot = static_cast<u64>(token) * args.topk;
        float sum[kColumns] = {};
        for (u32 k = 0; k < args.topk; ++k) {
            if (args.ids[first_slot + k] == -1) continue;
            const u64 at = ((first_slot + k) * args.hidden + column) * kBytes;
            const float weight = weighted ? args.weights[first_slot + k] : 1.0f;
            add(sum, ptx::ld_nc_v4(args.slots + at), weighted, weight);
        }
        const uint4 packed{
            ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
            ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
        ptx::st_v4(args.y + (static_cast<u64>(token) * args.hidden + column) * kBytes, packed);
    }

    PK_DEVICE static void run(const Args& args) {
        const u32 groups = args.hidden / kColumns;
        const u64 total = static_cast<u64>(args.tokens) * groups;
        const u64 stride = static_cast<u64>(gridDim.x) * P.threads;
        for (u64 i = static_cast<u64>(blockIdx.x) * P.threads + threadIdx.x; i < total;
             i += stride) {
            const u32 token = static_cast<u32>(i / groups);
            token_columns(
                args, token, static_cast<u32>(i - static_cast<u64>(token) * groups) * kColumns);
        }
    }
};

}  // namespace prime::moe
