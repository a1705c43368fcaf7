// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/cluster.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline u32 cluster_cta_rank() {
    return sim::machine->rank();
}

// Not the number of the CTA, so that the two are not mixed up.
inline u32 sm_id() {
    return 100 + sim::machine->self().cta;
}

inline void cluster_sync() {
    const sim::Shape& s = sim::machine->shape();
    sim::Meeting& here = sim::memory.ctas[sim::machine->peer(0)].cluster;
    sim::machine->meet(here, s.cluster * s.block, "cluster_sync");
}

}  // namespace prime::ptx
