// SPDX-License-Identifier: Apache-2.0
// mma/sm90.cuh: the tensor-core policy of Hopper: both operands in shared memory, accumulators in
// registers.
//
// Layer:      mma. Fulfils mma/policy.cuh.
#pragma once
#include "../common/types.cuh"
#include "../ptx/regs.cuh"
#include "../ptx/wgmma.cuh"
#include "descriptor.cuh"
#include "policy.cuh"

namespace prime::mma {

// kLoad: registers of a thread of the loading warpgroup; the two that multiply share the rest.
template <u32 kLoad>
struct HopperWith {
    static constexpr u32 kStageSteps = 4;  // k16 instructions per stage
    static constexpr u32 kLoadRegisters = kLoad;
    static constexpr u32 kMathRegisters = (3 * 168 - kLoad) / 16 * 8;

    PK_DEVICE static void take_load_registers() { ptx::register_shrink<kLoadRegisters>(); }

    PK_DEVICE static void take_math_registers() { ptx::register_grow<kMathRegisters>(); }

    template <bool kMnMajorA, bool kMnMajorB>
    PK_DEVICE static void start_stage(Accum& acc, u32 a, u32 b, bool accumulate) {
        const u64 desc_a = kMnMajorA ? mn_major(a) : k_major(a);
        const u64 desc_b = kMnMajorB ? mn_major(b) : k_major(b);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < kStageSteps; ++k) {
            ptx::Wgmma<256, kMnMajorA, kMnMajorB>::issue(
                acc, desc_a + k * k16_step(kMnMajorA), desc_b + k * k16_step(kMnMajorB),
                k > 0 || accumulate);
        }
        ptx::wgmma_commit();
    }

    template <int N>
    PK_DEVICE static void wait_stages() {
        ptx::wgmma_wait<N>();
    }

    PK_DEVICE static void finish(Accum& acc) {
#pragma unroll
        for (u32 i = 0; i < kAccum; ++i)
            ptx::wgmma_pin(acc[i]);
    }
};

using Hopper = HopperWith<88>;
// Pulling from peers takes more addresses than copying from one place.
#ifdef PK_PROFILE
// A build that records wants a few more, or it spills.
using HopperPulls = HopperWith<112>;
#else
using HopperPulls = HopperWith<104>;
#endif
static_assert(Policy<Hopper> && Policy<HopperPulls>);

}  // namespace prime::mma
