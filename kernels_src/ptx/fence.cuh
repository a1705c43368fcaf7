// SPDX-License-Identifier: Apache-2.0
// ptx/fence.cuh: fences and named barriers. Every call site names the pair that it orders.
// Layer: ptx.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

// Orders this thread's generic accesses to shared memory with later async-proxy accesses (TMA,
// tensor cores).
PK_DEVICE void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory.
PK_DEVICE void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders everything this thread wrote or has seen written with its later accesses, for every GPU
// of the system.
PK_DEVICE void fence_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Barrier `id` (1..15) among `threads` threads of the CTA.
PK_DEVICE void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same barrier; true in all of them when `value` is true in any.
PK_DEVICE bool named_barrier_any(u32 id, u32 threads, bool value) {
    u32 any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<u32>(value))
        : "memory");
    return any != 0;
}

}  // namespace prime::ptx
