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

PK_DEVICE void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

PK_DEVICE void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Barrier `id` (1..15) among `threads` threads of the CTA.
PK_DEVICE void named_barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace prime::ptx
