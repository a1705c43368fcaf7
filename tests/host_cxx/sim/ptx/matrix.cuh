// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/matrix.cuh. Lane l holds elements 2 (l % 4) and + 1 of row l / 4 of a matrix.
#pragma once
#include "../common/types.cuh"
#include "sim/builtins.hpp"

namespace prime::ptx {

inline void stmatrix_x4(u32 addr, u32 r0, u32 r1, u32 r2, u32 r3) {
    const u32 words[4] = {r0, r1, r2, r3};
    const u32 lane = sim::machine->self().lane();
    for (u32 m = 0; m < 4; ++m) {
        const auto* slots = sim::exchange(~0u, words[m], "stmatrix");
        u32 row[4];
        for (u32 i = 0; i < 4; ++i)
            row[i] = static_cast<u32>(slots[lane % 8 * 4 + i]);
        if (lane / 8 == m) sim::memory.write(addr, row, sizeof(row));
    }
}

inline void ldmatrix_x4(u32 addr, u32& r0, u32& r1, u32& r2, u32& r3) {
    u32* words[4] = {&r0, &r1, &r2, &r3};
    const u32 lane = sim::machine->self().lane();
    const auto* slots = sim::exchange(~0u, addr, "ldmatrix");
    for (u32 m = 0; m < 4; ++m) {
        const u32 row = static_cast<u32>(slots[m * 8 + lane / 4]);
        std::memcpy(words[m], sim::memory.at(row + lane % 4 * 4, 4), 4);
    }
}

// Nearest even; a NaN keeps being one.
inline u32 bf16_bits(float value) {
    const u32 bits = __float_as_uint(value);
    if (std::isnan(value)) return bits >> 16 | 0x40;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline u32 pack_bf16(float lo, float hi) {
    return bf16_bits(lo) | bf16_bits(hi) << 16;
}

inline float bf16_lo(u32 packed) {
    return __uint_as_float(packed << 16);
}

inline float bf16_hi(u32 packed) {
    return __uint_as_float(packed & 0xFFFF0000u);
}

inline float exp2_approx(float x) {
    return std::exp2(x);
}

inline float rcp_approx(float x) {
    return 1.0f / x;
}

}  // namespace prime::ptx
