// SPDX-License-Identifier: Apache-2.0
// layout/slab.cuh: where element (row, column) of a 64-row x 64-column bf16 slab lies in shared
// memory. Layer: layout. Host and device.
//
// A slab is what one TMA box {64 columns, 64 rows} with the 128-byte swizzle reads or writes: rows
// of 128 bytes whose eight 16-byte chunks are permuted by the row's low three bits. Slabs start on
// 1,024-byte boundaries.
#pragma once
#include "../common/types.cuh"

namespace prime::layout {

constexpr u32 kSlabRows = 64;
constexpr u32 kSlabCols = 64;
constexpr u32 kSlabBytes = kSlabRows * kSlabCols * 2;

// Byte offset of the 16-byte chunk `chunk` (0..7) of `row`.
PK_HOST_DEVICE constexpr u32 slab_offset(u32 row, u32 chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// Chunk address for one lane of a 16-row x 16-column ldmatrix/stmatrix.x4: matrices in the order
// (rows 0-7, cols 0-7), (rows 8-15, cols 0-7), (rows 0-7, cols 8-15), (rows 8-15, cols 8-15), which
// is the wgmma accumulator order.
PK_HOST_DEVICE constexpr u32 fragment_offset(u32 warp_row0, u32 col16, u32 lane) {
    return slab_offset(warp_row0 + (lane & 15), col16 * 2 + (lane >> 4));
}

}  // namespace prime::layout
