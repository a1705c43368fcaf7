// SPDX-License-Identifier: Apache-2.0
// common/types.cuh: fixed-width names and the few macros every device header uses. No std headers:
// NVRTC compiles this as it is. Layer: common. Included by everything.
#pragma once

#define PK_DEVICE __device__ __forceinline__
#define PK_HOST_DEVICE __host__ __device__ __forceinline__

namespace prime {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Raw bf16 bits. Arithmetic happens in fp32; only loads, stores and conversions touch this type.
struct bf16 {
    u16 bits;
};

// The 128 opaque bytes of a CUtensorMap, passed by value as a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

template <typename T>
PK_HOST_DEVICE constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
PK_HOST_DEVICE constexpr T align_up(T a, T b) {
    return ceil_div(a, b) * b;
}

template <typename T>
PK_HOST_DEVICE constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
PK_HOST_DEVICE constexpr T max_of(T a, T b) {
    return a < b ? b : a;
}

}  // namespace prime
