// SPDX-License-Identifier: Apache-2.0
// pipeline/ring.cuh: the stage index and phase bit that producers and consumers of a shared-memory
// ring walk in step. Layer: pipeline (arch-free).
#pragma once
#include "../common/types.cuh"

namespace prime::pipeline {

// Consumers wait for parity `phase` of full[stage]; producers wait for parity `phase ^ 1` of
// empty[stage], so that the first pass over fresh barriers does not block.
template <int kStages>
struct Ring {
    u32 stage = 0;
    u32 phase = 0;

    PK_DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace prime::pipeline
