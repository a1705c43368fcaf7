// SPDX-License-Identifier: Apache-2.0
// layout/gemm_smem.cuh: the shared memory of every grouped GEMM that variants.toml ships.
#include "check.hpp"
#include "variants.hpp"  // generated: EACH_VARIANT(X) with X(key, max_regs, type)

using namespace prime;

namespace {

constexpr u32 kMaxSmem = 232448;                 // bytes that one CTA may have
constexpr u32 kBarrier = 8;                      // bytes
constexpr u32 kWarpgroups = 2;                   // that multiply
constexpr u32 kMaxTransaction = (1u << 20) - 1;  // bytes that one phase of an mbarrier can count

struct Region {
    const char* name;
    u32 begin, bytes, align;

    u32 end() const { return begin + bytes; }
};

template <class Smem>
struct Layout;

template <u32 kStages_, u32 kSlabs_>
struct Layout<layout::GemmSmem<kStages_, kSlabs_>> {
    using Smem = layout::GemmSmem<kStages_, kSlabs_>;
    static constexpr u32 kStages = kStages_;
    static constexpr u32 kSlabs = kSlabs_;
    static constexpr u32 kTileEntries = pipeline::kTileRingDepth;
    static constexpr Region kRegions[] = {
        {"A stages", Smem::kA, kStages * 128 * 64 * 2, 1024},
        {"B stages", Smem::kB, kStages * 256 * 64 * 2, 1024},
        {"slabs", Smem::kSlab, kWarpgroups * kSlabs * 64 * 64 * 2, 1024},
        {"tiles", Smem::kTiles, kTileEntries * sizeof(pipeline::Tile), 32},
        {"full stages", Smem::kStageFull, kStages * kBarrier, kBarrier},
        {"empty stages", Smem::kStageEmpty, kStages * kBarrier, kBarrier},
        {"full tiles", Smem::kTileFull, kTileEntries * kBarrier, kBarrier},
        {"empty tiles", Smem::kTileEmpty, kTileEntries * kBarrier, kBarrier},
        {"full slabs", Smem::kSlabFull, kWarpgroups * 2 * kBarrier, kBarrier},
    };
};

template <class Kernel>
concept Gemm = requires { typename Kernel::Smem; };

// Calls run<Kernel>(key) for every variant that has such a memory.
template <class F>
void each_gemm(F&& run) {
    const auto visit = [&]<class Kernel>(const char* key) {
        if constexpr (Gemm<Kernel>) run.template operator()<Kernel>(key);
    };
#define VISIT(key, max_regs, ...) visit.template operator()<prime::__VA_ARGS__>(key);
    EACH_VARIANT(VISIT)
#undef VISIT
}

}  // namespace

CASE(regions_do_not_overlap_and_end_inside) {
    each_gemm([]<class Kernel>(const char* key) {
        using L = Layout<typename Kernel::Smem>;
        for (const Region& a : L::kRegions) {
            CHECK(
                a.bytes > 0 && a.end() <= Kernel::Smem::kEnd, "%s: %s end at %u", key, a.name,
                a.end());
            for (const Region& b : L::kRegions)
                CHECK(
                    &a == &b || a.end() <= b.begin || b.end() <= a.begin, "%s: %s and %s", key,
                    a.name, b.name);
        }
    });
}

CASE(regions_are_aligned_for_what_lies_in_them) {
    each_gemm([]<class Kernel>(const char* key) {
        for (const Region& r : Layout<typename Kernel::Smem>::kRegions)
            CHECK(
                r.begin % r.align == 0, "%s: %s begin at %u, not a multiple of %u", key, r.name,
                r.begin, r.align);
    });
}

CASE(one_cta_gets_that_much_wherever_its_memory_starts) {
    each_gemm([]<class Kernel>(const char* key) {
        using Smem = typename Kernel::Smem;
        CHECK(Smem::kBytes <= kMaxSmem, "%s: %u bytes", key, Smem::kBytes);
        for (u32 start = 0; start < 2048; start += 16) {
            const u32 base = align_up(start, layout::kSmemAlign);
            CHECK(
                base % 1024 == 0 && base + Smem::kEnd <= start + Smem::kBytes, "%s: from %u", key,
                start);
        }
    });
}

CASE(the_launch_asks_for_the_memory_that_the_kernel_lays_out) {
    each_gemm([]<class Kernel>(const char* key) {
        CHECK(
            Kernel::kLaunch.smem_bytes == Kernel::Smem::kBytes,
            "%s: %u bytes asked for, %u laid out", key, Kernel::kLaunch.smem_bytes,
            Kernel::Smem::kBytes);
        CHECK(
            Kernel::kStages == Layout<typename Kernel::Smem>::kStages, "%s: %u stages", key,
            Kernel::kStages);
    });
}

CASE(a_stage_announces_exactly_the_bytes_that_are_loaded_into_it) {
    using pipeline::Tile;
    each_gemm([]<class Kernel>(const char* key) {
        for (i32 valid = 0; valid <= 128; ++valid)
            for (i32 multicast = 0; multicast < 2; ++multicast) {
                const u32 halves = Kernel::kMnMajorA ? 2 * (valid > 0)
                                                     : (valid > 64  ? 2
                                                        : valid > 0 ? 1
                                                                    : 0);
                const bool weights = valid > 0 || multicast;
                // A weight gradient always shares B.
                if (Kernel::kMnMajorA && !multicast) continue;
                const u32 expected = halves * 8192 + (weights ? 32768 : 0);
                const u32 bytes = Kernel::bytes(Tile{.valid = valid, .multicast = multicast});
                CHECK(
                    bytes == expected && bytes <= kMaxTransaction,
                    "%s: valid %d multicast %d: %u bytes", key, valid, multicast, bytes);
            }
    });
}
