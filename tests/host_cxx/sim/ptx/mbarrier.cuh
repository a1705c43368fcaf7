// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/mbarrier.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline u32 smem_addr(const void* ptr) {
    return static_cast<u32>(__cvta_generic_to_shared(ptr));
}

inline void mbarrier_init(u32 bar, u32 arrivals) {
    sim::memory.at(bar, 8);
    const bool fresh =
        sim::memory.own().barriers.emplace(bar, sim::Barrier{arrivals, arrivals}).second;
    CHECK(fresh, "two mbarriers at %u", bar);
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(u32 bar) {
    sim::memory.arrive(sim::machine->self().cta, bar);
}

inline void mbarrier_arrive_remote(u32 bar, u32 cta) {
    sim::memory.arrive(sim::machine->peer(cta), bar);
}

inline void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    sim::memory.barrier(sim::machine->self().cta, bar).bytes += bytes;
    mbarrier_arrive(bar);
}

inline bool mbarrier_test_wait(u32 bar, u32 phase) {
    return sim::memory.barrier(sim::machine->self().cta, bar).phase != phase;
}

// False only when the whole machine has come to rest, as the hardware's own time limit would.
inline bool mbarrier_try_wait(u32 bar, u32 phase) {
    const sim::Barrier& b = sim::memory.barrier(sim::machine->self().cta, bar);
    return sim::machine->try_block("mbarrier", b.phase, phase);
}

}  // namespace prime::ptx
