// SPDX-License-Identifier: Apache-2.0
// ptx/tma.cuh: bulk tensor copies between global and shared memory, and their completion groups.
// Layer: ptx. Coordinates are innermost first, as in the tensor map.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

// L2 eviction hints as the hardware encodes them (createpolicy.fractional with fraction 1.0).
constexpr u64 kEvictNormal = 0x1000000000000000ull;
constexpr u64 kEvictFirst = 0x12F0000000000000ull;

PK_DEVICE void tma_load_2d(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "l"(hint)
        : "memory");
}

PK_DEVICE void tma_load_3d(
    u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "l"(hint)
        : "memory");
}

PK_DEVICE void tma_load_4d(
    u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
        : "memory");
}

// Writes the box to the same shared offset of every CTA in `mask` and completes on each one's own
// barrier.
PK_DEVICE void tma_load_4d_multicast(
    u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3, u16 mask, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask), "l"(hint)
        : "memory");
}

PK_DEVICE void tma_store_2d(const TensorMap* map, u32 src, i32 c0, i32 c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(src), "r"(c0), "r"(c1)
        : "memory");
}

PK_DEVICE void tma_store_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// Adds the box to memory instead of overwriting it: one atomic addition per element, rounded to
// nearest. Belongs to the same groups as the stores.
PK_DEVICE void tma_add_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], "
        "[%1];" ::"l"(map),
        "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

PK_DEVICE void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's store groups may still read shared memory.
template <int N>
PK_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until at most N of this thread's store groups are not yet visible in global memory.
template <int N>
PK_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace prime::ptx
