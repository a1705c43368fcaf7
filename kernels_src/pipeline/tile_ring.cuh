// SPDX-License-Identifier: Apache-2.0
// pipeline/tile_ring.cuh: the order of work of one CTA, decoded by one warp and read by every other
// role.
//
// Layer:      pipeline (arch-free).
//
// Invariants: one writer (the scheduler warp's lane 0); kTileReaders threads read and free every
//             entry; nobody else derives the order.
#pragma once
#include "../common/types.cuh"
#include "ring.cuh"
#include "wait.cuh"

namespace prime::pipeline {

constexpr u32 kTileRingDepth = 4;
constexpr u32 kTileReaders = 1 + 8 * 32;  // the load thread and every thread of the math warps

// 32 bytes, written and read as two vectors. k_steps < 0 ends the list.
struct Tile {
    i32 row;        // first row (grouped M) or column (grouped K) of the A operand
    i32 n;          // first column of the output tile
    i32 expert;     // local expert
    i32 k0;         // first row of the reduction (grouped K)
    i32 k_steps;    // 64-wide steps; 0: the accumulators are zero
    i32 valid;      // rows of this CTA's 128 that exist; 0: nothing to load or store
    i32 multicast;  // 1: the pair shares B, each CTA loads its half for both
    i32 kind;       // which operands, for kernels with several
};

PK_DEVICE void write_tile(u32 addr, const Tile& t) {
    ptx::st_shared_v4(addr, t.row, t.n, t.expert, t.k0);
    ptx::st_shared_v4(addr + 16, t.k_steps, t.valid, t.multicast, t.kind);
}

PK_DEVICE Tile read_tile(u32 addr) {
    Tile t;
    ptx::ld_shared_v4(addr, t.row, t.n, t.expert, t.k0);
    ptx::ld_shared_v4(addr + 16, t.k_steps, t.valid, t.multicast, t.kind);
    return t;
}

// Addresses of the ring in shared memory.
struct TileRing {
    u32 entries;
    u32 full;
    u32 empty;
    Ring<kTileRingDepth> at;

    PK_DEVICE void push(Waiter& waiter, const Tile& tile) {
        waiter.wait(empty + 8 * at.stage, at.phase ^ 1, Wait::kTileFree);
        write_tile(entries + 32 * at.stage, tile);
        ptx::mbarrier_arrive(full + 8 * at.stage);
        at.advance();
    }

    // Whether pop() would return at once.
    PK_DEVICE bool has_next() const {
        return ptx::mbarrier_test_wait(full + 8 * at.stage, at.phase);
    }

    // Reads the next entry and frees it at once. Every reader arrives for itself: one lane could do
    // so for its warp after a __syncwarp(), but tools that look for races do not follow the other
    // lanes' reads through that.
    PK_DEVICE Tile pop(Waiter& waiter) {
        waiter.wait(full + 8 * at.stage, at.phase, Wait::kTileFull);
        Tile tile = read_tile(entries + 32 * at.stage);
        if (waiter.dead) tile.k_steps = -1;
        ptx::mbarrier_arrive(empty + 8 * at.stage);
        at.advance();
        return tile;
    }
};

}  // namespace prime::pipeline
