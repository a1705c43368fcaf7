// SPDX-License-Identifier: Apache-2.0
// moe/group_bounds.cuh on simulated threads: all four descriptions of groups, and every way in which
// one can be wrong.
#include "moe/group_bounds.cuh"

#include <algorithm>

#include "check.hpp"
#include "sim/builtins.hpp"

namespace prime::moe {
u32 tables[3 * GroupBounds::kMaxGroups];
}

using namespace prime;
using moe::GroupBounds;
using moe::Groups;

namespace {

sim::Machine machine(3);

struct Found {
    std::vector<i32> counts, starts;
    u32 bad;
};

Found run(
    Groups kind, const std::vector<i32>& groups, u32 num_groups, u32 rows, u32 align = 64,
    u32 round = 1) {
    Found found{std::vector<i32>(num_groups, -77), std::vector<i32>(num_groups + 1, -77), 0};
    FaultRecord fault{};
    const moe::GroupBoundsArgs args{
        groups.data(),
        found.counts.data(),
        found.starts.data(),
        &fault,
        static_cast<u32>(kind),
        rows,
        num_groups,
        align,
        round,
        0};
    for (u32& word : moe::tables)
        word = 0xFFFFFFFFu;
    const LaunchShape& shape = GroupBounds::kLaunch;
    sim::run_grid(machine, {1 + machine.random.below(2), shape.threads, 1, shape.smem_bytes}, [&] {
        GroupBounds::run(args);
    });
    found.bad = fault.bad_ids;
    return found;
}

void check_equal(const Found& got, const Found& want) {
    CHECK(got.bad == want.bad, "%u bad, not %u", got.bad, want.bad);
    for (u32 g = 0; g < want.counts.size(); ++g)
        CHECK(
            got.counts[g] == want.counts[g] && got.starts[g] == want.starts[g],
            "group %u of %zu: %d rows at %d, not %d at %d", g, want.counts.size(), got.counts[g],
            got.starts[g], want.counts[g], want.starts[g]);
    CHECK(got.starts.back() == want.starts.back(), "the end is %d", got.starts.back());
}

std::vector<i32> random_sizes() {
    constexpr i32 kSpecial[] = {0, 0, 0, 1, 63, 64, 65, 127, 128, 129, 300};
    constexpr u32 kGroups[] = {1, 2, 5, 33, 64, 1100};
    std::vector<i32> sizes(kGroups[machine.random.below(6)]);
    for (i32& size : sizes)
        size = kSpecial[machine.random.below(sizes.size() > 64 ? 7 : 11)];
    return sizes;
}

i32 up(i32 value, i32 to) {
    return (value + to - 1) / to * to;
}

}  // namespace

CASE(runs_of_rows_are_found_in_any_order_with_any_padding) {
    for (u32 round = 0; round < 12; ++round) {
        const std::vector<i32> sizes = random_sizes();
        const i32 align = round % 2 == 0 ? 64 : 192;
        std::vector<u32> order(sizes.size());
        for (u32 i = 0; i < order.size(); ++i) {
            order[i] = i;
            std::swap(order[i], order[machine.random.below(i + 1)]);
        }
        Found want{std::vector<i32>(sizes.size(), 0), std::vector<i32>(sizes.size() + 1, 0), 0};
        std::vector<i32> rows;
        for (const u32 g : order) {
            if (sizes[g] == 0) continue;
            want.starts[g] = static_cast<i32>(rows.size());
            want.counts[g] = up(sizes[g], 64);
            rows.insert(rows.end(), sizes[g], static_cast<i32>(g));
            rows.resize(up(static_cast<i32>(rows.size()), align), -1);
        }
        if (round % 3 == 0) rows.insert(rows.end(), 1 + machine.random.below(200), -1);
        while (round % 3 == 1 && !rows.empty() && rows.back() == -1)
            rows.pop_back();
        const i32 end = static_cast<i32>(rows.size());
        for (u32 g = 0; g < sizes.size(); ++g)
            want.counts[g] = std::min(want.counts[g], end - want.starts[g]);
        want.starts.back() = end;
        check_equal(
            run(Groups::kRows, rows, static_cast<u32>(sizes.size()), static_cast<u32>(end)), want);
    }
}

CASE(ends_start_the_next_group_at_the_alignment_and_reach_as_far_into_padding_as_asked) {
    for (u32 round = 0; round < 12; ++round) {
        const std::vector<i32> sizes = random_sizes();
        const i32 align = round % 2 == 0 ? 64 : 192, reach = round % 3 == 0 ? 1 : align;
        Found want{{}, {}, 0};
        std::vector<i32> ends;
        for (const i32 size : sizes) {
            const i32 start = ends.empty() ? 0 : up(ends.back(), align);
            want.starts.push_back(size == 0 ? 0 : start);
            want.counts.push_back(up(size, reach));
            ends.push_back(start + size);
        }
        const bool cut = machine.random.below(2) != 0;
        const i32 rows = std::max(cut ? ends.back() : up(ends.back(), align), 1);
        if (cut && sizes.back() != 0) want.counts.back() = sizes.back();
        want.starts.push_back(rows);
        const u32 groups = static_cast<u32>(sizes.size());
        if (cut && sizes.back() == 0) continue;
        check_equal(
            run(Groups::kEnds, ends, groups, static_cast<u32>(rows), static_cast<u32>(align),
                static_cast<u32>(reach)),
            want);
    }
}

CASE(sizes_are_summed_over_more_groups_than_a_warp_has_lanes) {
    for (u32 round = 0; round < 12; ++round) {
        Found want{random_sizes(), {0}, 0};
        for (i32& size : want.counts) {
            size = up(size, 64);
            want.starts.push_back(want.starts.back() + size);
        }
        const u32 groups = static_cast<u32>(want.counts.size());
        check_equal(
            run(Groups::kSizes, want.counts, groups, static_cast<u32>(want.starts.back())), want);
    }
}

CASE(places_stand_at_equal_distances) {
    Found want{random_sizes(), {}, 0};
    for (u32 g = 0; g <= want.counts.size(); ++g)
        want.starts.push_back(static_cast<i32>(g * 320));
    check_equal(run(Groups::kPlaces, want.counts, static_cast<u32>(want.counts.size()), 320), want);
}

CASE(four_thousand_groups_fit) {
    std::vector<i32> rows, ones(GroupBounds::kMaxGroups, 64);
    Found want{ones, {}, 0};
    for (u32 g = 0; g < GroupBounds::kMaxGroups; ++g) {
        rows.insert(rows.end(), 64, static_cast<i32>(g));
        want.starts.push_back(static_cast<i32>(64 * g));
    }
    want.starts.push_back(64 * GroupBounds::kMaxGroups);
    const u32 end = static_cast<u32>(want.starts.back());
    check_equal(run(Groups::kRows, rows, GroupBounds::kMaxGroups, end), want);
    check_equal(run(Groups::kSizes, ones, GroupBounds::kMaxGroups, end), want);
}

CASE(what_is_no_list_of_groups_is_counted_and_bounds_stay_inside) {
    const auto rows = [](std::vector<std::pair<i32, u32>> runs) {
        std::vector<i32> all;
        for (const auto& [group, count] : runs)
            all.insert(all.end(), count, group);
        return all;
    };
    constexpr i32 kLarge = 0x7FFFFFC0;
    const auto two = [&](const std::vector<i32>& list) { return run(Groups::kRows, list, 2, 192); };
    // In two pieces; not at a multiple of 64; no such group; behind padding; below -1.
    check_equal(two(rows({{0, 64}, {1, 64}, {0, 64}})), {{0, 64}, {0, 64, 192}, 1});
    check_equal(two(rows({{0, 60}, {1, 132}})), {{64, 128}, {0, 64, 192}, 4});
    check_equal(two(rows({{0, 64}, {2, 128}})), {{64, 0}, {0, 0, 192}, 128});
    check_equal(two(rows({{-1, 10}, {1, 54}, {0, 128}})), {{128, 0}, {64, 0, 192}, 54});
    check_equal(two(rows({{0, 128}, {-5, 64}})), {{128, 0}, {0, 0, 192}, 64});
    // Ends that fall; that leave the operand.
    const auto ends = [&](const std::vector<i32>& list) {
        return run(Groups::kEnds, list, 3, 256, 128, 1);
    };
    check_equal(ends({10, 5, 200}), {{10, 0, 72}, {0, 0, 128, 256}, 1});
    check_equal(ends({10, 138, 500}), {{10, 10, 0}, {0, 128, 0, 256}, 1});
    check_equal(ends({-3, 138, 150}), {{0, 0, 0}, {0, 0, 0, 256}, 2});
    // Sizes that are no multiples of 64; negative; that leave the operand, also after wrapping.
    const auto sizes = [&](const std::vector<i32>& list) {
        return run(Groups::kSizes, list, 3, 256);
    };
    check_equal(sizes({64, 65, 128}), {{64, 0, 0}, {0, 0, 0, 256}, 2});
    check_equal(sizes({64, -64, 128}), {{64, 0, 128}, {0, 0, 64, 256}, 1});
    check_equal(sizes({kLarge, kLarge, 128}), {{0, 0, 0}, {0, 0, 0, 256}, 3});
    check_equal(run(Groups::kPlaces, {65, -1, 64}, 3, 64), {{0, 0, 64}, {0, 64, 128, 192}, 2});
}
