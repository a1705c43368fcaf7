// SPDX-License-Identifier: Apache-2.0
// epilogue/slabs.cuh: moving accumulator fragments through shared-memory slabs into TMA stores.
//
// Layer:      epilogue. One instance per math warpgroup; all 128 threads call every function
//             together.
//
// Invariants: a slab is written only after the store that last read it has finished reading.
#pragma once
#include "../common/types.cuh"
#include "../layout/slab.cuh"
#include "../ptx/fence.cuh"
#include "../ptx/ld_st.cuh"
#include "../ptx/matrix.cuh"
#include "../ptx/tma.cuh"

namespace prime::epilogue {

// Where a thread stands in its warpgroup.
struct Seat {
    u32 warpgroup;  // 0 or 1 among the math warpgroups
    u32 warp;       // 0..3
    u32 lane;
    bool leader;  // issues the warpgroup's copies

    PK_DEVICE void sync() const { ptx::named_barrier_sync(1 + warpgroup, 128); }

    // Whether any of the warpgroup's threads says so; all of them learn it.
    PK_DEVICE bool any(bool value) const {
        return ptx::named_barrier_any(1 + warpgroup, 128, value);
    }
};

// Two slabs used in turn.
struct SlabPair {
    u32 base;
    u32 next = 0;

    // A slab whose previous store has been read out.
    PK_DEVICE u32 acquire(const Seat& seat) {
        if (seat.leader) ptx::bulk_wait_read<1>();
        seat.sync();
        return base + (next++ & 1) * layout::kSlabBytes;
    }
};

// Orders the warpgroup's slab writes before a TMA store that its leader issues next.
PK_DEVICE void publish(const Seat& seat) {
    ptx::fence_async_shared();
    seat.sync();
}

// Sixteen columns of a fragment (eight values) as bf16 to columns 16c of a slab.
PK_DEVICE void put16(u32 slab, u32 c, const Seat& seat, const float* d) {
    ptx::stmatrix_x4(
        slab + layout::fragment_offset(seat.warp * 16, c, seat.lane), ptx::pack_bf16(d[0], d[1]),
        ptx::pack_bf16(d[2], d[3]), ptx::pack_bf16(d[4], d[5]), ptx::pack_bf16(d[6], d[7]));
}

// Sixty-four columns (32 values).
PK_DEVICE void put64(u32 slab, const Seat& seat, const float* d) {
#pragma unroll
    for (u32 c = 0; c < 4; ++c)
        put16(slab, c, seat, d + 8 * c);
}

// Thirty-two columns (16 values) as fp32: the same 128-byte rows and swizzle.
PK_DEVICE void put32_fp32(u32 slab, const Seat& seat, const float* d) {
    const u32 row = seat.warp * 16 + (seat.lane >> 2);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        const u32 chunk = j * 2 + ((seat.lane & 3) >> 1);
        const u32 within = (seat.lane & 1) * 8;
        const float* v = d + 4 * j;
        ptx::st_shared_f32x2(slab + layout::slab_offset(row, chunk) + within, v[0], v[1]);
        ptx::st_shared_f32x2(slab + layout::slab_offset(row + 8, chunk) + within, v[2], v[3]);
    }
}

}  // namespace prime::epilogue
