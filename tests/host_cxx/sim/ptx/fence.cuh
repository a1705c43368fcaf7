// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/fence.cuh. Simulated threads see each other's writes at once, but for those to
// another rank's memory; what a fence orders for the asynchronous proxy is kept track of.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline void fence_async_shared() {
    sim::memory.fence();
}

inline void fence_async_global() {}

inline void fence_sys() {
    sim::remote.fence();
}

inline void named_barrier_sync(u32 id, u32 threads) {
    sim::machine->meet(sim::named(id), threads, "named_barrier_sync");
}

inline bool named_barrier_any(u32 id, u32 threads, bool value) {
    return sim::meet_any(id, threads, value, "named_barrier_any");
}

}  // namespace prime::ptx
