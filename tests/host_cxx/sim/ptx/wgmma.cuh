// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/wgmma.cuh: descriptors are read as the PTX ISA states them, operands are
// read as late as an instruction may read them, when its group is waited for, and warps converge
// where the instructions demand it.
#pragma once
#include "../common/types.cuh"
#include "sim/multiply.hpp"

namespace prime::ptx {

inline void wgmma_fence() {
    sim::exchange(~0u, 0, "wgmma.fence");
}

inline void wgmma_commit() {
    sim::exchange(~0u, 0, "wgmma.commit");
    sim::own_products().groups.emplace_back();
}

template <int N>
void wgmma_wait() {
    sim::own_products().wait(N);
    sim::exchange(~0u, N, "wgmma.wait");  // done for one lane is done for all
}

inline void wgmma_pin(float&) {}

template <int N, int MnMajorA, int MnMajorB>
struct Wgmma {
    static void issue(float (&d)[N / 2], u64 desc_a, u64 desc_b, u32 scale_d) {
        const sim::Operand a{desc_a, MnMajorA != 0}, b{desc_b, MnMajorB != 0};
        sim::own_products().groups.back().push_back({d, N, a, b, scale_d != 0});
    }
};

}  // namespace prime::ptx
