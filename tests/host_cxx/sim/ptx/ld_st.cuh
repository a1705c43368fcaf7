// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/ld_st.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline u32 ld_acquire_gpu(const u32* ptr) {
    sim::machine->poll("ld_acquire_gpu");
    return *ptr;
}

inline void red_add_release_gpu(u32* ptr, u32 v) {
    atomicAdd(ptr, v);
}

inline uint4 ld_nc_v4(const void* ptr) {
    return *static_cast<const uint4*>(ptr);
}

inline void st_v4(void* ptr, uint4 v) {
    *static_cast<uint4*>(ptr) = v;
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

inline u64 global_timer_ns() {
    return sim::machine->now_ns;
}

}  // namespace prime::ptx
