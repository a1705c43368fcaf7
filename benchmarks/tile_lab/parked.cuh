// SPDX-License-Identifier: Apache-2.0
// benchmarks/tile_lab/parked.cuh: math warpgroups that park bf16 tiles in shared memory, and the
// fourth warpgroup that drains them meanwhile.
#pragma once
#include "inline.cuh"

namespace prime::lab {

template <class P, Type T>
PK_DEVICE void math_parked(const Args& args, u32 base, u32 wg) {
    using S = Smem<P>;
    const Seat seat{wg, (threadIdx.x >> 5) & 3, threadIdx.x & 31, (threadIdx.x & 127) == 0};
    const u32 park = base + S::scratch + wg * P::kParkBytes;
    pipeline::Ring<P::kStages> ring;
    float acc[P::kAcc];
    u32 phase = 1;
    bool first = args.stagger && wg == 0;
    if (args.stagger && wg == 1) wait(base + S::second_may_start, 0);
    for (Walk<P> walk(args); walk.more(); walk.next(), phase ^= 1) {
        mainloop<P, T>(acc, base, wg, walk.tile().k_steps, ring, first);
        first = false;
        wait(base + S::drained(wg), phase);
#pragma unroll
        for (int block = 0; block < P::kTileN / 64; ++block)
            epilogue::put64(park + block * layout::kSlabBytes, seat, acc + block * 32);
        ptx::fence_async_shared();
        ptx::mbarrier_arrive(base + S::parked(wg));
    }
}

// Eight h from eight gate and eight up values of a parked tile.
PK_DEVICE void activate8(u32 gate, u32 up, u32 to) {
    i32 g[4], u[4], h[4];
    ptx::ld_shared_v4(gate, g[0], g[1], g[2], g[3]);
    ptx::ld_shared_v4(up, u[0], u[1], u[2], u[3]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 gj = static_cast<u32>(g[j]), uj = static_cast<u32>(u[j]);
        const float lo = SwiGLU::forward(ptx::bf16_lo(gj), ptx::bf16_lo(uj), {});
        const float hi = SwiGLU::forward(ptx::bf16_hi(gj), ptx::bf16_hi(uj), {});
        h[j] = static_cast<i32>(ptx::pack_bf16(lo, hi));
    }
    ptx::st_shared_v4(to, h[0], h[1], h[2], h[3]);
}

template <class P>
PK_DEVICE void drain_g1(
    const Args& args, u32 park, u32 to, const Seat& seat, const Tile& t, i32 row) {
    constexpr int kHalf = P::kTileN / 2;
    static_assert(kHalf / 64 * layout::kSlabBytes <= P::kDrainBytes);
    if (seat.leader) {
#pragma unroll
        for (int block = 0; block < P::kTileN / 64; ++block) {
            const i32 col = t.n + block * 64 % kHalf;
            const u32 slab = park + block * layout::kSlabBytes;
            ptx::tma_store_3d(&args.z, slab, col, block * 64 / kHalf, row);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read<1>();  // the previous h has left `to`
    }
    seat.sync();
    const u32 tid = threadIdx.x & 127;
#pragma unroll
    for (int block = 0; block < kHalf / 64; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 slab = block * layout::kSlabBytes;
            const u32 at = slab + layout::slab_offset((tid >> 3) + i * 16, tid & 7);
            const u32 gate = park + at;
            activate8(gate, gate + kHalf / 64 * layout::kSlabBytes, to + at);
        }
    }
    epilogue::publish(seat);
    if (seat.leader) {
#pragma unroll
        for (int block = 0; block < kHalf / 64; ++block)
            ptx::tma_store_2d(&args.o0, to + block * layout::kSlabBytes, t.n + block * 64, row);
        ptx::bulk_commit();
        ptx::bulk_wait_read<1>();  // z has left the park
    }
}

template <class P, Type T>
PK_DEVICE void drain_plain(const Args& args, u32 park, const Tile& t, i32 row) {
#pragma unroll
    for (int block = 0; block < P::kTileN / 64; ++block) {
        const u32 slab = park + block * layout::kSlabBytes;
        ptx::tma_store_3d(&args.o0, slab, t.n + block * 64, row, T == kG2 ? 0 : t.expert);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
}

template <class P, Type T>
PK_DEVICE void drain(const Args& args, u32 base) {
    using S = Smem<P>;
    const Seat seat{2, (threadIdx.x >> 5) & 3, threadIdx.x & 31, (threadIdx.x & 127) == 0};
    u32 phase = 0;
    for (Walk<P> walk(args); walk.more(); walk.next(), phase ^= 1) {
        const Tile t = walk.tile();
        for (u32 wg = 0; wg < 2; ++wg) {
            const u32 park = base + S::scratch + wg * P::kParkBytes;
            const i32 row = t.m + static_cast<i32>(wg) * 64;
            wait(base + S::parked(wg), phase);
            if constexpr (T == kG1)
                drain_g1<P>(args, park, base + S::scratch + 2 * P::kParkBytes, seat, t, row);
            else if (seat.leader)
                drain_plain<P, T>(args, park, t, row);
            if (seat.leader) ptx::mbarrier_arrive(base + S::drained(wg));
        }
    }
    if (seat.leader) ptx::bulk_wait<0>();
}

}  // namespace prime::lab
