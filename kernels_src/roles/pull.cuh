// SPDX-License-Identifier: Apache-2.0
// roles/pull.cuh: warps that copy token rows into pool order while the others multiply.
//
// Layer:      roles (arch-free). Two warps of every CTA, converged; they wait for nothing.
//
// Invariants: rows are copied in pool order, which is the order in which tiles ask for them. Every
//             64 rows have a counter that reaches 64 when all of them, zeroed padding included, may
//             be read by TMA.
#pragma once
#include "../common/types.cuh"
#include "../profile/timeline.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::roles {

constexpr u32 kPullWarps = 2;
constexpr u32 kPullRows = 8;      // rows of one publication
constexpr u32 kArrivalRows = 64;  // rows of one counter

struct PullList {
    const u8* src;       // [T, row_bytes], or null: nothing to pull
    u8* dst;             // [pool rows, row_bytes]
    const i32* row_src;  // [pool rows] token, -1: padding
    u32* arrivals;       // [pool rows / 64], or null: nobody waits inside this kernel
    u32 row_bytes;
    u32 rows;  // of the pool that are in use, multiple of 64
    profile::Timeline timeline{nullptr};
};

// Copies two rows at once: 16 loads of 16 bytes per lane in flight, which is what it takes to hide
// the memory's latency with two warps per SM (8 KB a warp; with 2 KB the copies reached 350 GB/s on
// an H200). A source of null is a row of zeros. kShared: a source may have been written since this
// launch began.
template <bool kShared, u32 kLoads = 8>
PK_DEVICE void copy_two(u8* dst, u8* dst_b, const u8* a, const u8* b, u32 bytes, u32 lane) {
    constexpr u32 kStep = 32 * 16;
    const bool has_a = a != nullptr;
    const bool has_b = b != nullptr;
    const auto load = [](bool exists, const u8* at) {
        if (!exists) return uint4{0, 0, 0, 0};
        return kShared ? ptx::ld_v4(at) : ptx::ld_nc_v4(at);
    };
    a += lane * 16;
    b += lane * 16;
    dst += lane * 16;
    dst_b += lane * 16;
    for (; bytes >= kLoads * kStep; bytes -= kLoads * kStep) {
        uint4 held[2][kLoads];
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) {
            held[0][i] = load(has_a, a + i * kStep);
            held[1][i] = load(has_b, b + i * kStep);
        }
#pragma unroll
        for (u32 i = 0; i < kLoads; ++i) {
            ptx::st_v4(dst + i * kStep, held[0][i]);
            ptx::st_v4(dst_b + i * kStep, held[1][i]);
        }
        a += kLoads * kStep;
        b += kLoads * kStep;
        dst += kLoads * kStep;
        dst_b += kLoads * kStep;
    }
    for (u32 at = 0; at + lane * 16 < bytes; at += kStep) {
        ptx::st_v4(dst + at, load(has_a, a + at));
        ptx::st_v4(dst_b + at, load(has_b, b + at));
    }
}

PK_DEVICE void pull(const PullList& list, u32 pull_warp) {
    profile::Timeline timeline = list.timeline;
    const u32 lane = threadIdx.x & 31;
    const u32 stride = gridDim.x * kPullWarps * kPullRows;
    const u32 first = (pull_warp * gridDim.x + blockIdx.x) * kPullRows;
    for (u32 row = first; row < list.rows; row += stride) {
        const u32 timeline_begin = timeline.now();
        const i32 mine = lane < kPullRows ? list.row_src[row + lane] : -1;
        for (u32 i = 0; i < kPullRows; i += 2) {
            const auto source = [&](u32 r) {
                const i32 token = __shfl_sync(~0u, mine, r);
                return token < 0 ? nullptr : list.src + static_cast<u64>(token) * list.row_bytes;
            };
            const u8* a = source(i);
            const u8* b = source(i + 1);
            u8* dst = list.dst + static_cast<u64>(row + i) * list.row_bytes;
            copy_two<false>(dst, dst + list.row_bytes, a, b, list.row_bytes, lane);
        }
        if (list.arrivals == nullptr) timeline.end_copy(timeline_begin, row);
        if (list.arrivals == nullptr) continue;
        // Each lane's plain stores before the TMA loads of whoever sees the counter.
        ptx::fence_async_global();
        __syncwarp();
        if (lane == 0) ptx::red_add_release_gpu(list.arrivals + row / kArrivalRows, kPullRows);
        timeline.end_copy(timeline_begin, row);
    }
}

}  // namespace prime::roles
