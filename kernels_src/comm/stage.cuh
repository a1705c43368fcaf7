// SPDX-License-Identifier: Apache-2.0
// comm/stage.cuh: copies what peers will read into this rank's arena.
//
// Layer:      comm (arch-free).
#pragma once
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::comm {

// CTA `cta` of `ctas`, of kThreads each, copies its share; bytes are a multiple of 16.
template <u32 kThreads>
PK_DEVICE void stage(u8* dst, const u8* src, u64 bytes, u32 cta, u32 ctas) {
    constexpr u32 kLoads = 4;
    constexpr u64 kStep = kThreads * 16;
    for (u64 at = u64{cta} * kLoads * kStep + threadIdx.x * 16; at < bytes;
         at += u64{ctas} * kLoads * kStep) {
        uint4 held[kLoads];
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i)
            if (at + i * kStep < bytes) held[i] = ptx::ld_nc_v4(src + at + i * kStep);
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i)
            if (at + i * kStep < bytes) ptx::st_v4(dst + at + i * kStep, held[i]);
    }
}

}  // namespace prime::comm
