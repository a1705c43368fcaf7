// SPDX-License-Identifier: Apache-2.0
// The recording build of a forward among peers on the simulated machine: what it computes stays
// right, and what it records of its transport is every row that crosses, once.
#define PK_PROFILE
#include <algorithm>

#include "peers_call.hpp"
#include "sim/grid.hpp"

using namespace prime;
using peers::Call;
using peers::Model;
using peers::Run;
using peers::Size;
using peers::Weights;
using profile::Event;
using profile::LaneHead;
using profile::Record;
using profile::TimelineHead;

namespace {

constexpr u32 kMostCtas = 8, kCapacity = 512, kLanes = profile::kTimelineLanes;

sim::Machine machine(31);

struct Buffer {
    std::vector<u64> words =
        std::vector<u64>((sizeof(TimelineHead) + kMostCtas * kLanes * lane_bytes()) / 8);

    Buffer() {
        const TimelineHead head{kCapacity, kMostCtas, {}};
        std::memcpy(words.data(), &head, sizeof(head));
    }

    static u64 lane_bytes() { return sizeof(LaneHead) + kCapacity * sizeof(Record); }

    void give_to(FaultRecord& fault) const {
        const u64 address = reinterpret_cast<u64>(words.data());
        fault.timeline[0] = static_cast<u32>(address);
        fault.timeline[1] = static_cast<u32>(address >> 32);
    }

    // Every record of every lane with its head; the numbers of tiles are passed over.
    template <class Visit>
    void each(Visit visit) const {
        const u8* at = reinterpret_cast<const u8*>(words.data()) + sizeof(TimelineHead);
        for (u32 lane = 0; lane < kMostCtas * kLanes; ++lane, at += lane_bytes()) {
            const LaneHead& head = *reinterpret_cast<const LaneHead*>(at);
            CHECK(head.count <= kCapacity, "%u records", head.count);
            const Record* records = reinterpret_cast<const Record*>(&head + 1);
            for (u32 i = 0; i < head.count; ++i) {
                const Event event = static_cast<Event>(records[i].what & 255);
                visit(lane % kLanes, event, records[i], head);
                if (event == Event::kMultiply || event == Event::kSkip) ++i;
            }
        }
    }
};

void check_transport(const Buffer& buffer, const Call& call, u32 rank) {
    const auto& list = call.wanted->list[rank];
    u32 pulls = 0, pushes = 0;
    for (const comm::RowEntry& entry : list) {
        const bool far = entry.source != comm::kNoRow && entry.source >> 24 != rank;
        pulls += far && entry.copy_of < 0;
        pushes += far;
    }
    u32 pulled = 0, pushed = 0, copied = 0;
    u64 last_end = 0;
    buffer.each([&](u32 lane, Event event, const Record& r, const LaneHead& head) {
        const u64 begin = head.begin_ns + (r.begin_lo_ns - static_cast<u32>(head.begin_ns));
        CHECK(begin >= head.begin_ns, "began before the kernel");
        CHECK(begin + r.length_ns <= head.end_ns, "lane %u ends after its role", lane);
        last_end = max_of(last_end, head.end_ns);
        if (event != Event::kCopy && event != Event::kPush) return;
        CHECK(lane == 2 || lane == 3, "lane %u moves rows", lane);
        CHECK(r.remote <= 8, "%u rows at once", r.remote);
        (event == Event::kCopy ? pulled : pushed) += r.remote;
        copied += event == Event::kCopy;
    });
    CHECK(pulled == pulls, "rank %u: %u rows pulled, not %u", rank, pulled, pulls);
    CHECK(pushed == pushes, "rank %u: %u rows sent, not %u", rank, pushed, pushes);
    CHECK(copied * 8 == list.size(), "%u copies of %zu rows", copied, list.size());
}

}  // namespace

CASE(every_row_that_crosses_is_recorded_once) {
    const Size size{2, 4, 2, 64};
    const Model model{64, 1};
    const Weights weights(size, model);
    Run all(size);
    all.add<true>(
        model, weights,
        std::make_unique<Call>(size, std::vector<u32>{90, 61}, all.arenas, machine.random));
    Buffer buffers[2];
    for (u32 rank = 0; rank < 2; ++rank)
        buffers[rank].give_to(all.forwards[0][rank]->fault);
    sim::run_kernels(machine, all.streams);
    all.check();
    for (u32 rank = 0; rank < 2; ++rank)
        check_transport(buffers[rank], *all.calls[0], rank);
}

CASE(among_peers_without_a_buffer_nothing_is_recorded) {
    const Size size{2, 4, 2, 64};
    Model model{64, 1};
    model.apart = true;
    const Weights weights(size, model);
    Run all(size);
    all.add<true>(
        model, weights,
        std::make_unique<Call>(size, std::vector<u32>{20, 31}, all.arenas, machine.random));
    sim::run_kernels(machine, all.streams);
    all.check();
}
