// SPDX-License-Identifier: Apache-2.0
// epilogue/push.cuh: sends a tile's rows, times their scores where asked, to the places where their
// owners want them.
//
// Layer:      epilogue. A row of a slab is not contiguous to the bulk copies, so eight lanes carry
//             its 128 bytes.
//
// Numerics:   as epilogue/rows.cuh: one rounding, after the score.
#pragma once
#include "../comm/pace.cuh"
#include "../comm/peers.cuh"
#include "../layout/gemm_smem.cuh"
#include "../mma/policy.cuh"
#include "rows.cuh"
#include "slabs.cuh"

namespace prime::epilogue {

struct PushOut {
    const comm::Peers* peers;
    const comm::RowEntry* list;  // [pool rows]
    u32 row_bytes;
    u32 columns;
};

// Where a row goes and what it is multiplied with, 12 bytes of shared memory each: looked up before
// the tile is multiplied, which hides it, and too much for the registers beside the accumulators.
struct Places {
    u32 base;  // of this warpgroup's addresses; scores stand behind them

    // Read after the warpgroup has met. Nobody is left reading the last tile's: whoever writes has
    // met the others in its stores since.
    PK_DEVICE void write(u32 row, u64 address, float score) const {
        ptx::st_shared_v2(
            base + row * 8, static_cast<u32>(address), static_cast<u32>(address >> 32));
        ptx::st_shared_u32(base + layout::kPlaceRows * 8 + row * 4, __float_as_uint(score));
    }

    // 0: padding.
    PK_DEVICE u64 address(u32 row) const { return ptx::ld_shared_u64(base + row * 8); }

    PK_DEVICE float score(u32 row) const {
        return __uint_as_float(ptx::ld_shared_u32(base + layout::kPlaceRows * 8 + row * 4));
    }
};

template <bool kScored>
struct Push {
    static constexpr u32 kRows = 4;  // of a warpgroup's 64 that a thread has 16 bytes of

    Places places;
    u64 through_ns = 0;

    PK_DEVICE void prepare(const PushOut& out, const pipeline::Tile& t, const Seat& seat) {
        const u32 row = seat.warp * 32 + seat.lane;
        if (row >= layout::kPlaceRows) return;
        const comm::RowEntry entry = entry_of(out, t, seat, row);
        const u64 to = out.peers->arena[entry.source >> 24 & (comm::kMaxPeers - 1)] +
                       out.peers->results + static_cast<u64>(entry.slot) * out.row_bytes;
        places.write(row, entry.source == comm::kNoRow ? 0 : to, entry.score);
    }

    PK_DEVICE void store(
        const PushOut& out, const pipeline::Tile& t, const Seat& seat, mma::Accum& acc,
        SlabPair& slabs) {
        const bool paced = out.peers->bytes_per_us != 0;
        if (paced) comm::wait_until(through_ns);
        // Bulk stores of an earlier tile may still read the slabs.
        if (seat.leader) ptx::bulk_wait_read<0>();
        seat.sync();
        if constexpr (kScored) {
            const u32 row = seat.warp * 16 + (seat.lane >> 2);
            scale_rows(acc, places.score(row), places.score(row + 8));
        }
#pragma unroll
        for (u32 block = 0; block < layout::kTileN / 64; ++block) {
            const u32 slab = slabs.base + (block & 1) * layout::kSlabBytes;
            put64(slab, seat, acc + block * 32);
            // One barrier: whoever writes this slab again, two blocks on, has met the others at the
            // next one, after they read it here.
            seat.sync();
            const u32 column = static_cast<u32>(t.n) + block * 64;
            if (column < out.columns) send(slab, column, seat);
        }
        if (paced) through_ns = book(out, t, seat);
    }

private:
    PK_DEVICE static comm::RowEntry entry_of(
        const PushOut& out, const pipeline::Tile& t, const Seat& seat, u32 row) {
        const uint4 words = ptx::ld_nc_v4(
            out.list + static_cast<u32>(t.row) + seat.warpgroup * layout::kPlaceRows + row);
        return {words.x, words.y, static_cast<i32>(words.z), __uint_as_float(words.w)};
    }

    // Eight lanes a row, 128 bytes. All that shared memory holds is asked for before any is sent.
    PK_DEVICE void send(u32 slab, u32 column, const Seat& seat) const {
        const u32 chunk = seat.lane & 7;
        u64 to[kRows];
        uint4 part[kRows];
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) {
            const u32 row = seat.warp * 16 + i * 4 + (seat.lane >> 3);
            to[i] = places.address(row);
            part[i] = ptx::ld_shared_v4(slab + layout::slab_offset(row, chunk));
        }
#pragma unroll
        for (u32 i = 0; i < kRows; ++i)
            if (to[i] != 0)
                ptx::st_v4(reinterpret_cast<void*>(to[i] + column * 2 + chunk * 16), part[i]);
    }

    // Half of the lanes book a row each.
    PK_DEVICE u64 book(const PushOut& out, const pipeline::Tile& t, const Seat& seat) const {
        const u32 rank = static_cast<u32>(out.peers->rank);
        u32 owner = rank;
        if (seat.lane < 16) {
            const u32 source = entry_of(out, t, seat, seat.warp * 16 + seat.lane).source;
            if (source != comm::kNoRow) owner = source >> 24;
        }
        const u32 columns = min_of(layout::kTileN, out.columns - static_cast<u32>(t.n));
        return comm::book_lanes(*out.peers, rank, owner, columns * 2);
    }
};

}  // namespace prime::epilogue
