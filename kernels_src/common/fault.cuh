// SPDX-License-Identifier: Apache-2.0
// common/fault.cuh: the record that a kernel leaves behind when a wait runs out of time. No trap:
// the context stays healthy.
//
// Layer:      common.
//
// Invariants: the first fault wins; the host reads the record and zeroes it.
#pragma once
#include "types.cuh"

namespace prime {

enum class Role : u32 {
    kNone = 0,
    kSchedule = 1,
    kLoad = 2,
    kMath = 3,
    kPull = 4,
    kPlan = 5,
    kEnd = 6,  // the last thread of a launch among peers
    kPush = 7
};

// What was waited for.
enum class Wait : u32 {
    kNone = 0,
    kTileFull = 1,
    kTileFree = 2,
    kStageFull = 3,
    kStageFree = 4,
    kInput = 5,
    kPeerCounts = 6,
    kPeerRows = 7,
    kPeerReady = 8,
    kPeerDone = 9,
    kFirstCopy = 10
};

struct FaultRecord {
    u32 code;  // 0: no fault; 1: a wait ran out of time
    u32 cta;
    u32 role;
    u32 wait;
    u32 bad_ids;      // routing slots that named no expert and were skipped (a count, not a fault)
    u32 peer;         // 1 + the rank that was waited for; 0: none
    u32 timeline[2];  // address that a profile build records to, low word first; 0: nowhere
};

PK_DEVICE void record_fault(FaultRecord* record, Role role, Wait wait, u32 peer = 0) {
    if (atomicCAS(&record->code, 0u, 1u) != 0u) return;
    record->cta = blockIdx.x;
    record->role = static_cast<u32>(role);
    record->wait = static_cast<u32>(wait);
    record->peer = peer;
    __threadfence_system();
}

}  // namespace prime
