// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/ld_st.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline u32 ld_acquire_gpu(const u32* ptr) {
    sim::machine->poll("ld_acquire_gpu");
    sim::remote.acquire(ptr);
    return *ptr;
}

inline u32 ld_acquire_sys(const u32* ptr) {
    sim::machine->poll("ld_acquire_sys");
    return *ptr;
}

inline void st_release_sys(u32* ptr, u32 v) {
    sim::remote.fence();
    *ptr = v;
    sim::machine->happened();
}

inline u32 atom_add_acq_rel_gpu(u32* ptr, u32 v) {
    sim::remote.release(ptr);
    sim::remote.acquire(ptr);
    return atomicAdd(ptr, v);
}

inline uint4 ld_v4(const void* ptr) {
    return *static_cast<const uint4*>(ptr);
}

inline void red_add_release_gpu(u32* ptr, u32 v) {
    sim::remote.release(ptr);
    atomicAdd(ptr, v);
}

inline uint4 ld_nc_v4(const void* ptr) {
    return *static_cast<const uint4*>(ptr);
}

inline void st_v4(void* ptr, uint4 v) {
    const auto write = [ptr, v] { *static_cast<uint4*>(ptr) = v; };
    if (sim::remote.is_remote(ptr))
        sim::remote.write(write);
    else
        write();
}

inline void prefetch_l2(const void* ptr) {
    // Nobody owns what it reads, but it has to be there.
    static_cast<void>(*static_cast<const volatile u8*>(ptr));
}

inline void st_shared_v4(u32 addr, i32 a, i32 b, i32 c, i32 d) {
    const i32 words[4] = {a, b, c, d};
    sim::memory.write(addr, words, sizeof(words));
}

inline void ld_shared_v4(u32 addr, i32& a, i32& b, i32& c, i32& d) {
    i32 words[4];
    std::memcpy(words, sim::memory.at(addr, sizeof(words)), sizeof(words));
    a = words[0], b = words[1], c = words[2], d = words[3];
}

inline void st_shared_f32x2(u32 addr, float a, float b) {
    const float words[2] = {a, b};
    sim::memory.write(addr, words, sizeof(words));
}

inline u32* dynamic_smem_words() {
    return reinterpret_cast<u32*>(sim::memory.own().bytes.data());
}

inline u32 ld_cluster_u32(const u32* own, u32 cta) {
    const u8* first = sim::memory.own().bytes.data();
    const u64 offset = static_cast<u64>(reinterpret_cast<const u8*>(own) - first);
    std::vector<u8>& bytes = sim::memory.ctas[sim::machine->peer(cta)].bytes;
    CHECK(
        offset % 4 == 0 && offset + 4 <= bytes.size() && cta < sim::machine->shape().cluster,
        "offset %llu of %zu bytes of CTA %u", offset, bytes.size(), cta);
    CHECK(
        sim::machine->running(sim::machine->peer(cta)) > 0, "the memory of CTA %u, which has left",
        cta);
    u32 v;
    std::memcpy(&v, bytes.data() + offset, 4);
    return v;
}

// Whoever asks for the time again and again gives way.
inline u64 global_timer_ns() {
    sim::machine->poll("global_timer_ns");
    return sim::machine->now_ns++;
}

inline u32 global_timer_lo_ns() {
    return static_cast<u32>(global_timer_ns());
}

}  // namespace prime::ptx
