// SPDX-License-Identifier: Apache-2.0
// ptx/matrix.cuh: 8x8 matrix moves between registers and shared memory, bf16 conversions, fast fp32
// functions. Layer: ptx.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

// Stores four 8x8 b16 matrices; lane l gives the address of row l % 8 of matrix l / 8.
PK_DEVICE void stmatrix_x4(u32 addr, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Loads four 8x8 b16 matrices; lane l gives the address of row l % 8 of matrix l / 8.
PK_DEVICE void ldmatrix_x4(u32 addr, u32& r0, u32& r1, u32& r2, u32& r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(addr)
                 : "memory");
}

// Rounds two fp32 values to bf16 (nearest even) and packs them, `lo` in the low half.
PK_DEVICE u32 pack_bf16(float lo, float hi) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

PK_DEVICE float bf16_lo(u32 packed) {
    return __uint_as_float(packed << 16);
}

PK_DEVICE float bf16_hi(u32 packed) {
    return __uint_as_float(packed & 0xFFFF0000u);
}

// 2^x, about 2 ulp.
PK_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1/x, about 1 ulp.
PK_DEVICE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace prime::ptx
