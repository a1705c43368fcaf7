// SPDX-License-Identifier: Apache-2.0
// The recording build of a grouped GEMM on the simulated machine: what it computes stays right, and
// what it records is every tile, in order, inside its buffer.
//
// With PK_TIMELINE_DUMP the buffer of the first launch goes to that file, for the test of its
// reader.
#define PK_PROFILE
#include <algorithm>
#include <map>
#include <tuple>

#include "layer.hpp"
#include "moe/gate_up.cuh"
#include "sim/grid.hpp"

using namespace prime;
using layer::Layer;
using layer::Matrix;
using profile::Event;
using profile::LaneHead;
using profile::Record;
using profile::TimelineHead;

namespace {

constexpr u32 kGrid = 4;
constexpr u32 kLanes = profile::kTimelineLanes;
constexpr u8 kUntouched = 0xA5;

sim::Machine machine(23);

struct Buffer {
    u32 capacity, ctas;
    std::vector<u64> words;

    Buffer(u32 records, u32 room) : capacity(records), ctas(room), words(bytes() / 8 + 8) {
        std::memset(words.data(), 0, bytes());
        std::memset(reinterpret_cast<u8*>(words.data()) + bytes(), kUntouched, 64);
        TimelineHead head{capacity, ctas, {}};
        std::memcpy(words.data(), &head, sizeof(head));
    }

    u64 lane_bytes() const { return sizeof(LaneHead) + u64{capacity} * sizeof(Record); }
    u64 bytes() const { return sizeof(TimelineHead) + ctas * kLanes * lane_bytes(); }

    const LaneHead& lane(u32 cta, u32 lane) const {
        const u8* base = reinterpret_cast<const u8*>(words.data()) + sizeof(TimelineHead);
        return *reinterpret_cast<const LaneHead*>(base + (cta * kLanes + lane) * lane_bytes());
    }

    const Record* records(u32 cta, u32 which) const {
        return reinterpret_cast<const Record*>(&lane(cta, which) + 1);
    }

    bool nothing_behind() const {
        const u8* end = reinterpret_cast<const u8*>(words.data()) + bytes();
        return std::all_of(end, end + 64, [](u8 byte) { return byte == kUntouched; });
    }
};

// gate_up of 2 CTA pairs that pulls its rows; checks h, so that recording changes nothing.
void run(const Layer& l, Buffer* buffer) {
    Matrix x(1, l.pool(), l.hidden), tokens(1, 37, l.hidden);
    tokens.fill(machine.random, 1.0f);
    std::vector<i32> row_src;
    for (u32 r = 0; r < l.pool(); ++r) {
        const i32 token = static_cast<i32>(machine.random.below(37));
        row_src.push_back(l.expert_of(r) < l.experts() ? token : -1);
    }
    std::vector<u32> arrivals(l.pool() / 64, 0);
    const u32 half = l.intermediate;
    Matrix w(l.experts(), 2 * half, l.hidden), h(1, l.pool(), half);
    w.fill(machine.random, 0.0625f);
    FaultRecord fault{};
    const u64 address = buffer == nullptr ? 0 : reinterpret_cast<u64>(buffer->words.data());
    fault.timeline[0] = static_cast<u32>(address);
    fault.timeline[1] = static_cast<u32>(address >> 32);
    const sim::Tensor a = layer::rows_of(x), out = layer::rows_of(h);
    const sim::Tensor gate = layer::k_major(w, 0, half), up = layer::k_major(w, half, half);
    moe::GroupedArgs args = layer::grouped_args(l, fault);
    args.a = sim::map_of(a);
    args.b0 = sim::map_of(gate);
    args.b1 = sim::map_of(up);
    args.out0 = sim::map_of(out);
    args.k_steps = args.split = l.hidden / 64;
    args.columns = half;
    args.n_tiles = ceil_div(half, 128u);
    args.pull_src = reinterpret_cast<u8*>(tokens.bits.data());
    args.pull_dst = reinterpret_cast<u8*>(x.bits.data());
    args.pull_bytes = l.hidden * 2;
    args.row_src = row_src.data();
    args.arrivals = arrivals.data();
    sim::run_kernel<moe::GateUp<true>>(machine, kGrid, args);
    CHECK(fault.code == 0, "role %u waited too long", fault.role);
    layer::check_rows(l, h, "h", 1, [&](u32 r, u32 e, u32 n) {
        const double g = layer::to_float(layer::to_bf16(layer::dot(x, r, 0, w, e, n)));
        return g * layer::sigmoid(g) *
               layer::to_float(layer::to_bf16(layer::dot(x, r, 0, w, e, half + n)));
    });
}

Layer small() {
    return Layer(320, 192, {0, 130, 64, 0, 65}, machine.random);
}

Event event_of(const Record& r) {
    return static_cast<Event>(r.what & 255);
}

// A record has the lower half of the time only.
u64 begin_of(const Record& r, const LaneHead& head) {
    return head.begin_ns + (r.begin_lo_ns - static_cast<u32>(head.begin_ns));
}

void dump(const Buffer& buffer) {
    const char* path = std::getenv("PK_TIMELINE_DUMP");
    if (path == nullptr) return;
    std::FILE* file = std::fopen(path, "wb");
    CHECK(file != nullptr, "%s cannot be written", path);
    std::fwrite(buffer.words.data(), 1, buffer.bytes(), file);
    std::fclose(file);
}

}  // namespace

CASE(every_tile_of_every_warpgroup_is_recorded_in_order) {
    const Layer l = small();
    Buffer buffer(256, kGrid);
    run(l, &buffer);
    dump(buffer);
    std::map<std::tuple<u32, u32, u32>, u32> tiles;  // (row, n, warpgroup) with rows
    for (u32 cta = 0; cta < kGrid; ++cta)
        for (u32 lane = 0; lane < kLanes; ++lane) {
            const LaneHead& head = buffer.lane(cta, lane);
            CHECK(head.sm == 100 + cta, "CTA %u is on SM %u", cta, head.sm);
            CHECK(head.begin_ns < head.end_ns, "CTA %u lane %u ends first", cta, lane);
            CHECK(head.count <= buffer.capacity, "%u records", head.count);
            u64 last = head.begin_ns;  // ends of records never go back
            u32 stores = 0, products = 0;
            for (u32 i = 0; i < head.count; ++i) {
                const Record& r = buffer.records(cta, lane)[i];
                const Event event = event_of(r);
                const u64 begin = begin_of(r, head), end = begin + r.length_ns;
                CHECK(begin >= head.begin_ns && end <= head.end_ns, "outside the role");
                CHECK(end >= last, "CTA %u lane %u record %u", cta, lane, i);
                last = end;
                CHECK(
                    (event == Event::kCopy) == (event != Event::kWait && lane < 4), "lane %u",
                    lane);
                stores += event == Event::kEpilogue;
                if (event != Event::kMultiply && event != Event::kSkip) continue;
                const Record& tile = buffer.records(cta, lane)[++i];
                const u32 row = tile.begin_lo_ns;
                const u32 valid = tile.remote & 255, k_steps = tile.remote >> 8;
                const u32 wg = lane - 4;
                CHECK(k_steps == l.hidden / 64, "%u steps", k_steps);
                CHECK((valid > wg * 64) == (event == Event::kMultiply), "%u rows", valid);
                if (event == Event::kSkip) continue;
                CHECK(l.expert_of(row) == tile.what, "row %u of %u", row, tile.what);
                ++products;
                ++tiles[{row + wg * 64, tile.length_ns, wg}];
            }
            CHECK(stores == products, "%u epilogues of %u tiles", stores, products);
        }
    u32 wanted = 0;
    for (u32 e = 0; e < l.experts(); ++e)
        wanted += ceil_div(static_cast<u32>(l.counts[e]), 64u) * ceil_div(l.intermediate, 128u);
    CHECK(tiles.size() == wanted, "%zu of %u tiles", tiles.size(), wanted);
    for (const auto& [tile, times] : tiles)
        CHECK(times == 1, "a tile recorded %u times", times);
}

CASE(what_finds_no_room_is_counted_and_not_written) {
    const Layer l = small();
    Buffer buffer(3, 1);  // and no room at all for CTAs 1 to 3
    run(l, &buffer);
    CHECK(buffer.nothing_behind(), "written past the end");
    u32 most = 0;
    for (u32 lane = 0; lane < kLanes; ++lane)
        most = max_of(most, buffer.lane(0, lane).count);
    CHECK(most > buffer.capacity, "at most %u records", most);
}

CASE(without_a_buffer_nothing_is_recorded) {
    run(small(), nullptr);
}
