// SPDX-License-Identifier: Apache-2.0
// epilogue/announce.cuh: tells other CTAs that the rows of a tile are in memory.
//
// Layer:      epilogue. One instance per math warpgroup; all 128 threads call every function
//             together, its leader acts.
//
// A tile's bulk stores take a microsecond to arrive, in which the warpgroup could multiply. So what
// a tile has to say waits until its warpgroup stores the next one, unless somebody may be held up.
#pragma once
#include "slabs.cuh"

namespace prime::epilogue {

struct Announcer {
    u32* counter = nullptr;  // of stores that may still be under way

    PK_DEVICE void owe(u32* what) { counter = what; }

    // Bulk stores complete in memory, then the counter, for whoever acquires it and loads by TMA.
    PK_DEVICE void pay(const Seat& seat) {
        if (seat.leader && counter != nullptr) {
            ptx::bulk_wait<0>();
            ptx::fence_async_global();
            ptx::red_add_release_gpu(counter, 1);
        }
        counter = nullptr;
    }
};

}  // namespace prime::epilogue
