// SPDX-License-Identifier: Apache-2.0
// ptx/ld_st.cuh: loads and stores with a stated scope or width.
// Layer: ptx.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

PK_DEVICE u32 ld_acquire_gpu(const u32* ptr) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
    return v;
}

PK_DEVICE void red_add_release_gpu(u32* ptr, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(ptr), "r"(v) : "memory");
}

PK_DEVICE u32 ld_acquire_sys(const u32* ptr) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(ptr) : "memory");
    return v;
}

PK_DEVICE void st_release_sys(u32* ptr, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(ptr), "r"(v) : "memory");
}

PK_DEVICE u32 atom_add_acq_rel_gpu(u32* ptr, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(ptr), "r"(v)
                 : "memory");
    return old;
}

// 16 bytes that another SM or another GPU may have written during this launch: kept out of L1.
PK_DEVICE uint4 ld_v4(const void* ptr) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(ptr)
                 : "memory");
    return v;
}

// 16 bytes that no other thread will want again: keeps them out of L1.
PK_DEVICE uint4 ld_nc_v4(const void* ptr) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(ptr));
    return v;
}

PK_DEVICE void st_v4(void* ptr, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(ptr), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// Asks for the 32 bytes around `ptr` to be brought to the L2; nothing waits for them.
PK_DEVICE void prefetch_l2(const void* ptr) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(ptr));
}

PK_DEVICE void st_shared_v4(u32 addr, i32 a, i32 b, i32 c, i32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

PK_DEVICE void ld_shared_v4(u32 addr, i32& a, i32& b, i32& c, i32& d) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(addr)
                 : "memory");
}

PK_DEVICE void st_shared_f32x2(u32 addr, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(a), "f"(b) : "memory");
}

// The dynamic shared memory of a kernel that keeps plain words in it.
PK_DEVICE u32* dynamic_smem_words() {
    extern __shared__ u32 words[];
    return words;
}

// The word at the same shared offset in CTA `cta` of the cluster.
PK_DEVICE u32 ld_cluster_u32(const u32* own, u32 cta) {
    u32 v;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [remote];\n"
        "}\n"
        : "=r"(v)
        : "r"(static_cast<u32>(__cvta_generic_to_shared(own))), "r"(cta)
        : "memory");
    return v;
}

PK_DEVICE u64 global_timer_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// The lower half of the same clock.
PK_DEVICE u32 global_timer_lo_ns() {
    u32 t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t;
}

}  // namespace prime::ptx
