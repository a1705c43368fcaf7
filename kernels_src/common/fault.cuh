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

enum class Role : u32 { kNone = 0, kSchedule = 1, kLoad = 2, kMath = 3 };

// What was waited for.
enum class Wait : u32 {
    kNone = 0,
    kTileFull = 1,
    kTileFree = 2,
    kStageFull = 3,
    kStageFree = 4,
    kInput = 5
};

struct FaultRecord {
    u32 code;  // 0: no fault; 1: a wait ran out of time
    u32 cta;
    u32 role;
    u32 wait;
    u32 bad_ids;  // routing slots that named no expert and were skipped (a count, not a fault)
    u32 reserved[3];
};

PK_DEVICE void record_fault(FaultRecord* record, Role role, Wait wait) {
    if (atomicCAS(&record->code, 0u, 1u) != 0u) return;
    record->cta = blockIdx.x;
    record->role = static_cast<u32>(role);
    record->wait = static_cast<u32>(wait);
    __threadfence_system();
}

}  // namespace prime
