// SPDX-License-Identifier: Apache-2.0
// comm/pace.cuh: makes transport between virtual ranks of one GPU take the time that a link would.
//
// Layer:      comm (arch-free).
//
// Every rank has a link out and a link in, of peers.bytes_per_us each. Whoever moves bytes books
// them on both ends and may call them moved when the later of the two links is through with them. A
// model of bandwidth and of one latency, for measurements on one GPU: real peers are not paced.
#pragma once
#include "peers.cuh"

namespace prime::comm {

constexpr u64 kPaceLatencyNs = 1500;

// The link is free from now on or later, then busy for `ns` more. Two atomics in place of a loop
// of compare-and-swap: with hundreds of warps booking, only one got through per round trip.
PK_DEVICE u64 book(u64* free_ns, u64 now, u64 ns) {
    atomicMax(free_ns, now);
    return atomicAdd(free_ns, ns) + ns;
}

// A warp books `bytes` for each lane whose `from` and `to` differ; the time at which all of it is
// through. Lanes with the same two ends share a booking.
PK_DEVICE u64 book_lanes(const Peers& p, u32 from, u32 to, u32 bytes) {
    const u64 now = ptx::global_timer_ns();
    const u32 lane = threadIdx.x & 31;
    const u32 same = __match_any_sync(~0u, from * kMaxPeers + to);
    u64 end = 0;
    if (from != to && (same & ((1u << lane) - 1)) == 0) {
        const u64 ns = u64{bytes} * static_cast<u32>(__popc(same)) * 1000 / p.bytes_per_us;
        const u64 out = book(&state_of(p, from)->egress_free_ns, now, ns);
        end = max_of(out, book(&state_of(p, to)->ingress_free_ns, now, ns)) + kPaceLatencyNs;
    }
#pragma unroll
    for (u32 d = 16; d > 0; d /= 2)
        end = max_of(end, __shfl_xor_sync(~0u, end, static_cast<int>(d)));
    return end;
}

PK_DEVICE void wait_until(u64 ns) {
    while (ptx::global_timer_ns() < ns) {
    }
}

}  // namespace prime::comm
