// SPDX-License-Identifier: Apache-2.0
// benchmarks/tile_lab/lab.cu: one persistent grouped GEMM, instantiated for the candidate anatomies
// and the tile types of the layer, to decide which anatomy the kernels use. Built and driven by
// run.py; ships nowhere.
//
// Forms:      i    producer warpgroup and two math warpgroups that run their own epilogue
//             ii   128 x 192 tiles, parked for a fourth warpgroup that drains them
//             iii  128 x 256 tiles as two n = 128 instructions, parked
// Kernels:    lab_<type>_<form>_c<CTAs of a cluster>(Args), one CTA per SM, tiles from a list.
// Beside:     warps 2-3 can copy memory at the same time, as transport would.
// Waits:      bounded; they fall through, and the results are checked before anything is timed.
#include "tile.cuh"
#include "stages.cuh"
#include "inline.cuh"
#include "parked.cuh"
#include "../../kernels_src/ptx/regs.cuh"

namespace prime::lab {

template <class P>
PK_DEVICE void init_barriers(u32 base) {
    using S = Smem<P>;
    for (int s = 0; s < P::kStages; ++s) {
        ptx::mbarrier_init(base + S::full(s), 1);
        ptx::mbarrier_init(base + S::empty(s), 8 * P::kCluster);
    }
    for (u32 wg = 0; wg < 2; ++wg) {
        for (u32 i = 0; i < 2; ++i)
            ptx::mbarrier_init(base + S::loaded(wg) + 8 * i, 1);
        ptx::mbarrier_init(base + S::drained(wg), 1);
        ptx::mbarrier_init(base + S::parked(wg), 128);
    }
    ptx::mbarrier_init(base + S::second_may_start, 128);
    ptx::fence_mbarrier_init();
}

// Stands in for transport: 64 threads copy `copy_rounds` x 32 KB per CTA while the GEMM runs.
PK_DEVICE void copy_beside(const Args& args) {
    const u32 tid = threadIdx.x - 64;
    const i64 base = static_cast<i64>(blockIdx.x) * args.copy_rounds * 2048 + tid;
    for (i32 i = 0; i < args.copy_rounds * 8; ++i) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v[j] = ptx::ld_nc_v4(args.copy_src + base + i * 256 + j * 64);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            ptx::st_v4(args.copy_dst + base + i * 256 + j * 64, v[j]);
    }
}

template <class P, Type T>
PK_DEVICE void work(const Args& args) {
    extern __shared__ u8 raw[];
    const u32 base = (ptx::smem_addr(raw) + kAlignBytes - 1) & ~(kAlignBytes - 1);
    const u32 wg = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) init_barriers<P>(base);
    if constexpr (P::kCluster > 1) ptx::cluster_sync();
    __syncthreads();
    if (wg == 0) {
        ptx::register_shrink<40>();
        if (threadIdx.x == 0) produce<P, T>(args, base);
        if (threadIdx.x >= 64 && args.copy_rounds > 0) copy_beside(args);
    } else if (wg <= 2) {
        ptx::register_grow<P::kParked ? 200 : 232>();
        if constexpr (P::kParked)
            math_parked<P, T>(args, base, wg - 1);
        else
            math_inline<P, T>(args, base, wg - 1);
    } else if constexpr (P::kParked) {
        ptx::register_shrink<72>();
        drain<P, T>(args, base);
    }
    // A remote arrival or multicast into a CTA that has left faults.
    if constexpr (P::kCluster > 1) ptx::cluster_sync();
}

// What the launcher must know; driver.py reads it from the module.
struct Meta {
    u32 threads, smem, tile_n, cluster;
};

using InlineC1 = Policy<384, 256, 256, 4, false, 1>;
using InlineC2 = Policy<384, 256, 256, 4, false, 2>;
using Inline3C1 = Policy<384, 256, 256, 3, false, 1>;
using Inline3C2 = Policy<384, 256, 256, 3, false, 2>;
using Parked192C2 = Policy<512, 192, 192, 4, true, 2>;
using Parked256C2 = Policy<512, 256, 128, 3, true, 2>;

}  // namespace prime::lab

#define PK_LAB(name, type, P)                                                                   \
    extern "C" __device__ const prime::lab::Meta meta_##name = {                                \
        prime::lab::P::kThreads, prime::lab::Smem<prime::lab::P>::bytes, prime::lab::P::kTileN, \
        prime::lab::P::kCluster};                                                               \
    extern "C" __global__ void __launch_bounds__(prime::lab::P::kThreads, 1)                    \
        lab_##name(const __grid_constant__ prime::lab::Args args) {                             \
        prime::lab::work<prime::lab::P, prime::lab::type>(args);                                \
    }

PK_LAB(g1_i_c2, kG1, InlineC2)
PK_LAB(g1_i_c1, kG1, InlineC1)
PK_LAB(g1_iii_c2, kG1, Parked256C2)
PK_LAB(g2_i_c2, kG2, InlineC2)
PK_LAB(g2_i_c1, kG2, InlineC1)
PK_LAB(g2_ii_c2, kG2, Parked192C2)
PK_LAB(g2_iii_c2, kG2, Parked256C2)
PK_LAB(d2_i_c2, kD2, Inline3C2)
PK_LAB(d2_i_c1, kD2, Inline3C1)
PK_LAB(w_i_c2, kW, InlineC2)
PK_LAB(w_i_c1, kW, InlineC1)
PK_LAB(w_iii_c2, kW, Parked256C2)
PK_LAB(w32_i_c2, kW32, InlineC2)
