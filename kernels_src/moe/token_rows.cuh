// SPDX-License-Identifier: Apache-2.0
// moe/token_rows.cuh: copying a token's row to the pool rows of its experts, and clearing the rows
// between experts.
//
// Layer:      moe (arch-free). Warps, converged.
#pragma once
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::moe {

constexpr u32 kVectorBytes = 16;
constexpr u32 kPoolAlign =
    64;  // first rows of experts: one half of an m-block, one step of a weight gradient

// One source and its pool: [T, row_bytes] -> [pool rows, row_bytes].
struct RowCopy {
    const u8* tokens;
    u8* pool;
};

// Reads the row once and writes it once per slot. `my_row`: lane k holds the pool row of slot k, or
// -1.
PK_DEVICE void copy_to_slots(const RowCopy& copy, u32 token, i32 my_row, u32 topk, u32 row_bytes) {
    constexpr u32 kLoads = 8;  // 16-byte loads in flight per lane
    constexpr u32 kStep = 32 * kVectorBytes;
    const u32 lane = threadIdx.x & 31;
    const u8* src = copy.tokens + static_cast<u64>(token) * row_bytes;
    for (u32 at = lane * kVectorBytes; at - lane * kVectorBytes < row_bytes; at += kLoads * kStep) {
        uint4 held[kLoads];
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i)
            if (at + i * kStep < row_bytes) held[i] = ptx::ld_nc_v4(src + at + i * kStep);
        for (u32 k = 0; k < topk; ++k) {
            const i32 row = __shfl_sync(~0u, my_row, k);
            if (row < 0) continue;
            u8* dst = copy.pool + static_cast<u64>(row) * row_bytes + at;
#pragma unroll
            for (u32 i = 0; i < kLoads; ++i)
                if (at + i * kStep < row_bytes) ptx::st_v4(dst + i * kStep, held[i]);
        }
    }
}

// Zeros rows [first, end) of a pool; the whole CTA.
PK_DEVICE void clear_rows(u8* pool, u32 first, u32 end, u32 row_bytes) {
    u8* at = pool + static_cast<u64>(first) * row_bytes;
    const u64 bytes = static_cast<u64>(end - first) * row_bytes;
    for (u64 i = threadIdx.x * kVectorBytes; i < bytes; i += blockDim.x * kVectorBytes)
        ptx::st_v4(at + i, uint4{0, 0, 0, 0});
}

}  // namespace prime::moe
