// SPDX-License-Identifier: Apache-2.0
// mma/descriptor.cuh and layout/slab.cuh against CUTLASS: its headers build the same descriptors
// and the same swizzled layouts from their own description. Compiled only where they are at hand.
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

// Shared addresses are made up: what counts is what becomes of them.
inline unsigned long __cvta_generic_to_shared(const void* address) {
    return reinterpret_cast<unsigned long>(address);
}

#include <cute/tensor.hpp>

#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "check.hpp"
#include "layout/gemm_smem.cuh"
#include "mma/descriptor.cuh"

namespace gmma = cute::SM90::GMMA;
using cute::Int;
using cute::Shape;
using prime::u32;
using prime::u64;
using Element = cute::bfloat16_t;

namespace {

constexpr u32 kSmemEnd = 232448;

// rows x 64 of K-major: atoms of 8 rows, one behind the other.
template <int kRows>
using KMajor = decltype(cute::tile_to_shape(
    gmma::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<64>>{}));

// mn x 64 of MN-major: atoms of 64 mn x 8 k, all k of one block of 64 mn first.
template <int kMn>
using MnMajor = decltype(cute::tile_to_shape(
    gmma::Layout_MN_SW128_Atom<Element>{}, Shape<Int<kMn>, Int<64>>{},
    cute::Step<cute::_2, cute::_1>{}));

template <class Layout>
auto tile_at(u32 address) {
    return cute::make_tensor(
        cute::make_smem_ptr(reinterpret_cast<Element*>(static_cast<u64>(address))), Layout{});
}

// What CUTLASS's iterator adds to a descriptor for step `k` of 16.
template <gmma::Major kMajor, class Layout>
u64 cute_descriptor(u32 address, int k) {
    constexpr int kRows = cute::size<0>(Layout{});
    const auto steps = cute::local_tile(
        tile_at<Layout>(address), Shape<Int<kRows>, Int<16>>{}, cute::make_coord(0, cute::_));
    const auto units = cute::recast<cute::uint128_t const>(steps).layout();
    gmma::DescriptorIterator first{gmma::make_gmma_desc<kMajor>(steps(cute::_, cute::_, 0))};
    return (first + units(0, 0, k)).desc_.desc_;
}

template <int kRows>
void check_descriptors() {
    for (u32 address = 0; address + kRows * 128 <= kSmemEnd; address += 1024)
        for (int k = 0; k < 4; ++k) {
            const u64 by_k = prime::mma::k_major(address) + k * prime::mma::k16_step(false);
            const u64 expected_k = cute_descriptor<gmma::Major::K, KMajor<kRows>>(address, k);
            CHECK(by_k == expected_k, "K-major at %u step %d: %016llx", address, k, by_k);
            const u64 by_mn = prime::mma::mn_major(address) + k * prime::mma::k16_step(true);
            const u64 expected_mn = cute_descriptor<gmma::Major::MN, MnMajor<kRows>>(address, k);
            CHECK(by_mn == expected_mn, "MN-major at %u step %d: %016llx", address, k, by_mn);
        }
}

// Byte offset of an element in a layout of CUTLASS, swizzle included.
template <class Layout>
u32 offset(int mn, int k) {
    const auto tile = tile_at<Layout>(0);
    return static_cast<u32>(reinterpret_cast<u64>(cute::raw_pointer_cast(&tile(mn, k))));
}

}  // namespace

CASE(descriptors_are_those_that_cutlass_makes) {
    check_descriptors<128>();
    check_descriptors<256>();
}

// A block of 64 mn has no stride to the next: CUTLASS leaves another number in the unused field.
CASE(descriptors_of_one_warpgroup_differ_at_most_in_the_unused_leading_stride) {
    const u64 field = 0x3FFFull << 16;
    for (u32 address = 0; address + 8192 <= kSmemEnd; address += 1024)
        for (int k = 0; k < 4; ++k) {
            const u64 by_k = prime::mma::k_major(address) + k * prime::mma::k16_step(false);
            const u64 expected_k = cute_descriptor<gmma::Major::K, KMajor<64>>(address, k);
            CHECK(by_k == expected_k, "K-major at %u step %d: %016llx", address, k, by_k);
            const u64 by_mn = prime::mma::mn_major(address) + k * prime::mma::k16_step(true);
            const u64 expected_mn = cute_descriptor<gmma::Major::MN, MnMajor<64>>(address, k);
            CHECK((by_mn | field) == (expected_mn | field), "MN-major at %u step %d", address, k);
        }
}

CASE(tiles_lie_in_shared_memory_as_in_the_layouts_of_cutlass) {
    using prime::layout::slab_offset;
    for (u32 mn = 0; mn < prime::layout::kTileN; ++mn)
        for (u32 k = 0; k < prime::layout::kStageK; ++k) {
            const u32 by_k = mn / 64 * 8192 + slab_offset(mn % 64, k / 8) + k % 8 * 2;
            CHECK(offset<KMajor<256>>(mn, k) == by_k, "K-major row %u k %u", mn, k);
            const u32 by_mn = mn / 64 * 8192 + slab_offset(k, mn % 64 / 8) + mn % 8 * 2;
            CHECK(offset<MnMajor<256>>(mn, k) == by_mn, "MN-major mn %u k %u", mn, k);
        }
}
