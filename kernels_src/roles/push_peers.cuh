// SPDX-License-Identifier: Apache-2.0
// roles/push_peers.cuh: the warps that pulled tokens send finished rows to where their owners want
// them.
//
// Layer:      roles (arch-free). Two warps of every CTA, converged, after their pulls.
//
// Rows of this rank's own tokens stay in the pool: whoever sums them knows their place. Pushes wait
// for tiles and no tile waits for them, so a link that is full holds up nothing but itself.
#pragma once
#include "../comm/pace.cuh"
#include "../comm/peers.cuh"
#include "../pipeline/wait.cuh"
#include "pull.cuh"

namespace prime::roles {

struct PeerPush {
    const comm::Peers& peers;
    const comm::RowEntry* list;  // [pool rows]
    const u8* pool;              // [pool rows, row_bytes]
    const u32* done;             // [pool rows / 64] column tiles of the rows that are in the pool
    u32 tiles;                   // of a complete row
    u32 row_bytes;
    u32 rows;  // of the pool that are in use, multiple of 64
    FaultRecord* fault;
};

// What a lane knows of its row of a batch.
struct PushedRow {
    u64 to = 0;  // 0: stays here
    u32 owner;
};

PK_DEVICE PushedRow pushed_row(const PeerPush& push, u32 row, bool exists) {
    const u32 rank = static_cast<u32>(push.peers.rank);
    PushedRow it{.owner = rank};
    if (!exists) return it;
    const uint4 entry = ptx::ld_nc_v4(push.list + row);
    if (entry.x == comm::kNoRow || entry.x >> 24 == rank) return it;
    it.owner = entry.x >> 24;
    it.to = push.peers.arena[it.owner] + push.peers.results + u64{entry.y} * push.row_bytes;
    return it;
}

// Copies the batch's rows that go somewhere, two at a time; a last odd one is copied twice.
template <u32 kLoads>
PK_DEVICE void push_batch(const PeerPush& push, u32 row, u64 to, u32 going, u32 lane) {
    while (going != 0) {
        const u32 first = __ffs(going) - 1;
        going &= going - 1;
        const u32 second = going != 0 ? __ffs(going) - 1 : first;
        going &= going - 1;
        u8* a = reinterpret_cast<u8*>(__shfl_sync(~0u, to, static_cast<int>(first)));
        u8* b = reinterpret_cast<u8*>(__shfl_sync(~0u, to, static_cast<int>(second)));
        const u8* pool = push.pool + static_cast<u64>(row) * push.row_bytes;
        copy_two<true, kLoads>(
            a, b, pool + u64{first} * push.row_bytes, pool + u64{second} * push.row_bytes,
            push.row_bytes, lane);
    }
}

template <u32 kLoads = 8>
PK_DEVICE void push_to_peers(const PeerPush& push, u32 push_warp) {
    if (push.peers.size == 1) return;
    const u32 lane = threadIdx.x & 31;
    const u32 stride = gridDim.x * kPullWarps * kPullRows;
    pipeline::Waiter waiter{push.fault, Role::kPush, &push.peers.timeout_ns};
    for (u32 row = (push_warp * gridDim.x + blockIdx.x) * kPullRows; row < push.rows;
         row += stride) {
        const PushedRow mine = pushed_row(push, row + lane, lane < kPullRows);
        const u32 going = __ballot_sync(~0u, mine.to != 0);
        if (going == 0) continue;
        waiter.timeline = profile::Timeline{push.fault};
        waiter.wait_counters(push.done + row / kArrivalRows, false, push.tiles, Wait::kInput);
        if (__ballot_sync(~0u, waiter.dead) != 0) return;
        // What the lanes acquired, for one another's loads.
        __syncwarp();
        profile::Timeline{push.fault}.mark();
        push_batch<kLoads>(push, row, mine.to, going, lane);
        if (push.peers.bytes_per_us != 0)
            comm::wait_until(
                comm::book_lanes(
                    push.peers, static_cast<u32>(push.peers.rank), mine.owner, push.row_bytes));
        profile::Timeline{push.fault}.end_push(row, going);
    }
}

}  // namespace prime::roles
