// SPDX-License-Identifier: Apache-2.0
// moe/gather_rows.cuh: copies rows of x into pool order: pool[r] = x[row_src[r]], zeros where
// row_src[r] < 0.
//
// Layer:      moe (arch-free). Entry pk_gather_rows.
//
// Threads:    one warp a row, a grid-stride loop over rows; any grid works.
//
// Invariants: every byte of pool is written exactly once, padding rows included.
#pragma once
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::moe {

struct GatherRowsArgs {
    const u8* x;         // [T, row_bytes]
    const i32* row_src;  // [rows] row of x, or negative for padding
    u8* pool;            // [rows, row_bytes]
    u32 rows;
    u32 row_bytes;  // multiple of 16
};

struct GatherRowsPolicy {
    u32 threads;
    u32 loads;  // 16-byte loads that a lane keeps in flight
};

template <GatherRowsPolicy P>
struct GatherRows {
    using Args = GatherRowsArgs;
    static constexpr LaunchShape kLaunch{.threads = P.threads, .min_ctas = 2};
    static constexpr u32 kWarp = 32;
    static constexpr u32 kVector = 16;

    PK_DEVICE static void copy_row(const u8* src, u8* dst, u32 bytes, u32 lane) {
        constexpr u32 kStep = kWarp * kVector;
        for (u32 at = lane * kVector; at < bytes; at += P.loads * kStep) {
            uint4 held[P.loads];
#pragma unroll
            for (u32 i = 0; i < P.loads; ++i)
                if (at + i * kStep < bytes) held[i] = ptx::ld_nc_v4(src + at + i * kStep);
#pragma unroll
            for (u32 i = 0; i < P.loads; ++i)
                if (at + i * kStep < bytes) ptx::st_v4(dst + at + i * kStep, held[i]);
        }
    }

    PK_DEVICE static void zero_row(u8* dst, u32 bytes, u32 lane) {
        for (u32 at = lane * kVector; at < bytes; at += kWarp * kVector)
            ptx::st_v4(dst + at, uint4{0, 0, 0, 0});
    }

    PK_DEVICE static void run(const Args& args) {
        constexpr u32 kWarps = P.threads / kWarp;
        const u32 lane = threadIdx.x % kWarp;
        for (u32 row = blockIdx.x * kWarps + threadIdx.x / kWarp; row < args.rows;
             row += gridDim.x * kWarps) {
            const i32 src = args.row_src[row];
            u8* dst = args.pool + static_cast<u64>(row) * args.row_bytes;
            if (src < 0)
                zero_row(dst, args.row_bytes, lane);
            else
                copy_row(
                    args.x + static_cast<u64>(src) * args.row_bytes, dst, args.row_bytes, lane);
        }
    }
};

}  // namespace prime::moe
