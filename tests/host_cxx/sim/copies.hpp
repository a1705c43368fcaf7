// SPDX-License-Identifier: Apache-2.0
// sim/copies.hpp: TMA copies of boxes of a tensor, all with the 128-byte swizzle.
//
// A load poisons its destination when it is issued and fills it at any later time. A store reads
// shared memory at any time until its thread has waited for the read, and writes at any time until
// its thread has waited for all of it.
#pragma once
#include <array>

#include "builtins.hpp"
#include "common/types.cuh"

namespace sim {

using Coordinates = std::array<int, 5>;

// What a tensor map stands for. Sizes innermost first; strides in bytes, of dimension 1 and up.
struct Tensor {
    u8* data = nullptr;
    u32 element = 2;
    u32 rank = 0;
    std::array<u64, 5> size{}, stride{};
    std::array<u32, 5> box{};

    u32 box_rows() const {
        u32 rows = 1;
        for (u32 d = 1; d < rank; ++d)
            rows *= box[d];
        return rows;
    }

    u32 box_bytes() const { return box_rows() * 128; }
};

inline Tensor make_tensor(
    void* data, u32 element, std::vector<u64> size, std::vector<u64> stride, std::vector<u32> box) {
    Tensor t;
    t.data = static_cast<u8*>(data);
    t.element = element;
    t.rank = static_cast<u32>(size.size());
    CHECK(stride.size() + 1 == size.size() && box.size() == size.size(), "rank %u", t.rank);
    CHECK(box[0] * element == 128, "a box row has %u bytes", box[0] * element);
    for (u32 d = 0; d < t.rank; ++d) {
        t.size[d] = size[d];
        t.box[d] = box[d];
        t.stride[d] = d == 0 ? element : stride[d - 1];
        CHECK(d == 0 || t.stride[d] % 16 == 0, "stride %llu", t.stride[d]);
    }
    return t;
}

// The opaque bytes of a tensor map are the address of its Tensor.
inline prime::TensorMap map_of(const Tensor& tensor) {
    prime::TensorMap map{};
    map.opaque[0] = reinterpret_cast<u64>(&tensor);
    return map;
}

inline const Tensor& tensor_of(const prime::TensorMap* map) {
    CHECK(map->opaque[0] != 0, "a tensor map that was never made");
    return *reinterpret_cast<const Tensor*>(map->opaque[0]);
}

inline u32 swizzle128(u32 address) {
    return address ^ (address >> 7 & 7) << 4;
}

// Calls f(global address or null when outside, shared address) for every element of a box.
template <class F>
void each_element(const Tensor& t, const Coordinates& at, u32 shared, F&& f) {
    for (u32 row = 0; row < t.box_rows(); ++row) {
        u8* place = t.data;
        bool inside = true;
        u32 rest = row;
        for (u32 d = 1; d < t.rank; ++d) {
            const long long c = at[d] + static_cast<long long>(rest % t.box[d]);
            rest /= t.box[d];
            inside = inside && c >= 0 && c < static_cast<long long>(t.size[d]);
            if (inside) place += c * t.stride[d];
        }
        for (u32 i = 0; i < t.box[0]; ++i) {
            const long long c = at[0] + static_cast<long long>(i);
            const bool here = inside && c >= 0 && c < static_cast<long long>(t.size[0]);
            f(here ? place + c * t.element : nullptr,
              swizzle128(shared + row * 128 + i * t.element));
        }
    }
}

inline long long loads_until_loss = -1;  // the load after so many never arrives; negative: none

// One box into every CTA of `mask` (ranks in the cluster), at the same shared address.
inline void load_box(
    u32 dst, const prime::TensorMap* map, u32 bar, const Coordinates& at, u32 mask) {
    const Tensor& t = tensor_of(map);
    std::vector<u32> ctas;
    for (u32 r = 0; r < machine->shape().cluster; ++r)
        if (mask >> r & 1) ctas.push_back(machine->peer(r));
    CHECK(dst % 128 == 0, "a load to %u", dst);
    for (const u32 cta : ctas) {
        std::memset(memory.at(cta, dst, t.box_bytes()), kPoison, t.box_bytes());
        ++memory.ctas[cta].version;
        memory.barrier(cta, bar);
    }
    if (loads_until_loss-- == 0) return;
    auto later = std::make_shared<Later>();
    later->run = [=, &t] {
        for (const u32 cta : ctas) {
            CHECK(machine->running(cta) > 0 || machine->stalls_allowed, "CTA %u has left", cta);
            each_element(t, at, dst, [&](const u8* from, u32 to) {
                u8* place = memory.at(cta, to, t.element);
                if (from != nullptr)
                    std::memcpy(place, from, t.element);
                else
                    std::memset(place, 0, t.element);
            });
            ++memory.ctas[cta].version;
            memory.bytes_arrive(cta, bar, t.box_bytes());
        }
    };
    machine->later(later);
}

// A store: its read, then its write.
struct Store {
    std::shared_ptr<Later> read = std::make_shared<Later>();
    std::shared_ptr<Later> write = std::make_shared<Later>();
};

// What one thread has stored: groups in order, the last one still open.
struct Bulk {
    std::vector<std::vector<Store>> groups{1};

    // All but the last `n` committed groups.
    void wait(u32 n, bool only_read) {
        const u32 committed = static_cast<u32>(groups.size()) - 1;
        for (u32 g = 0; g + n < committed; ++g)
            for (Store& s : groups[g]) {
                s.read->finish();
                if (!only_read) s.write->finish();
            }
    }

    bool finished() const {
        for (const auto& group : groups)
            for (const Store& s : group)
                if (!s.read->done) return false;
        return true;
    }
};

inline std::map<u32, Bulk> bulks;  // of each thread of the run that stores

inline Bulk& own_bulk() {
    return bulks[machine->self().id];
}

inline void store_box(const prime::TensorMap* map, u32 src, const Coordinates& at, bool add) {
    const Tensor& t = tensor_of(map);
    const u32 cta = machine->self().cta;
    memory.check_published(src, t.box_bytes());
    CHECK(src % 128 == 0 && (!add || t.element == 4), "a store from %u", src);
    auto held = std::make_shared<std::vector<u8>>();
    Store store;
    store.read->run = [=, &t] {
        each_element(t, at, src, [&](const u8*, u32 from) {
            const u8* place = memory.at(cta, from, t.element);
            held->insert(held->end(), place, place + t.element);
        });
    };
    store.write->run = [=, &t, read = store.read] {
        read->finish();
        const u8* next = held->data();
        each_element(t, at, src, [&](u8* to, u32) {
            float value[2];
            std::memcpy(value, next, t.element);
            if (add && to != nullptr) std::memcpy(value + 1, to, t.element);
            value[0] = add && to != nullptr ? value[0] + value[1] : value[0];
            if (to != nullptr) std::memcpy(to, value, t.element);
            next += t.element;
        });
        machine->happened();
    };
    own_bulk().groups.back().push_back(store);
    // Half of the stores take every liberty: nothing happens before somebody waits for it.
    if (machine->random.below(2)) return;
    machine->later(store.read);
    machine->later(store.write);
}

}  // namespace sim
