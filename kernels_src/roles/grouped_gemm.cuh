// SPDX-License-Identifier: Apache-2.0
// roles/grouped_gemm.cuh: the body that every grouped GEMM shares: barriers, roles, registers.
//
// Layer:      roles.
//
// Threads:    384 in clusters of two, persistent. Warp 0 loads (one thread), warp 1 schedules,
//             warps 2-3 pull rows, warpgroups 1 and 2 multiply.
#pragma once
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"
#include "../epilogue/slabs.cuh"
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "load.cuh"
#include "math.cuh"
#include "pull.cuh"
#include "schedule.cuh"

namespace prime::roles {

constexpr u32 kGemmThreads = 384;

template <class Op, u32 kProtocol = 0>
PK_HOST_DEVICE constexpr LaunchShape gemm_launch() {
    return LaunchShape{
        .threads = kGemmThreads,
        .smem_bytes = Op::Smem::kBytes,
        .cluster = kPair,
        .min_ctas = 1,
        .protocol = kProtocol,
        .role_threads = {128, 256},
        .role_registers = {Op::Mma::kLoadRegisters, Op::Mma::kMathRegisters}};
}

template <class Op>
PK_DEVICE void init_barriers(u32 base) {
    using Smem = typename Op::Smem;
    constexpr u32 kMathWarps = 8;
    for (u32 s = 0; s < Op::kStages; ++s) {
        ptx::mbarrier_init(base + Smem::kStageFull + 8 * s, 1);
        ptx::mbarrier_init(base + Smem::kStageEmpty + 8 * s, kPair * kMathWarps);
    }
    for (u32 i = 0; i < pipeline::kTileRingDepth; ++i) {
        ptx::mbarrier_init(base + Smem::kTileFull + 8 * i, 1);
        ptx::mbarrier_init(base + Smem::kTileEmpty + 8 * i, pipeline::kTileReaders);
        ptx::mbarrier_init(base + Smem::kSlabFull + 8 * i, 1);
    }
    // Before the pair's first remote arrival and multicast.
    ptx::fence_mbarrier_init();
}

template <class Op>
PK_DEVICE void grouped_gemm(const typename Op::Args& args) {
    using Smem = typename Op::Smem;
    extern __shared__ u8 dynamic_smem[];
    const u32 base = align_up(ptx::smem_addr(dynamic_smem), layout::kSmemAlign);
    const u32 warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    profile::Timeline::enter(args.fault);
    if (threadIdx.x == 0) init_barriers<Op>(base);
    __syncwarp();
    ptx::cluster_sync();
    const TileRing tiles{base + Smem::kTiles, base + Smem::kTileFull, base + Smem::kTileEmpty};
    if (warpgroup == 0) {
        Op::Mma::take_load_registers();
        const u32 warp = threadIdx.x >> 5;
        if (threadIdx.x == 0) load<Op>(args, base, tiles, make_waiter<Op>(args, Role::kLoad));
        if (warp == 1) Op::schedule(args, tiles, make_waiter<Op>(args, Role::kSchedule));
        if (warp >= 2) Op::pull(args, warp - 2);
    } else {
        Op::Mma::take_math_registers();
        math<Op>(args, base, tiles, warpgroup - 1);
    }
    profile::Timeline::leave(args.fault);
    // A CTA that has left must not be written to: its pair may still release stages here.
    __syncwarp();
    ptx::cluster_sync();
    if constexpr (requires { Op::finish(args); }) Op::finish(args);
}

}  // namespace prime::roles
