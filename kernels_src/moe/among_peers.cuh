// SPDX-License-Identifier: Apache-2.0
// moe/among_peers.cuh: grouped GEMMs whose rows come from peers, or go to them. Entries
// pk_gate_up_peers, pk_down_peers, pk_down_grad_peers, pk_gate_up_grad_peers.
//
// Layer:      moe. One-rank kernels whose copying warps pull from peers and push to them.
#pragma once
#include "../comm/finish.cuh"
#include "../epilogue/announce.cuh"
#include "../roles/pull_peers.cuh"
#include "../roles/push_peers.cuh"
#include "down.cuh"
#include "down_grad.cuh"
#include "gate_up.cuh"
#include "gate_up_grad.cuh"

namespace prime::moe {

// args.copied counts the rows that were pulled; args.arrivals is the same where this launch
// multiplies them, and null where it pulls them for a later one.
template <class Op, class Mma_ = mma::HopperPulls, u32 kLoads = 8>
struct Pulling : Op {
    using Args = GroupedArgs;
    using Mma = Mma_;
    struct Launch {
        using Smem = typename Op::Smem;
        using Mma = Mma_;
    };
    static constexpr LaunchShape kLaunch = roles::gemm_launch<Launch, comm::kProtocol>();

    PK_DEVICE static const u64* peers_ns(const Args& args) { return &args.peers->timeout_ns; }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        const comm::Peers& p = *args.peers;
        // The launch before this one, in this stream, staged what peers are about to read.
        if (blockIdx.x == 0) comm::tell_all(p, comm::Flag::kReady, comm::epoch_of(p));
        Op::schedule(args, ring, waiter);
    }

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        if (args.pull_dst == nullptr) return;
        const comm::Peers& p = *args.peers;
        const u64 region = args.pull_grads != 0 ? p.grads : p.tokens;
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::pull_from_peers<kLoads>(
            {p, region, args.list, args.pull_dst, args.copied, args.pull_bytes, rows, args.fault},
            warp);
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Pulling>(args); }
};

template <bool kPlain>
using GateUpPeers = Pulling<GateUp<kPlain>>;

// Its epilogue has no registers to spare, so half as many loads are in flight: a number that
// divides the 512-byte steps of usual rows, since what is left over is copied step by step.
template <bool kPlain>
using DownGradPeers = Pulling<DownGrad<kPlain>, mma::Hopper, 4>;

// Also sends its result's rows home, and where score_parts are given the gradients of the rows'
// scores; ends the call.
template <class Op, bool kScored>
struct Sending : Pulling<Op> {
    using Args = GroupedArgs;
    using Smem = typename Op::Smem;

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        Pulling<Op>::pull(args, warp);
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::push_to_peers(
            {*args.peers, args.list, args.out_rows, args.out_done, args.n_tiles, args.columns * 2,
             rows, args.fault},
            warp);
    }

    struct Epilogue {
        RowsEpilogue<kScored> rows;
        epilogue::Announcer announcer;

        PK_DEVICE void idle(const epilogue::Seat& seat) { announcer.pay(seat); }

        PK_DEVICE void settle(const Args&, const Tile& t, const epilogue::Seat& seat) {
            if (t.k_steps < 0) announcer.pay(seat);
        }

        PK_DEVICE void prefetch(const Args& args, const Tile& t, const epilogue::Seat& seat) {
            if (args.score_parts != nullptr && t.n == 0 && seat.warp < 2) send_score(args, t, seat);
        }

        PK_DEVICE void store(
            const Args& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
            roles::Waiter& waiter) {
            announcer.pay(seat);
            announcer.owe(args.out_done + t.row / 64 + seat.warpgroup);
            rows.store(args, t, seat, acc, waiter);
        }

    private:
        PK_DEVICE static void send_score(
            const Args& args, const Tile& t, const epilogue::Seat& seat) {
            const u32 row =
                static_cast<u32>(t.row) + seat.warpgroup * 64 + seat.warp * 32 + seat.lane;
            const comm::RowEntry& entry = args.list[row];
            if (entry.source == comm::kNoRow) return;
            float sum = 0.0f;
            for (u32 i = 0; i < args.parts; ++i)
                sum += args.score_parts[static_cast<u64>(row) * args.parts + i];
            const comm::Peers& p = *args.peers;
            reinterpret_cast<float*>(p.arena[entry.source >> 24] + p.dscore)[entry.slot] = sum;
        }
    };

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}}};
    }

    PK_DEVICE static void finish(const Args& args) {
        if (threadIdx.x == 0) comm::finish(*args.peers, args.finished, args.fault);
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Sending>(args); }
};

using DownPeers = Sending<Down<true>, true>;
using GateUpGradPeers = Sending<GateUpGrad, false>;

}  // namespace prime::moe
