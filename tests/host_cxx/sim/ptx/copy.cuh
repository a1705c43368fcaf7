// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/copy.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/async_copies.hpp"

namespace prime::ptx {

inline void copy_async_16(u32 dst, const void* src, bool exists) {
    sim::copy_16(dst, src, exists);
}

inline void copy_async_commit() {
    sim::own_async().groups.emplace_back();
    sim::own_async().places.emplace_back();
}

template <int N>
void copy_async_wait() {
    sim::own_async().wait(N);
}

}  // namespace prime::ptx
