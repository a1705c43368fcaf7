// SPDX-License-Identifier: Apache-2.0
// layout/slab.cuh: the 64 x 64 bf16 slab under the 128-byte swizzle.
#include "layout/slab.cuh"

#include <vector>

#include "check.hpp"

using namespace prime;
using namespace prime::layout;

namespace {

constexpr u32 kChunk = 16;           // bytes
constexpr u32 kPhaseBytes = 8 * 16;  // what shared memory moves at once: every bank, 4 bytes each

// The 128-byte swizzle as TMA defines it on shared addresses: bits 4-6 are XORed with bits 7-9.
u32 swizzle128(u32 address) {
    return address ^ (address >> 7 & 7) << 4;
}

}  // namespace

static_assert(kSlabBytes == 8192);

CASE(chunks_fill_the_slab_exactly_once) {
    std::vector<u32> seen(kSlabBytes / kChunk, 0);
    for (u32 row = 0; row < kSlabRows; ++row)
        for (u32 chunk = 0; chunk < kSlabCols * 2 / kChunk; ++chunk) {
            const u32 at = slab_offset(row, chunk);
            CHECK(at % kChunk == 0 && at < kSlabBytes, "row %u chunk %u at %u", row, chunk, at);
            ++seen[at / kChunk];
        }
    for (u32 i = 0; i < seen.size(); ++i)
        CHECK(seen[i] == 1, "chunk at byte %u used %u times", i * kChunk, seen[i]);
}

CASE(a_chunk_lies_where_the_128_byte_swizzle_puts_it) {
    for (u32 base = 0; base < 232448 - kSlabBytes; base += 1024)
        for (u32 row = 0; row < kSlabRows; ++row)
            for (u32 chunk = 0; chunk < 8; ++chunk)
                CHECK(
                    base + slab_offset(row, chunk) == swizzle128(base + row * 128 + chunk * kChunk),
                    "base %u row %u chunk %u at %u", base, row, chunk, slab_offset(row, chunk));
}

CASE(fragments_of_four_warps_touch_every_chunk_exactly_once) {
    std::vector<u32> seen(kSlabBytes / kChunk, 0);
    for (u32 warp = 0; warp < 4; ++warp)
        for (u32 col16 = 0; col16 < 4; ++col16)
            for (u32 lane = 0; lane < 32; ++lane) {
                const u32 at = fragment_offset(warp * 16, col16, lane);
                CHECK(
                    at % kChunk == 0 && at < kSlabBytes, "warp %u columns %u lane %u at %u", warp,
                    col16, lane, at);
                ++seen[at / kChunk];
            }
    for (u32 i = 0; i < seen.size(); ++i)
        CHECK(seen[i] == 1, "chunk at byte %u touched %u times", i * kChunk, seen[i]);
}

CASE(matrices_of_a_fragment_stand_in_accumulator_order) {
    for (u32 warp = 0; warp < 4; ++warp)
        for (u32 col16 = 0; col16 < 4; ++col16)
            for (u32 matrix = 0; matrix < 4; ++matrix)
                for (u32 i = 0; i < 8; ++i) {
                    const u32 row = warp * 16 + (matrix == 1 || matrix == 3 ? 8 : 0) + i;
                    const u32 column = col16 * 16 + (matrix >= 2 ? 8 : 0);
                    const u32 expected = swizzle128(row * 128 + column * 2);
                    CHECK(
                        fragment_offset(warp * 16, col16, matrix * 8 + i) == expected,
                        "matrix %u row %u", matrix, i);
                }
}

CASE(the_eight_rows_of_a_matrix_lie_in_different_banks) {
    for (u32 warp = 0; warp < 4; ++warp)
        for (u32 col16 = 0; col16 < 4; ++col16)
            for (u32 matrix = 0; matrix < 4; ++matrix) {
                u32 groups = 0;
                for (u32 i = 0; i < 8; ++i)
                    groups |= 1u << fragment_offset(warp * 16, col16, matrix * 8 + i) %
                                        kPhaseBytes / kChunk;
                CHECK(
                    groups == 0xFF, "warp %u columns %u matrix %u: bank groups %02x", warp, col16,
                    matrix, groups);
            }
}
