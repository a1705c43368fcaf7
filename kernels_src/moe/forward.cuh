// SPDX-License-Identifier: Apache-2.0
// moe/forward.cuh: the forward among peers in one persistent launch: tokens are pulled into the
// pool, multiplied with gate and up, through SwiGLU, with down, and sent to their owners. Entry
// pk_forward.
//
// Layer:      moe.
//
// Threads:    roles/grouped_gemm.cuh. Tiles of both GEMMs interleave, down `lag` experts behind.
//
// Invariants: a gate/up tile waits for its rows, a down tile for the h of its rows; both are
//             announced by work that stands earlier in the tile list or waits for pulls only, so
//             the list always advances. Pushes wait for tiles, and nothing here waits for a push.
//             The launch ends when every peer has said that it is done: its results are here, and
//             nothing of this rank is read any more.
#pragma once
#include "../comm/finish.cuh"
#include "../epilogue/announce.cuh"
#include "../epilogue/gate_up.cuh"
#include "../roles/pull_peers.cuh"
#include "../roles/push_peers.cuh"
#include "block_gemm.cuh"

namespace prime::moe {

template <bool kPlain>
struct Forward {
    using Base = BlockGemm<4, 2, 128, false>;
    using Args = ForwardArgs;
    using Smem = Base::Smem;
    using Mma = mma::HopperPulls;
    static constexpr u32 kStages = Base::kStages;
    static constexpr bool kMnMajorA = false;
    static constexpr bool kMnMajorB = false;
    struct Launch {
        using Smem = Base::Smem;
        using Mma = mma::HopperPulls;
    };
    static constexpr LaunchShape kLaunch = roles::gemm_launch<Launch, comm::kProtocol>();
    static constexpr u32 kGateUpColumns = 128;  // of h per tile
    static constexpr u32 kDownColumns = 256;

    PK_DEVICE static const u64* peers_ns(const Args& args) { return &args.peers->timeout_ns; }

    PK_DEVICE static bool is_down(const Tile& t) { return t.kind == 1; }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        const comm::Peers& p = *args.peers;
        if (blockIdx.x == 0) comm::tell_all(p, comm::Flag::kReady, comm::epoch_of(p));
        const auto list = [&](u32 depth, u32 columns, u32 tile_columns) {
            return roles::BlockList{
                args.counts,
                args.starts,
                args.only_moves != 0 ? 0 : args.num_experts,
                ceil_div(columns, tile_columns),
                depth / 64,
                columns,
                tile_columns};
        };
        roles::schedule_chain(
            list(args.hidden, args.intermediate, kGateUpColumns),
            list(args.intermediate, args.hidden, kDownColumns), args.only_moves != 0 ? 0 : args.lag,
            ring, waiter, [&](const Tile& t) { wait_rows(args, t, waiter); });
    }

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::pull_from_peers(
            {*args.peers, args.peers->tokens, args.list, args.pool, args.arrivals, args.hidden * 2,
             rows, args.fault},
            warp);
        roles::push_to_peers(
            {*args.peers, args.list, args.y_rows, args.y_done,
             args.only_moves != 0 ? 0 : ceil_div(args.hidden, kDownColumns), args.hidden * 2, rows,
             args.fault},
            warp);
    }

    PK_DEVICE static u32 bytes(const Tile& t) { return Base::bytes(t); }

    PK_DEVICE static bool waits(const Args&) { return true; }

    PK_DEVICE static void wait_rows(const Args& args, const Tile& t, roles::Waiter& waiter) {
        if (t.valid == 0) return;
        const u32* counter = (is_down(t) ? args.h_done : args.arrivals) + t.row / 64;
        const u32 target =
            is_down(t) ? ceil_div(args.intermediate, kGateUpColumns) : roles::kArrivalRows;
        waiter.wait_counters(counter, t.valid > 64, target, Wait::kInput);
    }

    PK_DEVICE static void load_a(const Args& args, const Tile& t, i32 k, const StageAddr& at) {
        Base::load_rows(is_down(t) ? &args.h : &args.x, t, k, at);
    }

    PK_DEVICE static void load_b(
        const Args& args, const Tile& t, i32 k, const StageAddr& at, u32 half, bool multicast) {
        if (is_down(t)) {
            const i32 n = t.n + static_cast<i32>(half * 128);
            Base::load_box(&args.down, {k * 64, n, 0, t.expert}, at, half, multicast);
        } else {
            const TensorMap* map = half == 0 ? &args.gate : &args.up;
            Base::load_box(map, {k * 64, t.n, 0, t.expert}, at, half, multicast);
        }
    }

    PK_DEVICE static bool has_rows(const Args&, const Tile& t, u32 warpgroup) {
        return t.valid > static_cast<i32>(warpgroup * 64);
    }

    struct Epilogue {
        epilogue::SlabPair slabs;
        epilogue::Announcer announcer;
        bool owes_h = false;

        // When there is no next tile yet, which may be for want of what is owed.
        PK_DEVICE void idle(const epilogue::Seat& seat) { announcer.pay(seat); }

        // A down tile may be waiting for this very h.
        PK_DEVICE void settle(const Args&, const Tile& t, const epilogue::Seat& seat) {
            if (t.k_steps < 0 || (is_down(t) && owes_h)) announcer.pay(seat);
        }

        PK_DEVICE void prefetch(const Args&, const Tile&, const epilogue::Seat&) {}

        PK_DEVICE void store(
            const Args& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
            roles::Waiter&) {
            announcer.pay(seat);
            owes_h = !is_down(t);
            announcer.owe((owes_h ? args.h_done : args.y_done) + t.row / 64 + seat.warpgroup);
            if (!owes_h) {
                epilogue::Rows<true>::store(
                    {args.y, args.row_score, args.hidden}, t, seat, acc, slabs);
                return;
            }
            const epilogue::GateUpOut out{
                args.z,
                args.h,
                {args.alpha, args.clamp, args.up_offset, 0.0f},
                args.intermediate,
                args.keep_z != 0};
            epilogue::GateUp<kPlain>::store(out, t, seat, acc, slabs);
        }
    };

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        return {{base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes}};
    }

    // After the cluster's last barrier. The last CTA tells the peers and hears them; whatever
    // follows this launch in its stream may then read the results and overwrite the tokens.
    PK_DEVICE static void finish(const Args& args) {
        if (threadIdx.x == 0) comm::finish(*args.peers, args.finished, args.fault);
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Forward>(args); }
};

}  // namespace prime::moe
