// SPDX-License-Identifier: Apache-2.0
// ptx/mbarrier.cuh: shared-memory barriers that count arrivals and bytes.
// Layer: ptx. Addresses are 32-bit shared-window addresses (ptx::smem_addr).
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

PK_DEVICE u32 smem_addr(const void* ptr) {
    return static_cast<u32>(__cvta_generic_to_shared(ptr));
}

PK_DEVICE void mbarrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Orders the inits above before remote arrivals and TMA completions of the whole cluster.
PK_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PK_DEVICE void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives on the barrier at the same offset in CTA `cta` of the cluster. No .release.cluster: that
// form costs a MEMBAR.ALL.GPU per call, and what it announces here are finished wgmma reads, which
// no later write can overtake.
PK_DEVICE void mbarrier_arrive_remote(u32 bar, u32 cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(bar),
        "r"(cta)
        : "memory");
}

PK_DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

// Whether the phase with parity `phase` has completed, without waiting.
PK_DEVICE bool mbarrier_test_wait(u32 bar, u32 phase) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(bar), "r"(phase)
        : "memory");
    return done != 0;
}

// One bounded hardware wait; true once the phase with parity `phase` has completed.
PK_DEVICE bool mbarrier_try_wait(u32 bar, u32 phase) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(bar), "r"(phase)
        : "memory");
    return done != 0;
}

}  // namespace prime::ptx
