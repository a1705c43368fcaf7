// SPDX-License-Identifier: Apache-2.0
// shim.hpp: what a host compiler has to know to read device headers. Force-included before
// everything; changes no logic.
//
// Functions that need other threads are declared here and defined in sim/.
#pragma once
#include <cmath>

#define __host__
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline

struct uint4 {
    unsigned x, y, z, w;
};

struct Dim3 {
    unsigned x, y, z;
};

// Of the simulated thread that runs now; headers that only compute never read them.
inline Dim3 threadIdx{0, 0, 0};
inline Dim3 blockIdx{0, 0, 0};
inline Dim3 blockDim{1, 1, 1};
inline Dim3 gridDim{1, 1, 1};

void __syncthreads();
int __syncthreads_and(int predicate);
void __syncwarp(unsigned mask = ~0u);
void __threadfence_system();
unsigned __activemask();
unsigned __ballot_sync(unsigned mask, int predicate);
unsigned __match_any_sync(unsigned mask, unsigned value);
unsigned long __cvta_generic_to_shared(const void* pointer);
template <class T>
T __shfl_sync(unsigned mask, T value, int lane);
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta);
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits);
template <class T>
T atomicAdd(T* address, T value);
template <class T>
T atomicMax(T* address, T value);
template <class T>
T atomicCAS(T* address, T expected, T value);

inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}

inline int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}

inline float __uint_as_float(unsigned bits) {
    return __builtin_bit_cast(float, bits);
}

inline unsigned __float_as_uint(float value) {
    return __builtin_bit_cast(unsigned, value);
}

inline float __fadd_rn(float a, float b) {
    return a + b;
}

inline float __fmul_rn(float a, float b) {
    return a * b;
}
