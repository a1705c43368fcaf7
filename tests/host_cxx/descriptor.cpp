// SPDX-License-Identifier: Apache-2.0
// mma/descriptor.cuh: the bits of a wgmma matrix descriptor, and what they mean for tiles that TMA
// has written.
//
// Bit fields and canonical layouts as the PTX ISA states them (wgmma, matrix descriptor format and
// strides): start address 0-13, leading dimension 16-29, stride dimension 32-45, all in units of 16
// bytes; base offset 49-51; swizzle 62-63.
#include "mma/descriptor.cuh"

#include <initializer_list>

#include "check.hpp"
#include "layout/gemm_smem.cuh"

using namespace prime;
using namespace prime::mma;

namespace {

constexpr u32 kSmemEnd = 232448;
constexpr u32 kSwizzle128 = 1;

struct Fields {
    u32 start, leading, stride, base_offset, swizzle;
    u64 rest;  // bits that have to be zero
};

u64 field(u64 desc, u32 low, u32 bits) {
    return desc / (1ull << low) % (1ull << bits);
}

Fields decode(u64 desc) {
    Fields f{static_cast<u32>(field(desc, 0, 14)) * 16,  static_cast<u32>(field(desc, 16, 14)) * 16,
             static_cast<u32>(field(desc, 32, 14)) * 16, static_cast<u32>(field(desc, 49, 3)),
             static_cast<u32>(field(desc, 62, 2)),       0};
    f.rest = field(desc, 14, 2) | field(desc, 30, 2) | field(desc, 46, 3) | field(desc, 52, 10);
    return f;
}

u32 swizzle128(u32 address) {
    return address ^ (address >> 7 & 7) << 4;
}

// Where the tensor core looks for element (mn, k) of one k16 step. T = 8 for bf16.
u32 k_major_address(const Fields& f, u32 mn, u32 k) {  // ((8, m), (T, 2)) : ((8T, stride), (1, T))
    return swizzle128(f.start + mn % 8 * 128 + mn / 8 * f.stride + k * 2);
}

u32 mn_major_address(
    const Fields& f, u32 mn, u32 k) {  // ((T, 8, m), (8, k)) : ((1, T, leading), (8T, stride))
    return swizzle128(f.start + mn % 64 * 2 + mn / 64 * f.leading + k % 8 * 128 + k / 8 * f.stride);
}

// Where TMA put it: boxes of 128-byte rows, swizzled, one behind the other.
u32 written_k_major(u32 base, u32 mn, u32 k) {
    return base + mn * 128 + ((k / 8 ^ mn % 8) * 16 + k % 8 * 2);
}

u32 written_mn_major(u32 base, u32 mn, u32 k) {
    return base + mn / 64 * 8192 + k * 128 + ((mn % 64 / 8 ^ k % 8) * 16 + mn % 8 * 2);
}

void check_tile(u32 base, u32 rows) {
    for (u32 mn = 0; mn < rows; ++mn)
        for (u32 k = 0; k < 64; ++k) {
            const u32 step = k / 16;
            const Fields by_k = decode(k_major(base) + step * k16_step(false));
            CHECK(
                k_major_address(by_k, mn, k % 16) == written_k_major(base, mn, k),
                "base %u row %u k %u", base, mn, k);
            const Fields by_mn = decode(mn_major(base) + step * k16_step(true));
            CHECK(
                mn_major_address(by_mn, mn, k % 16) == written_mn_major(base, mn, k),
                "base %u mn %u k %u", base, mn, k);
        }
}

}  // namespace

CASE(bit_fields_of_both_layouts_are_those_of_the_ptx_isa) {
    for (u32 addr = 0; addr < kSmemEnd; addr += 16) {
        const Fields k = decode(k_major(addr)), mn = decode(mn_major(addr));
        CHECK(
            k.start == addr && mn.start == addr, "address %u: starts %u and %u", addr, k.start,
            mn.start);
        CHECK(
            k.stride == 1024 && mn.stride == 1024, "address %u: strides %u and %u", addr, k.stride,
            mn.stride);
        CHECK(
            k.leading == 16 && mn.leading == 8192, "address %u: leading %u and %u", addr, k.leading,
            mn.leading);
        CHECK(
            k.swizzle == kSwizzle128 && mn.swizzle == kSwizzle128, "swizzles %u and %u", k.swizzle,
            mn.swizzle);
        CHECK(
            k.base_offset == 0 && mn.base_offset == 0 && k.rest == 0 && mn.rest == 0, "address %u",
            addr);
    }
}

CASE(any_offsets_land_in_their_own_fields) {
    test::Random random(1);
    for (u32 i = 0; i < 100000; ++i) {
        const u32 addr = random.below(1 << 14) * 16, leading = random.below(1 << 14) * 16;
        const u32 stride = random.below(1 << 14) * 16;
        const Fields f = decode(descriptor(addr, leading, stride));
        CHECK(
            f.start == addr && f.leading == leading && f.stride == stride && f.rest == 0 &&
                f.swizzle == kSwizzle128,
            "descriptor(%u, %u, %u)", addr, leading, stride);
    }
}

CASE(the_window_bits_of_a_shared_address_do_not_reach_other_fields) {
    for (u32 high = 1; high < 1u << 14; high *= 2) {
        const u32 addr = high << 18 | 4096;
        CHECK(
            k_major(addr) == k_major(4096) && mn_major(addr) == mn_major(4096), "address %08x",
            addr);
    }
}

CASE(a_k16_step_moves_the_start_address_and_nothing_else) {
    for (u32 base = 0; base + layout::kStageBytesB <= kSmemEnd; base += 1024)
        for (u32 step = 1; step < 4; ++step) {
            CHECK(
                k_major(base) + step * k16_step(false) == k_major(base + step * 32),
                "base %u step %u", base, step);
            CHECK(
                mn_major(base) + step * k16_step(true) == mn_major(base + step * 2048),
                "base %u step %u", base, step);
        }
}

CASE(the_tensor_core_reads_every_element_where_tma_has_written_it) {
    for (const u32 base :
         {0u, 1024u, 7168u, 131072u, kSmemEnd / 1024 * 1024 - layout::kStageBytesB})
        check_tile(base, layout::kTileN);
    for (u32 warpgroup = 0; warpgroup < 2; ++warpgroup)
        check_tile(5 * 1024 + warpgroup * layout::kStageBytesA / 2, layout::kTileM / 2);
}
