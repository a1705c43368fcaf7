// SPDX-License-Identifier: Apache-2.0
// ptx/regs.cuh: moving registers between warpgroups. Every warp of a warpgroup must execute the
// same call. Layer: ptx.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

template <int N>
PK_DEVICE void register_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
PK_DEVICE void register_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace prime::ptx
