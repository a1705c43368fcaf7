// SPDX-License-Identifier: Apache-2.0
// common/launch_meta.cuh: the launch of every variant that ships, against what an SM has.
#include "common/launch_meta.cuh"

#include "check.hpp"
#include "variants.hpp"  // generated: EACH_VARIANT(X) with X(key, max_regs, type)

using namespace prime;

namespace {

constexpr u32 kRegisters = 65536;    // of an SM
constexpr u32 kSmSmem = 228 * 1024;  // bytes of an SM, 1 KB of which goes to each CTA's system use
constexpr u32 kSmThreads = 2048;
constexpr u32 kPortableCluster = 8;

template <class F>
void each_launch(F&& run) {
#define VISIT(key, max_regs, ...) run(key, max_regs, prime::__VA_ARGS__::kLaunch);
    EACH_VARIANT(VISIT)
#undef VISIT
}

// Registers a thread of a CTA of `threads` can be launched with, in the hardware's steps of 8.
u32 launch_registers(const LaunchShape& shape) {
    const u32 each = kRegisters / (shape.threads * shape.min_ctas) / 8 * 8;
    return each < 255 ? each : 255;
}

// A shape as legal as that of a grouped GEMM, for breaking one thing at a time.
constexpr LaunchShape good() {
    return {
        .threads = 384,
        .smem_bytes = 200000,
        .cluster = 2,
        .min_ctas = 1,
        .role_threads = {128, 256},
        .role_registers = {40, 232}};
}

struct Kernel {
    struct Args {
        u64 words[5];
    };
    static constexpr LaunchShape kLaunch{
        .threads = 512,
        .smem_bytes = 3,
        .cluster = 4,
        .min_ctas = 5,
        .protocol = 6,
        .role_threads = {7, 8, 9, 10},
        .role_registers = {11, 12, 13, 14}};
};

template <class F>
bool refused(F&& change) {
    LaunchShape shape = good();
    change(shape);
    return !legal(shape);
}

}  // namespace

CASE(every_variant_fits_an_sm_as_often_as_it_says) {
    each_launch([](const char* key, u32 max_regs, const LaunchShape& s) {
        CHECK(legal(s), "%s", key);
        CHECK(
            s.threads % 32 == 0 && s.threads >= 32 && s.threads <= 1024, "%s: %u threads", key,
            s.threads);
        CHECK(
            s.threads * s.min_ctas <= kSmThreads, "%s: %u threads, %u CTAs", key, s.threads,
            s.min_ctas);
        CHECK(
            (s.smem_bytes + 1024) * s.min_ctas <= kSmSmem, "%s: %u bytes, %u CTAs", key,
            s.smem_bytes, s.min_ctas);
        CHECK(s.cluster >= 1 && s.cluster <= kPortableCluster, "%s: cluster of %u", key, s.cluster);
        CHECK(
            max_regs <= 255 && max_regs * s.threads * s.min_ctas <= kRegisters, "%s: max_regs %u",
            key, max_regs);
    });
}

CASE(registers_that_roles_take_are_registers_that_roles_gave_back) {
    u32 moving = 0;
    each_launch([&](const char* key, u32, const LaunchShape& s) {
        u32 threads = 0, registers = 0;
        for (u32 i = 0; i < kMaxRoles; ++i) {
            threads += s.role_threads[i];
            registers += s.role_threads[i] * s.role_registers[i];
        }
        if (threads == 0) return;
        ++moving;
        CHECK(threads == s.threads, "%s: roles have %u of %u threads", key, threads, s.threads);
        // setmaxnreg.inc waits for ever for registers that the CTA was not launched with.
        CHECK(
            registers <= s.threads * launch_registers(s),
            "%s: roles want %u registers, launched with %u", key, registers,
            s.threads * launch_registers(s));
        for (u32 i = 0; i < kMaxRoles && s.role_threads[i] != 0; ++i) {
            CHECK(
                s.role_threads[i] % 128 == 0, "%s: role %u has %u threads, not whole warpgroups",
                key, i, s.role_threads[i]);
            CHECK(
                s.role_registers[i] % 8 == 0 && s.role_registers[i] >= 24 &&
                    s.role_registers[i] <= 256,
                "%s: role %u: setmaxnreg %u", key, i, s.role_registers[i]);
        }
    });
    CHECK(moving > 0, "no variant moves registers");
}

CASE(a_shape_that_would_hang_or_be_refused_is_not_legal) {
    CHECK(legal(good()), "the shape to break is broken");
    CHECK(
        refused([](LaunchShape& s) {
            s.threads = 0;
            s.role_threads[0] = s.role_threads[1] = 0;
        }),
        "no threads");
    CHECK(refused([](LaunchShape& s) { s = {.threads = 1056}; }), "33 warps");
    CHECK(refused([](LaunchShape& s) { s.cluster = 0; }), "no cluster");
    CHECK(refused([](LaunchShape& s) { s.smem_bytes = 232449; }), "one byte too many");
    CHECK(
        refused([](LaunchShape& s) { s.role_threads[0] = 256; }),
        "roles with more threads than the CTA");
    CHECK(
        refused([](LaunchShape& s) { s.threads = 512; }), "roles with fewer threads than the CTA");
    CHECK(
        refused([](LaunchShape& s) { s.role_threads[0] = 96, s.role_threads[1] = 288; }),
        "broken warpgroups");
    CHECK(refused([](LaunchShape& s) { s.role_registers[0] = 36; }), "not a multiple of 8");
    CHECK(refused([](LaunchShape& s) { s.role_registers[0] = 16; }), "fewer than 24");
    CHECK(refused([](LaunchShape& s) { s.role_registers[1] = 264; }), "more than 256");
    CHECK(refused([](LaunchShape& s) { s.role_registers[0] = 56; }), "more than an SM has");
    CHECK(refused([](LaunchShape& s) { s.min_ctas = 2; }), "more than an SM has for two");
}

CASE(the_exported_record_repeats_the_shape_word_by_word) {
    const LaunchMeta meta = make_launch_meta<Kernel>(0x0123456789ABCDEFull);
    const u32 expected[] = {kLaunchMetaSchema, 512, 3, 4, 5,  6,  40, 0,  0x89ABCDEF,
                            0x01234567,        7,   8, 9, 10, 11, 12, 13, 14};
    static_assert(sizeof(expected) == sizeof(meta));
    u32 words[18];
    std::memcpy(words, &meta, sizeof(meta));
    for (u32 i = 0; i < 18; ++i)
        CHECK(words[i] == expected[i], "word %u is %u, not %u", i, words[i], expected[i]);
}
