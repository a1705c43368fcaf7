// SPDX-License-Identifier: Apache-2.0
// pipeline/wait.cuh: bounded waits on shared-memory barriers.
//
// Layer:      pipeline (arch-free).
//
// Invariants: a wait always returns. After the first one that ran out of time the role is `dead`:
//             it waits no more, issues no copy, and walks to its end, so that the CTA and its
//             cluster leave together. Leaving from inside the loop instead (exit, trap) makes ptxas
//             serialise every tensor-core instruction of the kernel.
#pragma once
#include "../common/fault.cuh"
#include "../common/types.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/mbarrier.cuh"
#include "../profile/timeline.cuh"

namespace prime::pipeline {

constexpr u64 kWaitLimitNs = 20ull * 1000 * 1000 * 1000;
constexpr u32 kPollsPerClockRead = 1024;

struct Waiter {
    FaultRecord* record;
    Role role;
    // What a launch among peers grants them, in their arena; null: there are none. Its own waits
    // are for work that may be waiting for a peer, and must not run out of time before that does.
    const u64* peers_ns = nullptr;
    bool dead = false;
    profile::Timeline timeline{record};

    PK_DEVICE void wait(u32 bar, u32 phase, Wait what) {
        if (profile::kProfile && ptx::mbarrier_test_wait(bar, phase)) return;
        const u32 timeline_begin = timeline.now();
        u64 start = 0;
        for (u32 polls = 1; !dead && !ptx::mbarrier_try_wait(bar, phase); ++polls) {
            if (polls % kPollsPerClockRead != 0) continue;
            const u64 now = ptx::global_timer_ns();
            if (start == 0) start = now;
            if (expired(now - start)) {
                record_fault(record, role, what);
                dead = true;
            }
        }
        timeline.end_wait(timeline_begin, what);
    }

    // Until one or two neighbouring counters in global memory read `target`, written by other CTAs
    // with release at GPU scope. Both are asked for before either is looked at.
    PK_DEVICE void wait_counters(const u32* first, bool two, u32 target, Wait what) {
        const u32 timeline_begin = timeline.now();
        u64 start = 0;
        for (u32 polls = 1; !dead; ++polls) {
            const u32 a = ptx::ld_acquire_gpu(first);
            const u32 b = ptx::ld_acquire_gpu(first + two);
            if (a == target && b == target) {
                if (polls > 1) timeline.end_wait(timeline_begin, what);
                return;
            }
            if (polls % kPollsPerClockRead != 0) continue;
            const u64 now = ptx::global_timer_ns();
            if (start == 0) start = now;
            if (expired(now - start)) {
                record_fault(record, role, what);
                dead = true;
            }
        }
    }

private:
    PK_DEVICE bool expired(u64 waited_ns) const {
        return waited_ns > kWaitLimitNs + (peers_ns == nullptr ? 0 : *peers_ns);
    }
};

}  // namespace prime::pipeline
