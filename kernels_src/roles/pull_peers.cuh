// SPDX-License-Identifier: Apache-2.0
// roles/pull_peers.cuh: warps that bring token rows from their owners' arenas into pool order while
// the others multiply.
//
// Layer:      roles (arch-free). Two warps of every CTA, converged.
//
// A token is read from its owner once; its further rows here are copied from the first. Pulls wait
// for the owner's flag and for rows that stand earlier in the pool, never for a tile.
//
// Invariants: as in roles/pull.cuh. Every warp takes its rows in pool order and a copy refers to an
//             earlier block of 64, so the earliest row that is missing can always be pulled.
#pragma once
#include "../comm/pace.cuh"
#include "../comm/peers.cuh"
#include "../pipeline/wait.cuh"
#include "pull.cuh"

namespace prime::roles {

struct PeerPull {
    const comm::Peers& peers;
    u64 region;                  // of the tokens in an arena: peers.tokens or peers.grads
    const comm::RowEntry* list;  // [pool rows]
    u8* dst;                     // [pool rows, row_bytes]
    u32* arrivals;               // [pool rows / 64]
    u32 row_bytes;
    u32 rows;  // of the pool that are in use, multiple of 64
    FaultRecord* fault;
};

// Where a row is to be had, in one register: rank << 28 | token, or one of these instead of a rank.
constexpr u32 kFromShift = 28;
constexpr u32 kFromPool = comm::kMaxPeers;  // behind it: the pool row of the token's first copy
constexpr u32 kFromNowhere = 15;            // padding: zeros

// What the list says of a row, as it comes from memory.
struct Listed {
    u32 owner, copy;
};

PK_DEVICE Listed listed(const PeerPull& pull, u32 row, bool exists) {
    if (!exists) return {comm::kNoRow, ~0u};
    const uint4 entry = ptx::ld_v4(pull.list + row);
    return {entry.x, entry.z};
}

PK_DEVICE u32 source_of(const Listed& row) {
    if (static_cast<i32>(row.copy) >= 0) return kFromPool << kFromShift | row.copy;
    if (row.owner == comm::kNoRow) return kFromNowhere << kFromShift;
    return row.owner >> 24 << kFromShift | (row.owner & 0xFFFFFF);
}

// Address of this lane's row; null: zeros. Lane r knows where rank r has its tokens: memory would
// take half a microsecond to say so.
PK_DEVICE const u8* address_of(const PeerPull& pull, u64 tokens, u32 source) {
    const u32 from = source >> kFromShift;
    const u64 owner = __shfl_sync(~0u, tokens, static_cast<int>(from % comm::kMaxPeers));
    const u64 base = from == kFromPool ? reinterpret_cast<u64>(pull.dst) : owner;
    const u64 row = source & ((1u << kFromShift) - 1);
    return from == kFromNowhere ? nullptr
                                : reinterpret_cast<const u8*>(base + row * pull.row_bytes);
}

// Until the row may be read where it is; false when the time ran out. `ready`: ranks whose tokens
// are known to be.
PK_DEVICE bool wait_source(const PeerPull& pull, u32 source, u32& ready) {
    const u32 from = source >> kFromShift;
    if (from == kFromPool) {
        pipeline::Waiter waiter{pull.fault, Role::kPull, &pull.peers.timeout_ns};
        const u32 block = (source & ((1u << kFromShift) - 1)) / kArrivalRows;
        waiter.wait_counters(pull.arrivals + block, false, kArrivalRows, Wait::kFirstCopy);
        return !waiter.dead;
    }
    if (from == kFromNowhere || (ready >> from & 1) != 0) return true;
    comm::PeerWaiter waiter{pull.peers, pull.fault, Role::kPull};
    waiter.wait(comm::Flag::kReady, from, comm::epoch_of(pull.peers), Wait::kPeerReady);
    ready |= 1u << from;
    return !waiter.dead;
}

PK_DEVICE void pace_pull(const PeerPull& pull, u32 source) {
    const u32 rank = static_cast<u32>(pull.peers.rank);
    const u32 from = source >> kFromShift;
    comm::wait_until(
        comm::book_lanes(pull.peers, from < comm::kMaxPeers ? from : rank, rank, pull.row_bytes));
}

template <u32 kLoads = 8>
PK_DEVICE void pull_from_peers(const PeerPull& pull, u32 pull_warp) {
    const u32 lane = threadIdx.x & 31;
    const u32 stride = gridDim.x * kPullWarps * kPullRows;
    const u64 tokens = lane < comm::kMaxPeers ? pull.peers.arena[lane] + pull.region : 0;
    u32 ready = 1u << pull.peers.rank;
    u32 row = (pull_warp * gridDim.x + blockIdx.x) * kPullRows;
    Listed next = listed(pull, row + lane, lane < kPullRows && row < pull.rows);
    for (; row < pull.rows; row += stride) {
        const u32 mine = source_of(next);
        // A batch ahead, and not looked at before its turn.
        next = listed(pull, row + stride + lane, lane < kPullRows && row + stride < pull.rows);
        const u32 timeline_ready = ready;
        profile::Timeline{pull.fault}.mark();
        if (__ballot_sync(~0u, !wait_source(pull, mine, ready)) != 0) return;
        profile::Timeline{pull.fault}.end_warp_wait(ready != timeline_ready);
        // What each lane acquired, for the loads of all.
        __syncwarp();
        profile::Timeline{pull.fault}.mark();
        const u64 from = reinterpret_cast<u64>(address_of(pull, tokens, mine));
#pragma unroll 1
        for (u32 i = 0; i < kPullRows; i += 2) {
            const u8* a = reinterpret_cast<const u8*>(__shfl_sync(~0u, from, i));
            const u8* b = reinterpret_cast<const u8*>(__shfl_sync(~0u, from, i + 1));
            u8* dst = pull.dst + static_cast<u64>(row + i) * pull.row_bytes;
            copy_two<true, kLoads>(dst, dst + pull.row_bytes, a, b, pull.row_bytes, lane);
        }
        if (pull.peers.bytes_per_us != 0) pace_pull(pull, mine);
        // Each lane's plain stores before the TMA loads of whoever sees the counter.
        ptx::fence_async_global();
        __syncwarp();
        if (lane == 0) ptx::red_add_release_gpu(pull.arrivals + row / kArrivalRows, kPullRows);
        const u32 timeline_from = mine >> kFromShift;
        const bool timeline_far = timeline_from < kFromPool && timeline_from != pull.peers.rank;
        profile::Timeline{pull.fault}.end_pull(row, timeline_far);
    }
}

}  // namespace prime::roles
