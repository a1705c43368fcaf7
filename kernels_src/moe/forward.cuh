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
//             the list always advances. The launch ends when every peer has said that it is done:
//             its results are here, and nothing of this rank is read any more.
#pragma once
#include "../comm/finish.cuh"
#include "../epilogue/gate_up.cuh"
#include "../epilogue/push.cuh"
#include "../roles/pull_peers.cuh"
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

    PK_DEVICE static bool is_down(const Tile& t) { return t.kind == 1; }

    PK_DEVICE static void schedule(const Args& args, roles::TileRing ring, roles::Waiter waiter) {
        if (blockIdx.x == 0 && (threadIdx.x & 31) < args.peers->size)
            comm::tell(
                *args.peers, threadIdx.x & 31, comm::Flag::kReady, comm::epoch_of(*args.peers));
        __syncwarp();
        const auto list = [&](u32 depth, u32 columns, u32 tile_columns) {
            return roles::BlockList{
                args.counts,
                args.starts,
                args.num_experts,
                ceil_div(columns, tile_columns),
                args.only_moves != 0 ? 0 : depth / 64,
                columns,
                tile_columns};
        };
        roles::schedule_chain(
            list(args.hidden, args.intermediate, kGateUpColumns),
            list(args.intermediate, args.hidden, kDownColumns), args.lag, ring, waiter,
            [&](const Tile& t) { wait_rows(args, t, waiter); });
    }

    PK_DEVICE static void pull(const Args& args, u32 warp) {
        const u32 rows = static_cast<u32>(args.starts[args.num_experts]);
        roles::pull_from_peers(
            {*args.peers, args.peers->tokens, args.list, args.pool, args.arrivals, args.hidden * 2,
             rows, args.fault},
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
        epilogue::Push<true> push;
        u32* unannounced = nullptr;  // counter of an h whose stores may still be under way

        // When there is no next tile yet, which may be for want of this h.
        PK_DEVICE void idle(const epilogue::Seat& seat) { announce(seat); }

        // Leaves the stores of h the time of the next tile. Not where that tile may be waiting for
        // it: a down tile, or the end.
        PK_DEVICE void settle(const Args&, const Tile& t, const epilogue::Seat& seat) {
            if (is_down(t) || t.k_steps < 0) announce(seat);
        }

        PK_DEVICE void prefetch(const Args& args, const Tile& t, const epilogue::Seat& seat) {
            if (is_down(t)) push.prepare(push_out(args), t, seat);
        }

        PK_DEVICE void store(
            const Args& args, const Tile& t, const epilogue::Seat& seat, mma::Accum& acc,
            roles::Waiter&) {
            if (is_down(t)) {
                push.store(push_out(args), t, seat, acc, slabs);
                return;
            }
            announce(seat);
            const epilogue::GateUpOut out{
                args.z,
                args.h,
                {args.alpha, args.clamp, args.up_offset, 0.0f},
                args.intermediate,
                args.keep_z != 0};
            epilogue::GateUp<kPlain>::store(out, t, seat, acc, slabs);
            unannounced = args.h_done + t.row / 64 + seat.warpgroup;
        }

        PK_DEVICE void finish() { comm::wait_until(push.through_ns); }

    private:
        PK_DEVICE static epilogue::PushOut push_out(const Args& args) {
            return {args.peers, args.list, args.hidden * 2, args.hidden};
        }

        // h complete in memory, then the counter, for TMA loads by whoever acquires it.
        PK_DEVICE void announce(const epilogue::Seat& seat) {
            if (seat.leader && unannounced != nullptr) {
                ptx::bulk_wait<0>();
                ptx::fence_async_global();
                ptx::red_add_release_gpu(unannounced, 1);
            }
            unannounced = nullptr;
        }
    };

    PK_DEVICE static Epilogue make_epilogue(u32 base, const epilogue::Seat& seat) {
        const u32 places = seat.warpgroup * layout::kPlaceRows * layout::kPlaceBytes;
        return {
            {base + Smem::kSlab + seat.warpgroup * 2 * layout::kSlabBytes},
            {{base + Smem::kPlaces + places}}};
    }

    // After the cluster's last barrier. The last CTA tells the peers and hears them; whatever
    // follows this launch in its stream may then read the results and overwrite the tokens.
    PK_DEVICE static void finish(const Args& args) {
        if (threadIdx.x == 0) comm::finish(*args.peers, args.finished, args.fault);
    }

    PK_DEVICE static void run(const Args& args) { roles::grouped_gemm<Forward>(args); }
};

}  // namespace prime::moe
