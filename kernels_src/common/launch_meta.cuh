// SPDX-License-Identifier: Apache-2.0
// common/launch_meta.cuh: what a kernel says about its own launch, read from the cubin.
//
// Layer:      common. Kernel headers state a LaunchShape, generated entries export a LaunchMeta.
//
// Invariants: a cubin holds one kernel and one `pk_launch_meta`.
#pragma once
#include "types.cuh"

namespace prime {

constexpr u32 kLaunchMetaSchema = 1;
constexpr u32 kMaxRoles = 4;

// A kernel header states this as `static constexpr LaunchShape kLaunch`. Roles are listed only by a
// kernel that moves registers between its warpgroups; their threads must add up to `threads`.
struct LaunchShape {
    u32 threads = 0;
    u32 smem_bytes = 0;  // dynamic shared memory
    u32 cluster = 1;     // CTAs
    u32 min_ctas = 1;    // CTAs that must fit one SM
    u32 protocol = 0;    // version of the peers' buffer layout; 0: talks to no peer
    u32 role_threads[kMaxRoles] = {};
    u32 role_registers[kMaxRoles] = {};  // per thread, as given to setmaxnreg
};

struct alignas(8) LaunchMeta {
    u32 schema;
    u32 threads;
    u32 smem_bytes;
    u32 cluster;
    u32 min_ctas;
    u32 protocol;
    u32 args_bytes;
    u32 reserved;
    u64 args_hash;  // of the argument struct's layout: names, types, offsets
    u32 role_threads[kMaxRoles];
    u32 role_registers[kMaxRoles];
};
static_assert(sizeof(LaunchMeta) == 72, "read by the loader byte for byte");

template <typename Kernel>
PK_HOST_DEVICE constexpr LaunchMeta make_launch_meta(u64 args_hash) {
    constexpr LaunchShape kShape = Kernel::kLaunch;
    LaunchMeta meta{
        .schema = kLaunchMetaSchema,
        .threads = kShape.threads,
        .smem_bytes = kShape.smem_bytes,
        .cluster = kShape.cluster,
        .min_ctas = kShape.min_ctas,
        .protocol = kShape.protocol,
        .args_bytes = sizeof(typename Kernel::Args),
        .reserved = 0,
        .args_hash = args_hash,
        .role_threads = {},
        .role_registers = {}};
    for (u32 i = 0; i < kMaxRoles; ++i) {
        meta.role_threads[i] = kShape.role_threads[i];
        meta.role_registers[i] = kShape.role_registers[i];
    }
    return meta;
}

// Registers per thread that a CTA with no more than one of its kind per SM launches with.
constexpr u32 launch_registers(u32 threads) {
    return min_of(65536 / threads / 8 * 8, 255u);
}

// Sums that the hardware would answer with a hang or a refused launch. Roles share out what the
// launch took, which is less than the register file where 65536 does not divide by the threads.
constexpr bool legal(const LaunchShape& shape) {
    u32 threads = 0;
    u32 registers = 0;
    for (u32 i = 0; i < kMaxRoles; ++i) {
        const u32 each = shape.role_registers[i];
        if (each != 0 && (each % 8 != 0 || each < 24 || each > 256)) return false;
        if (each != 0 && shape.role_threads[i] % 128 != 0) return false;
        threads += shape.role_threads[i];
        registers += shape.role_threads[i] * each;
    }
    return shape.threads >= 32 && shape.threads <= 1024 && shape.cluster >= 1 &&
           shape.smem_bytes <= 232448 && (threads == 0 || threads == shape.threads) &&
           registers * shape.min_ctas <= 65536 &&
           (threads == 0 || registers <= launch_registers(shape.threads) * shape.threads);
}

}  // namespace prime
