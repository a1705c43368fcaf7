// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/regs.cuh.
#pragma once

namespace prime::ptx {

template <int N>
void register_grow() {}

template <int N>
void register_shrink() {}

}  // namespace prime::ptx
