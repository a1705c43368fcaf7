// SPDX-License-Identifier: Apache-2.0
// moe/group_bounds.cuh: how many rows every group has and where they start, from any of the four
// ways in which callers describe groups on the device. Entry pk_group_bounds.
//
// Layer:      moe (arch-free).
//
// Threads:    1,024. CTA 0 writes the bounds; all CTAs check a list of rows, a share each. No CTA
//             waits for another: any grid works.
//
// Invariants: what is written depends on the description alone. Bounds never leave the operand: a
//             group whose description is wrong gets no rows and is counted in the fault record.
#pragma once
#include "../common/fault.cuh"
#include "../common/launch_meta.cuh"
#include "../common/types.cuh"

namespace prime::moe {

enum class Groups : u32 {
    kRows = 0,    // [rows] group of each row, -1: padding; groups are runs that start at multiples
                  // of 64, in any order
    kEnds = 1,    // [groups] one past the last row; groups start at multiples of `align`
    kSizes = 2,   // [groups] rows, multiples of 64; groups follow one another
    kPlaces = 3,  // [groups] rows; every group has a place of `rows` rows
};

struct GroupBoundsArgs {
    const i32* groups;  // as `kind` says
    i32* counts;        // [groups]
    i32* starts;        // [groups + 1] first rows, and the end of the operand
    FaultRecord* fault;
    u32 kind;
    u32 rows;  // of the operand; of one place
    u32 num_groups;
    u32 align;  // kEnds
    u32 round;  // kEnds: rows of a group are counted up to a multiple of it, into the padding
    u32 reserved;
};

struct GroupBounds {
    using Args = GroupBoundsArgs;
    static constexpr u32 kThreads = 1024;
    static constexpr u32 kMaxGroups = 4096;
    static constexpr u32 kBlock = 64;
    static constexpr LaunchShape kLaunch{
        .threads = kThreads, .smem_bytes = 3 * kMaxGroups * sizeof(u32), .min_ctas = 1};

    PK_DEVICE static void blame(const Args& args, u32 count) {
        if (count != 0) atomicAdd(&args.fault->bad_ids, count);
    }

    PK_DEVICE static void write(const Args& args, u32 group, u32 start, u32 count) {
        args.starts[group] = static_cast<i32>(start);
        args.counts[group] = static_cast<i32>(count);
    }

    // Group of the block's first row, num_groups where it has none.
    PK_DEVICE static u32 group_of_block(const Args& args, u32 block) {
        const u32 row = block * kBlock;
        if (row >= args.rows) return args.num_groups;
        return min_of(static_cast<u32>(args.groups[row]), args.num_groups);
    }

    // A group is the run of blocks whose first rows name it. CTA 0.
    PK_DEVICE static void from_rows(const Args& args) {
        extern __shared__ u32 tables[];
        u32* first = tables;
        u32* end = tables + args.num_groups;
        u32* runs = tables + 2 * args.num_groups;
        for (u32 g = threadIdx.x; g < args.num_groups; g += kThreads)
            runs[g] = 0;
        __syncthreads();
        const u32 blocks = ceil_div(args.rows, kBlock);
#pragma unroll 4
        for (u32 b = threadIdx.x; b < blocks; b += kThreads) {
            const u32 group = group_of_block(args, b);
            if (group == args.num_groups) continue;
            if (b == 0 || group_of_block(args, b - 1) != group) {
                first[group] = b;
                atomicAdd(runs + group, 1u);
            }
            if (group_of_block(args, b + 1) != group) end[group] = b + 1;
        }
        __syncthreads();
        for (u32 g = threadIdx.x; g < args.num_groups; g += kThreads) {
            const bool one_run = runs[g] == 1;
            const u32 start = one_run ? first[g] * kBlock : 0;
            write(args, g, start, one_run ? min_of(end[g] * kBlock, args.rows) - start : 0);
            if (runs[g] > 1) blame(args, runs[g] - 1);
        }
    }

    // Rows that name no group, or another one than their block does. All CTAs.
    PK_DEVICE static void check_rows(const Args& args) {
        u32 bad = 0;
        const u32 step = gridDim.x * kThreads;
        for (u32 row = blockIdx.x * kThreads + threadIdx.x; row < args.rows; row += step) {
            const i32 group = args.groups[row];
            const i32 block = args.groups[row - row % kBlock];
            bad += group != -1 && (group != block || static_cast<u32>(group) >= args.num_groups);
        }
        blame(args, bad);
    }

    // CTA 0.
    PK_DEVICE static void from_ends(const Args& args) {
        for (u32 g = threadIdx.x; g < args.num_groups; g += kThreads) {
            const i32 before = g == 0 ? 0 : args.groups[g - 1];
            const i32 end = args.groups[g];
            const bool sane = 0 <= before && before <= end && static_cast<u32>(end) <= args.rows;
            const u32 start = sane ? align_up(static_cast<u32>(before), args.align) : 0;
            const u32 rows = sane && static_cast<u32>(end) > start ? end - start : 0;
            const u32 room = rows == 0 ? 0 : args.rows - start;
            write(args, g, rows == 0 ? 0 : start, min_of(align_up(rows, args.round), room));
            blame(args, !sane);
        }
    }

    // First warp of CTA 0.
    PK_DEVICE static void from_sizes(const Args& args) {
        const u32 lane = threadIdx.x & 31;
        u64 before = 0;
        for (u32 base = 0; base < args.num_groups; base += 32) {
            const u32 g = base + lane;
            const i32 size = g < args.num_groups ? args.groups[g] : 0;
            const u32 rows = size < 0 ? 0 : static_cast<u32>(size);
            u64 end = rows;
#pragma unroll
            for (u32 d = 1; d < 32; d *= 2) {
                const u64 left = __shfl_up_sync(~0u, end, d);
                if (lane >= d) end += left;
            }
            end += before;
            const bool sane = size >= 0 && rows % kBlock == 0 && end <= args.rows;
            if (g < args.num_groups) {
                write(args, g, sane ? static_cast<u32>(end) - rows : 0, sane ? rows : 0);
                blame(args, !sane);
            }
            before = __shfl_sync(~0u, end, 31);
        }
    }

    // CTA 0.
    PK_DEVICE static void from_places(const Args& args) {
        for (u32 g = threadIdx.x; g < args.num_groups; g += kThreads) {
            const u32 rows = static_cast<u32>(args.groups[g]);
            const bool sane = rows <= args.rows;
            write(args, g, g * args.rows, sane ? rows : 0);
            blame(args, !sane);
        }
    }

    PK_DEVICE static void run(const Args& args) {
        const Groups kind = static_cast<Groups>(args.kind);
        if (blockIdx.x == 0) {
            const u32 places = kind == Groups::kPlaces ? args.num_groups : 1;
            if (threadIdx.x == 0)
                args.starts[args.num_groups] = static_cast<i32>(places * args.rows);
            if (kind == Groups::kRows) from_rows(args);
            if (kind == Groups::kEnds) from_ends(args);
            if (kind == Groups::kSizes && threadIdx.x < 32) from_sizes(args);
            if (kind == Groups::kPlaces) from_places(args);
        }
        if (kind == Groups::kRows) check_rows(args);
    }
};

}  // namespace prime::moe
