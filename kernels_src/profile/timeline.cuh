// SPDX-License-Identifier: Apache-2.0
// profile/timeline.cuh: what a profile build (PK_PROFILE) writes down about itself: when which
// role waited, multiplied, stored, copied.
//
// Layer:      profile (arch-free). One thread of every warp of warpgroup 0 and of every math
//             warpgroup records. Read by prime_kernels/timeline/records.py, which has the same
//             layout.
//
// Invariants: without PK_PROFILE every function here is empty, and taking out all lines that name
//             them changes no instruction (tests/unit/test_profile_build.py). A lane never writes
//             past its records; it counts what found no room.
#pragma once
#include "../common/fault.cuh"
#include "../common/types.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/ld_st.cuh"

namespace prime::profile {

enum class Event : u32 {
    kWait = 1,      // detail: Wait
    kMultiply = 2,  // a tile up to its last product; a second record holds the tile
    kSkip = 3,      // a tile without rows for this warpgroup; likewise
    kEpilogue = 4,
    kCopy = 5,  // of rows to the pool; detail: the first of them / 8, which is what one copy moves
    kPush = 6   // of rows of the pool to peers; likewise
};

#ifdef PK_PROFILE

constexpr bool kProfile = true;
constexpr u32 kTimelineLanes = 6;  // warps 0-3, then the two math warpgroups

// The buffer: this, then for every CTA and lane a LaneHead and `capacity` records.
struct TimelineHead {
    u32 capacity;
    u32 ctas;  // that have room
    u32 reserved[6];
};

struct LaneHead {
    u64 begin_ns;  // entry of the kernel
    u64 end_ns;    // end of the role
    u32 sm;
    u32 count;  // of records, those without room too
    // Kept here by roles without registers to spare: when something began, and `count` then.
    u32 mark_lo_ns;
    u32 mark_count;
};

// `what` is an Event and from bit 8 its detail; the second record of a tile has its numbers. The
// lower half of the clock lasts four seconds and is read in one instruction. `remote`: rows of a
// copy or push that went from one rank to another.
struct Record {
    u32 begin_lo_ns;
    u32 length_ns;
    u32 what;
    u32 remote;
};

// A thread may make one after the other, but not use two in turns.
struct Timeline {
    LaneHead* lane = nullptr;  // null: this thread records nothing
    u32 capacity = 0;
    u32 count = 0;

    PK_DEVICE explicit Timeline(const FaultRecord* call) {
        const u32 warp = threadIdx.x >> 5;
        const bool records = (threadIdx.x & (warp < 4 ? 31 : 127)) == 0;
        if (!records || call == nullptr) return;
        const u64 buffer = u64{call->timeline[1]} << 32 | call->timeline[0];
        const auto* head = reinterpret_cast<const TimelineHead*>(buffer);
        if (buffer == 0 || blockIdx.x >= head->ctas) return;
        capacity = head->capacity;
        const u64 index = blockIdx.x * kTimelineLanes + (warp < 4 ? warp : 3 + (threadIdx.x >> 7));
        const u64 bytes = sizeof(LaneHead) + u64{capacity} * sizeof(Record);
        lane = reinterpret_cast<LaneHead*>(buffer + sizeof(TimelineHead) + index * bytes);
        count = lane->count;
    }

    PK_DEVICE u32 now() const { return lane == nullptr ? 0 : ptx::global_timer_lo_ns(); }

    // Records what began at `begin` and ends now; returns now.
    PK_DEVICE u32 end(u32 begin, Event event, u32 detail = 0, u32 remote = 0) {
        const u32 now = this->now();
        if (lane != nullptr) put(begin, now - begin, static_cast<u32>(event) | detail << 8, remote);
        return now;
    }

    PK_DEVICE u32 end_wait(u32 begin, Wait what) {
        return end(begin, Event::kWait, static_cast<u32>(what));
    }

    // The same of a tile, in two records.
    template <class T>
    PK_DEVICE u32 end_tile(u32 begin, Event event, const T& tile) {
        const u32 now = end(begin, event, static_cast<u32>(tile.kind));
        if (lane != nullptr)
            put(static_cast<u32>(tile.row), static_cast<u32>(tile.n), static_cast<u32>(tile.expert),
                static_cast<u32>(tile.k_steps) << 8 | static_cast<u32>(tile.valid));
        return now;
    }

    PK_DEVICE u32 end_copy(u32 begin, u32 row) { return end(begin, Event::kCopy, row / 8); }

    // What begins now ends with one of the next three, each of a converged warp.
    PK_DEVICE void mark() {
        if (lane == nullptr) return;
        lane->mark_lo_ns = now();
        lane->mark_count = count;
    }

    // A wait, of which the recording lane's own part may have been recorded already; `peer`: this
    // lane waited for one, not for rows that are here.
    PK_DEVICE void end_warp_wait(bool peer) {
        const bool peers = __ballot_sync(~0u, peer) != 0;
        if (lane != nullptr && lane->mark_count == count)
            end_wait(lane->mark_lo_ns, peers ? Wait::kPeerReady : Wait::kFirstCopy);
    }

    // `remote`: this lane's row came from a peer.
    PK_DEVICE void end_pull(u32 row, bool remote) {
        const u32 rows = static_cast<u32>(__popc(__ballot_sync(~0u, remote)));
        if (lane != nullptr) end(lane->mark_lo_ns, Event::kCopy, row / 8, rows);
    }

    PK_DEVICE void end_push(u32 row, u32 rows) {
        if (lane != nullptr)
            end(lane->mark_lo_ns, Event::kPush, row / 8, static_cast<u32>(__popc(rows)));
    }

    // Of the launch, around all roles.
    PK_DEVICE static void enter(const FaultRecord* call) {
        Timeline self(call);
        if (self.lane == nullptr) return;
        self.lane->begin_ns = ptx::global_timer_ns();
        self.lane->sm = ptx::sm_id();
        self.lane->count = 0;
    }

    PK_DEVICE static void leave(const FaultRecord* call) {
        Timeline self(call);
        if (self.lane != nullptr) self.lane->end_ns = ptx::global_timer_ns();
    }

private:
    PK_DEVICE void put(u32 a, u32 b, u32 c, u32 d) {
        if (count < capacity)
            ptx::st_v4(reinterpret_cast<Record*>(lane + 1) + count, uint4{a, b, c, d});
        lane->count = ++count;
    }
};

#else

constexpr bool kProfile = false;

struct Timeline {
    PK_DEVICE explicit Timeline(const FaultRecord*) {}
    PK_DEVICE u32 now() const { return 0; }
    PK_DEVICE u32 end(u32, Event, u32 = 0) { return 0; }
    template <class T>
    PK_DEVICE u32 end_tile(u32, Event, const T&) {
        return 0;
    }
    PK_DEVICE u32 end_wait(u32, Wait) { return 0; }
    PK_DEVICE u32 end_copy(u32, u32) { return 0; }
    PK_DEVICE void mark() {}
    PK_DEVICE void end_warp_wait(bool) {}
    PK_DEVICE void end_pull(u32, bool) {}
    PK_DEVICE void end_push(u32, u32) {}
    PK_DEVICE static void enter(const FaultRecord*) {}
    PK_DEVICE static void leave(const FaultRecord*) {}
};

#endif

}  // namespace prime::profile
