// SPDX-License-Identifier: Apache-2.0
// moe/stage_peers.cuh: begins a backward among peers: dy, and x where it is needed again, go to the
// arena, a score to every pool row, and counters to zero. Entry pk_stage_peers.
//
// Layer:      moe (arch-free).
//
// Invariants: as in a forward, the epoch is counted up by the call's first launch, and what follows
//             in the stream tells the peers that the tokens may be read.
#pragma once
#include "../comm/peers.cuh"
#include "../comm/stage.cuh"
#include "../common/launch_meta.cuh"

namespace prime::moe {

struct StagePeersArgs {
    const u8* grads;             // [T, row_bytes] dy
    const u8* tokens;            // [T, row_bytes] x, or null
    const i32* starts;           // [E_l + 1]
    const comm::RowEntry* list;  // [pool rows]
    const comm::Peers* peers;
    float* row_score;  // [pool rows]
    u32* counters;     // [num_counters]
    u32 num_tokens;
    u32 row_bytes;
    u32 num_experts;  // E_l
    u32 num_counters;
};

struct StagePeers {
    using Args = StagePeersArgs;
    static constexpr u32 kThreads = 512;
    static constexpr LaunchShape kLaunch{
        .threads = kThreads, .min_ctas = 2, .protocol = comm::kProtocol};

    PK_DEVICE static void run(const Args& args) {
        const comm::Peers& p = *args.peers;
        u8* arena = reinterpret_cast<u8*>(p.arena[p.rank]);
        const u64 bytes = static_cast<u64>(args.num_tokens) * args.row_bytes;
        const auto copy = [&](u64 region, const u8* from) {
            comm::stage<kThreads>(arena + region, from, bytes, blockIdx.x, gridDim.x);
        };
        copy(p.grads, args.grads);
        if (args.tokens != nullptr) copy(p.tokens, args.tokens);
        const u32 first = blockIdx.x * kThreads + threadIdx.x;
        const u32 step = gridDim.x * kThreads;
        for (u32 i = first; i < args.num_counters; i += step)
            args.counters[i] = 0;
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        for (u32 r = first; r < rows; r += step)
            args.row_score[r] = args.list[r].score;
        if (first == 0) ++comm::state_of(p, static_cast<u32>(p.rank))->epoch;
    }
};

}  // namespace prime::moe
