// SPDX-License-Identifier: Apache-2.0
// sim/builtins.hpp: warp collectives, barriers and atomics of the language, for simulated threads.
//
// A collective waits for every lane of its mask; lanes that call different ones are an error.
#pragma once
#include "memory.hpp"

namespace sim {

inline const u64* exchange(u32 mask, u64 value, const char* what) {
    Warp& w = machine->warp();
    const u32 lane = machine->self().lane();
    CHECK(mask >> lane & 1, "lane %u calls %s for lanes %08x", lane, what, mask);
    const u32 generation = w.generation;
    if (w.arrived == 0) {
        w.mask = mask;
        w.what = what;
    }
    CHECK(
        w.mask == mask && w.what == what, "lane %u calls %s for %08x, others %s for %08x", lane,
        what, mask, w.what, w.mask);
    w.slots[generation & 1][lane] = value;
    w.arrived |= 1u << lane;
    if (w.arrived == mask) {
        w.arrived = 0;
        ++w.generation;
        machine->happened();
    } else {
        machine->block(what, w.generation, generation);
    }
    return w.slots[generation & 1];
}

template <class T>
u64 to_slot(T value) {
    static_assert(sizeof(T) <= 8);
    u64 slot = 0;
    std::memcpy(&slot, &value, sizeof(T));
    return slot;
}

template <class T>
T from_slot(u64 slot) {
    T value;
    std::memcpy(&value, &slot, sizeof(T));
    return value;
}

inline Meeting& named(u32 id) {
    return memory.own().named[id];
}

// Meets at a barrier; whether any of those who met there says so.
inline bool meet_any(u32 id, u32 threads, bool value, const char* what) {
    Meeting& meeting = named(id);
    const u32 generation = meeting.generation & 1;
    meeting.votes[generation] = meeting.votes[generation] || value;
    machine->meet(meeting, threads, what);
    return meeting.votes[generation];
}

}  // namespace sim

inline void __syncthreads() {
    sim::machine->meet(sim::named(0), sim::machine->shape().block, "__syncthreads");
}

inline int __syncthreads_and(int predicate) {
    const unsigned threads = sim::machine->shape().block;
    return !sim::meet_any(0, threads, predicate == 0, "__syncthreads_and");
}

inline void __syncwarp(unsigned mask) {
    if (mask == 1u << sim::machine->self().lane()) return;
    sim::Warp& warp = sim::machine->warp();
    sim::Knowledge& known = warp.known[warp.generation & 1];
    if (warp.arrived == 0) known = nullptr;
    sim::learn(known, sim::machine->self().known);
    sim::exchange(mask, 0, "__syncwarp");
    sim::learn(sim::machine->self().known, known);
}

inline void __threadfence_system() {}

// The lanes that come here while the others wait in a collective or have left.
inline unsigned __activemask() {
    sim::Warp& w = sim::machine->warp();
    const unsigned round = w.asked;
    w.asking |= 1u << sim::machine->self().lane();
    const auto all_here = [&] { return (w.asking | w.arrived | ~w.live_lanes()) == ~0u; };
    while (w.asked == round && !all_here())
        sim::machine->poll("__activemask");
    if (w.asked == round) {
        w.active = w.asking;
        w.asking = 0;
        ++w.asked;
    }
    return w.active;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    const auto* slots = sim::exchange(mask, sim::to_slot(value), "__shfl_sync");
    return sim::from_slot<T>(slots[lane & 31]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
    const auto* slots = sim::exchange(mask, sim::to_slot(value), "__shfl_up_sync");
    const unsigned lane = sim::machine->self().lane();
    return sim::from_slot<T>(slots[lane < delta ? lane : lane - delta]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    const auto* slots = sim::exchange(mask, sim::to_slot(value), "__shfl_xor_sync");
    return sim::from_slot<T>(slots[(sim::machine->self().lane() ^ bits) & 31]);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto* slots = sim::exchange(mask, predicate != 0, "__ballot_sync");
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; ++i)
        bits |= (mask >> i & 1 && slots[i] ? 1u : 0u) << i;
    return bits;
}

inline unsigned __match_any_sync(unsigned mask, unsigned value) {
    const auto* slots = sim::exchange(mask, value, "__match_any_sync");
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; ++i)
        bits |= (mask >> i & 1 && slots[i] == value ? 1u : 0u) << i;
    return bits;
}

template <class T>
T atomicAdd(T* address, T value) {
    const T old = *address;
    *address = old + value;
    sim::machine->happened();
    return old;
}

template <class T>
T atomicMax(T* address, T value) {
    const T old = *address;
    if (value > old) *address = value;
    sim::machine->happened();
    return old;
}

template <class T>
T atomicCAS(T* address, T expected, T value) {
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

// Kernels name their dynamic shared memory; its address is the only thing they ask of it.
inline unsigned long __cvta_generic_to_shared(const void*) {
    return sim::memory.own().start;
}
