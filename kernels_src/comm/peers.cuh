// SPDX-License-Identifier: Apache-2.0
// comm/peers.cuh: where the ranks of an expert-parallel group find one another's memory, and the
// flags by which they tell how far they are.
//
// Layer:      comm (arch-free). Laid out in prime_kernels/peers/arena.py.
//
// Every rank owns one arena, laid out alike on all of them. It holds what peers write (flags,
// counts, rows of the plan, results) or read (tokens). A rank polls its own arena only.
//
// Invariants: a flag holds the epoch of the last call that reached it and never goes back. The
//             epoch is counted in the arena by the kernel that begins a call, so that a captured
//             graph counts as an eager call does.
#pragma once
#include "../common/fault.cuh"
#include "../common/types.cuh"
#include "../profile/timeline.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::comm {

constexpr u32 kProtocol = 1;  // version of what follows; peers of different versions never meet
constexpr u32 kMaxPeers = 8;
constexpr u32 kFlagBytes = 128;  // a line each: peers write them, one rank polls them
constexpr u32 kStateOffset = 512;

// What a rank says of itself to a peer; a line per kind and sender.
enum class Flag : u32 {
    kCounts = 0,  // its rows per expert are in the peer's arena
    kPlaced = 1,  // its entries of the peer's row list are
    kReady = 2,   // its tokens may be read
    kDone = 3     // it has written its last result and read its last token
};

// A row of a rank's pool, written by the rank that owns the token.
struct RowEntry {
    u32 source;   // owner << 24 | token; kNoRow: padding
    u32 slot;     // token * K + k: where the owner wants the result
    i32 copy_of;  // an earlier row of this pool that holds the same token, or -1
    float score;
};
constexpr u32 kNoRow = ~0u;

// The place of a slot's row: rank << kRankShift | row of that rank's pool.
constexpr u32 kRankShift = 28;

// At the start of every arena; 8-byte words, written once by the host.
struct Peers {
    u64 arena[kMaxPeers];  // addresses, this rank's own included
    u64 rank;
    u64 size;
    u64 flags;    // byte offsets in an arena, the same in all
    u64 counts;   // [R, E] i32: rows that a rank sends to each expert
    u64 rows;     // [pool rows] RowEntry
    u64 tokens;   // [T, H] bf16: x in the forward
    u64 grads;    // [T, H] bf16: dy in the backward
    u64 results;  // [T K, H] bf16: y or dx of a slot
    u64 dscore;   // [T K] fp32
    u64 timeout_ns;
    u64 bytes_per_us;  // pace of remote transport, 0: as fast as it goes (comm/pace.cuh)
};
static_assert(sizeof(Peers) <= kStateOffset);

// Behind it, written by kernels.
struct PeerState {
    u64 epoch;
    u64 egress_free_ns;  // when the paced link of this rank is free again
    u64 ingress_free_ns;
};

PK_DEVICE PeerState* state_of(const Peers& p, u32 rank) {
    return reinterpret_cast<PeerState*>(p.arena[rank] + kStateOffset);
}

PK_DEVICE u32 epoch_of(const Peers& p) {
    return static_cast<u32>(state_of(p, static_cast<u32>(p.rank))->epoch);
}

PK_DEVICE u32* flag_at(const Peers& p, u32 owner, Flag kind, u32 sender) {
    const u32 line = static_cast<u32>(kind) * kMaxPeers + sender;
    return reinterpret_cast<u32*>(p.arena[owner] + p.flags + u64{line} * kFlagBytes);
}

// Everything that this thread has written or seen before, then the flag, for whoever acquires it.
PK_DEVICE void tell(const Peers& p, u32 peer, Flag kind, u32 epoch) {
    ptx::fence_sys();
    ptx::st_release_sys(flag_at(p, peer, kind, static_cast<u32>(p.rank)), epoch);
}

// One converged warp tells every peer: a lane each.
PK_DEVICE void tell_all(const Peers& p, Flag kind, u32 epoch) {
    if ((threadIdx.x & 31) < p.size) tell(p, threadIdx.x & 31, kind, epoch);
    __syncwarp();
}

// Waits for flags of peers; after one that ran out of time it waits no more.
struct PeerWaiter {
    const Peers& peers;
    FaultRecord* record;
    Role role;
    bool dead = false;

    // Until `sender` has reached `epoch` or gone past it.
    PK_DEVICE void wait(Flag kind, u32 sender, u32 epoch, Wait what) {
        constexpr u32 kPollsPerClockRead = 256;
        profile::Timeline timeline{record};
        const u32 timeline_begin = timeline.now();
        const u32* flag = flag_at(peers, static_cast<u32>(peers.rank), kind, sender);
        u64 start = 0;
        for (u32 polls = 1; !dead; ++polls) {
            if (static_cast<i32>(ptx::ld_acquire_sys(flag) - epoch) >= 0) {
                if (polls > 1) timeline.end_wait(timeline_begin, what);
                return;
            }
            if (polls % kPollsPerClockRead != 0) continue;
            const u64 now = ptx::global_timer_ns();
            if (start == 0) start = now;
            if (now - start > peers.timeout_ns) {
                record_fault(record, role, what, sender + 1);
                dead = true;
            }
        }
    }
};

}  // namespace prime::comm
