// SPDX-License-Identifier: Apache-2.0
// mma/descriptor.cuh: wgmma shared-memory descriptors for the two tile layouts in use, both with
// the 128-byte swizzle. Layer: mma. Host and device, so that a CPU test can compare the encodings
// with an oracle.
//
// K-major tile:  [rows][64 k], 128 bytes a row; 8 rows are one swizzle atom of 1,024 bytes.
// MN-major tile: [blocks of 64 mn][64 k][64 mn], 128 bytes a k-row; a block is 8,192 bytes.
#pragma once
#include "../common/types.cuh"

namespace prime::mma {

constexpr u32 kSwizzleAtomBytes = 1024;
constexpr u32 kMnBlockBytes = 64 * 128;

PK_HOST_DEVICE constexpr u64 descriptor(u32 addr, u32 leading_bytes, u32 stride_bytes) {
    return static_cast<u64>((addr & 0x3FFFF) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | 1ull << 62;
}

// `addr` may point at any multiple of 16 k (32 bytes) inside the first row.
PK_HOST_DEVICE constexpr u64 k_major(u32 addr) {
    return descriptor(addr, 16, kSwizzleAtomBytes);
}

// `addr` may point at any multiple of 16 k (2,048 bytes) inside the first block.
PK_HOST_DEVICE constexpr u64 mn_major(u32 addr) {
    return descriptor(addr, kMnBlockBytes, kSwizzleAtomBytes);
}

// Bytes between two k16 steps, in descriptor units of 16 bytes.
PK_HOST_DEVICE constexpr u64 k16_step(bool is_mn_major) {
    return (is_mn_major ? 2048 : 32) >> 4;
}

}  // namespace prime::mma
