// SPDX-License-Identifier: Apache-2.0
// mma/policy.cuh: what roles/ and epilogue/ may know of the tensor cores: the fragment a math
// thread holds, and the contract of the policy that moe/ passes in as Op::Mma.
//
// Layer:      mma.
//
// Fragment:   a warpgroup holds 64 rows x 256 columns; thread (warp w, lane l) rows 16w + l/4 and
//             that + 8; values 4j .. 4j+3 are columns 8j + 2(l%4) and + 1 of the first row, then of
//             the second.
#pragma once
#include "../common/types.cuh"

namespace prime::mma {

constexpr u32 kAccum = 128;  // fp32 values per thread

using Accum = float[kAccum];

// start_stage: starts one 64-wide stage; `a` and `b` are its shared addresses for this warpgroup.
// wait_stages<N>: until at most N started stages still run. finish: the accumulators may be read.
// take_*_registers: once per role; every warp of a warpgroup together.
template <class M>
concept Policy = requires(Accum& acc, u32 addr) {
    M::template start_stage<false, true>(acc, addr, addr, true);
    M::template wait_stages<1>();
    M::finish(acc);
    M::take_load_registers();
    M::take_math_registers();
    requires M::kLoadRegisters + 2 * M::kMathRegisters <= 3 * 168;  // what 384 threads launch with
};

}  // namespace prime::mma
