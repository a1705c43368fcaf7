// SPDX-License-Identifier: Apache-2.0
// layout/gemm_smem.cuh: the shared memory of a grouped GEMM: operand stages, epilogue slabs,
// barriers, tile ring.
//
// Layer:      layout. Host and device; the only description of that memory.
#pragma once
#include "../common/types.cuh"
#include "slab.cuh"

namespace prime::layout {

constexpr u32 kTileM = 128;
constexpr u32 kTileN = 256;
constexpr u32 kStageK = 64;
constexpr u32 kStageBytesA = kTileM * kStageK * 2;
constexpr u32 kStageBytesB = kTileN * kStageK * 2;
constexpr u32 kSmemAlign = 1024;  // of slabs and stages, for the 128-byte swizzle

// Offsets from a base aligned to kSmemAlign. Slabs are per math warpgroup.
template <u32 kStages, u32 kSlabs>
struct GemmSmem {
    static constexpr u32 kA = 0;
    static constexpr u32 kB = kStages * kStageBytesA;
    static constexpr u32 kSlab = kB + kStages * kStageBytesB;
    static constexpr u32 kTiles = kSlab + 2 * kSlabs * kSlabBytes;
    static constexpr u32 kStageFull = kTiles + 4 * 32;
    static constexpr u32 kStageEmpty = kStageFull + 8 * kStages;
    static constexpr u32 kTileFull = kStageEmpty + 8 * kStages;
    static constexpr u32 kTileEmpty = kTileFull + 8 * 4;
    static constexpr u32 kSlabFull = kTileEmpty + 8 * 4;  // two per math warpgroup
    static constexpr u32 kEnd = kSlabFull + 8 * 4;
    static constexpr u32 kBytes = kEnd + kSmemAlign;  // the base is aligned by hand
    static_assert(kBytes <= 232448, "one CTA of an SM gets at most 227 KB");
};

}  // namespace prime::layout
