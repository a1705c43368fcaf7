// SPDX-License-Identifier: Apache-2.0
// benchmarks/tile_lab/stages.cuh: the ring of operand stages: the thread that loads them and the
// warpgroups that multiply them.
#pragma once
#include "../../kernels_src/mma/descriptor.cuh"
#include "../../kernels_src/pipeline/ring.cuh"
#include "../../kernels_src/ptx/tma.cuh"
#include "../../kernels_src/ptx/wgmma.cuh"
#include "tile.cuh"

namespace prime::lab {

template <class P, Type T>
PK_DEVICE void load_a(const Args& args, u32 dst, u32 bar, const Tile& t, i32 k) {
    if constexpr (is_wgrad(T))
        ptx::tma_load_4d(dst, &args.a, bar, 0, t.k0 + k, t.m / 64, 0, ptx::kEvictNormal);
    else
        ptx::tma_load_2d(dst, &args.a, bar, k, t.m, ptx::kEvictNormal);
}

template <class P, Type T>
PK_DEVICE void load_b(
    const Args& args, u32 dst, u32 bar, const Tile& t, i32 k, u32 half, bool multicast) {
    const i32 n = t.n + static_cast<i32>(half) * (P::kTileN / 2);
    i32 c0 = k, c1 = n, c2 = 0, c3 = t.expert;
    if constexpr (T == kG1) {  // gate columns, then the up columns of the same place
        c1 = t.n;
        c2 = static_cast<i32>(half);
    } else if constexpr (T == kD2) {
        c0 = 0, c1 = k, c2 = n / 64;
    } else if constexpr (is_wgrad(T)) {
        c0 = 0, c1 = t.k0 + k, c2 = n / 64, c3 = 0;
    }
    const u32 at = dst + half * (P::kBBytes / 2);
    if (multicast)
        ptx::tma_load_4d_multicast(at, &args.b, bar, c0, c1, c2, c3, 3, ptx::kEvictNormal);
    else
        ptx::tma_load_4d(at, &args.b, bar, c0, c1, c2, c3, ptx::kEvictNormal);
}

// One thread. Of a B that the pair shares, each CTA loads its half for both.
template <class P, Type T>
PK_DEVICE void produce(const Args& args, u32 base) {
    using S = Smem<P>;
    pipeline::Ring<P::kStages> ring;
    const u32 rank = P::kCluster == 1 ? 0 : ptx::cluster_cta_rank();
    for (Walk<P> walk(args); walk.more(); walk.next()) {
        const Tile t = walk.tile();
        const bool multicast = P::kCluster == 2 && t.multicast;
        for (i32 k = 0; k < t.k_steps; ++k, ring.advance()) {
            wait(base + S::empty(ring.stage), ring.phase ^ 1);
            const u32 bar = base + S::full(ring.stage);
            ptx::mbarrier_arrive_expect_tx(bar, P::kABytes + P::kBBytes);
            load_a<P, T>(args, base + S::a(ring.stage), bar, t, k * 64);
            for (u32 half = 0; half < 2; ++half)
                if (!multicast || half == rank)
                    load_b<P, T>(args, base + S::b(ring.stage), bar, t, k * 64, half, multicast);
        }
    }
    // The ring must be drained before this CTA's shared memory goes away.
    for (int s = 0; s < P::kStages; ++s, ring.advance())
        wait(base + S::empty(ring.stage), ring.phase ^ 1);
}

// One lane a CTA of the cluster: the partner's loads write into this CTA's stages too.
template <class P>
PK_DEVICE void release(u32 bar) {
    const u32 lane = threadIdx.x & 31;
    if constexpr (P::kCluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(bar);
    } else {
        if (lane < P::kCluster) ptx::mbarrier_arrive_remote(bar, lane);
    }
}

template <class P, Type T>
PK_DEVICE void multiply(float (&acc)[P::kAcc], u32 a, u32 b, u32 scale) {
    constexpr bool kMnA = is_wgrad(T), kMnB = T != kG1 && T != kG2;
    using Instr = ptx::Wgmma<P::kInstrN, kMnA, kMnB>;
    const u64 da = kMnA ? mma::mn_major(a) : mma::k_major(a);
    const u64 db = kMnB ? mma::mn_major(b) : mma::k_major(b);
    constexpr u64 kStepA = mma::k16_step(kMnA), kStepB = mma::k16_step(kMnB);
    constexpr u64 kNext = P::kInstrN * 128 >> 4;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u64 ak = da + k * kStepA, bk = db + k * kStepB;
        if constexpr (P::kInstrN == P::kTileN) {
            Instr::issue(acc, ak, bk, k ? 1 : scale);
        } else {
            using Half = float (&)[P::kAcc / 2];
            Instr::issue(reinterpret_cast<Half>(acc[0]), ak, bk, k ? 1 : scale);
            Instr::issue(reinterpret_cast<Half>(acc[P::kAcc / 2]), ak, bk + kNext, k ? 1 : scale);
        }
    }
    ptx::wgmma_commit();
}

// The sum of one tile, complete in registers. `first`: let the second warpgroup start when two
// steps are under way.
template <class P, Type T>
PK_DEVICE void mainloop(
    float (&acc)[P::kAcc], u32 base, u32 wg, i32 k_steps, pipeline::Ring<P::kStages>& ring,
    bool first) {
    using S = Smem<P>;
    // The first step is peeled: it overwrites the accumulators and has no predecessor to release.
    wait(base + S::full(ring.stage), ring.phase);
    multiply<P, T>(acc, base + S::a(ring.stage) + wg * 8192, base + S::b(ring.stage), 0);
    u32 previous = ring.stage;
    ring.advance();
    for (i32 k = 1; k < k_steps; ++k, ring.advance()) {
        wait(base + S::full(ring.stage), ring.phase);
        multiply<P, T>(acc, base + S::a(ring.stage) + wg * 8192, base + S::b(ring.stage), 1);
        ptx::wgmma_wait<1>();
        release<P>(base + S::empty(previous));
        previous = ring.stage;
        if (first && k == 1) ptx::mbarrier_arrive(base + S::second_may_start);
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < P::kAcc; ++i)
        ptx::wgmma_pin(acc[i]);
    release<P>(base + S::empty(previous));
}

}  // namespace prime::lab
