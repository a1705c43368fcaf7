// SPDX-License-Identifier: Apache-2.0
// benchmarks/tile_lab/tile.cuh: what all roles of a lab kernel share: tile types, arguments, the
// anatomy as a policy, shared memory, waits, and the walk over the tile list.
#pragma once
#include "../../kernels_src/common/types.cuh"
#include "../../kernels_src/ptx/cluster.cuh"
#include "../../kernels_src/ptx/mbarrier.cuh"

namespace prime::lab {

// G1: gate/up with SwiGLU. G2: down. D2: gradient through down with SwiGLU's backward. W, W32:
// weight gradient to bf16 or fp32.
enum Type { kG1, kG2, kD2, kW, kW32 };

PK_HOST_DEVICE constexpr bool is_wgrad(Type type) {
    return type == kW || type == kW32;
}

// As tiles.py writes it. `m`, `n`: element offsets in the output; `k0`: first row of a weight
// gradient's sum; k_steps of 64. `multicast`: the pair's two tiles have the same B.
struct Tile {
    i32 m, n, expert, k0, k_steps, multicast, reserved0, reserved1;
};

// As driver.py fills it. Maps: operands, the saved z, two outputs.
struct Args {
    TensorMap a, b, z, o0, o1;
    const Tile* tiles;
    const float* score;
    float* ds;
    i32 num_tiles, stagger, num_n_tiles, copy_rounds;
    const uint4* copy_src;
    uint4* copy_dst;
    u64 reserved;
};
static_assert(sizeof(Args) == 704);

constexpr u32 kMaxSmemBytes = 232448;
constexpr u32 kBarrierBytes = 512;
constexpr u32 kAlignBytes = 1024;

template <int kThreads_, int kTileN_, int kInstrN_, int kStages_, bool kParked_, int kCluster_>
struct Policy {
    static constexpr int kThreads = kThreads_, kTileN = kTileN_, kInstrN = kInstrN_;
    static constexpr int kStages = kStages_, kCluster = kCluster_;
    static constexpr bool kParked = kParked_;
    static constexpr int kAcc = kTileN / 2;
    static constexpr u32 kABytes = 128 * 128, kBBytes = kTileN * 128;
    static constexpr u32 kStageBytes = kStages * (kABytes + kBBytes);
    static constexpr u32 kRoomBytes = kMaxSmemBytes - kStageBytes - kBarrierBytes - kAlignBytes;
    // Parked: one bf16 tile and two slabs for the drain. Inline: what the stages leave.
    static constexpr u32 kParkBytes = 64 * kTileN * 2;
    static constexpr u32 kDrainBytes = 16384;
    static constexpr u32 kScratchBytes =
        (kParked ? 2 * kParkBytes + kDrainBytes : kRoomBytes) / 2048 * 2048;
    static_assert(kScratchBytes <= kRoomBytes);
    static_assert(kTileN % 64 == 0 && (kInstrN == kTileN || 2 * kInstrN == kTileN));
};

// Offsets from the first 1,024-byte boundary: stages of A, stages of B, scratch, barriers.
template <class P>
struct Smem {
    PK_HOST_DEVICE static constexpr u32 a(u32 s) { return s * P::kABytes; }
    PK_HOST_DEVICE static constexpr u32 b(u32 s) {
        return P::kStages * P::kABytes + s * P::kBBytes;
    }
    static constexpr u32 scratch = P::kStageBytes;
    static constexpr u32 bars = scratch + P::kScratchBytes;
    static constexpr u32 bytes = bars + kBarrierBytes + kAlignBytes;
    PK_HOST_DEVICE static constexpr u32 full(u32 s) { return bars + 8 * s; }
    PK_HOST_DEVICE static constexpr u32 empty(u32 s) { return bars + 64 + 8 * s; }
    // Inline: two per math warpgroup, for loads of z.
    PK_HOST_DEVICE static constexpr u32 loaded(u32 wg) { return bars + 128 + 16 * wg; }
    PK_HOST_DEVICE static constexpr u32 drained(u32 wg) { return bars + 160 + 8 * wg; }
    PK_HOST_DEVICE static constexpr u32 parked(u32 wg) { return bars + 176 + 8 * wg; }
    static constexpr u32 second_may_start = bars + 192;
};

// Bounded, so that a kernel that lost count ends with wrong results and not never. It falls through
// instead of exiting: an `exit` in the loop would make ptxas serialise every wgmma (C7518).
PK_DEVICE void wait(u32 bar, u32 phase) {
    for (u32 tries = 0; tries < (1u << 20) && !ptx::mbarrier_try_wait(bar, phase); ++tries) {
    }
}

// The tiles of one CTA. Members of a pair take neighbours of the list.
template <class P>
struct Walk {
    const Args& args;
    u32 index;

    PK_DEVICE explicit Walk(const Args& args_) : args(args_) {
        const u32 rank = P::kCluster == 1 ? 0 : ptx::cluster_cta_rank();
        index = (blockIdx.x / P::kCluster) * P::kCluster + rank;
    }
    PK_DEVICE bool more() const { return index < static_cast<u32>(args.num_tiles); }
    PK_DEVICE void next() { index += gridDim.x; }
    PK_DEVICE Tile tile() const {
        const int4* src = reinterpret_cast<const int4*>(args.tiles + index);
        const int4 lo = __ldg(src), hi = __ldg(src + 1);
        return Tile{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
    }
};

}  // namespace prime::lab
