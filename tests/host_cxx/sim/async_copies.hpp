// SPDX-License-Identifier: Apache-2.0
// sim/async_copies.hpp: 16-byte asynchronous copies to shared memory, in groups per thread.
//
// A copy poisons its destination when it is issued and lands at any later time, at the latest when its thread waits for
// its group. It lands through the generic proxy: unfenced until its thread fences after that.
#pragma once
#include "builtins.hpp"
#include "machine.hpp"
#include "memory.hpp"

namespace sim {

struct AsyncGroups {
    std::vector<std::vector<std::shared_ptr<Later>>> groups{1};
    std::vector<std::vector<u32>> places{1};

    // All but the last `n` committed groups; the thread may then fence what they wrote.
    void wait(u32 n) {
        const u32 committed = static_cast<u32>(groups.size()) - 1;
        for (u32 g = 0; g + n < committed; ++g) {
            for (const auto& copy : groups[g])
                copy->finish();
            for (const u32 chunk : places[g])
                memory.own().unfenced[machine->self().index].push_back(chunk);
            groups[g].clear();
            places[g].clear();
        }
    }
};

inline std::map<u32, AsyncGroups> async_groups;  // of each thread of the grid

inline AsyncGroups& own_async() {
    return async_groups[machine->self().cta * machine->shape.block + machine->self().index];
}

inline void copy_16(u32 dst, const void* src, bool exists) {
    CHECK(dst % 16 == 0 && reinterpret_cast<u64>(src) % 16 == 0, "a copy to %u", dst);
    const u32 cta = machine->self().cta;
    const u32 chunk = (dst - memory.own().start) / kChunk;
    std::memset(memory.at(dst, 16), kPoison, 16);
    ++memory.own().version;
    memory.own().writer[chunk] = machine->self().index + 1;
    auto later = std::make_shared<Later>();
    later->run = [=] {
        u8* place = memory.at(cta, dst, 16);
        if (exists)
            std::memcpy(place, src, 16);
        else
            std::memset(place, 0, 16);
        ++memory.ctas[cta].version;
    };
    own_async().groups.back().push_back(later);
    own_async().places.back().push_back(chunk);
    machine->later(later);
}

}  // namespace sim
