// SPDX-License-Identifier: Apache-2.0
// sim/memory.hpp: shared memory of every CTA: bytes, mbarriers, and which bytes the asynchronous
// proxy may not see yet.
#pragma once
#include <cstring>
#include <deque>
#include <map>

#include "machine.hpp"

namespace sim {

constexpr u32 kChunk = 16;
constexpr u8 kPoison = 0xFF;  // makes NaNs of every float type

struct Barrier {
    u32 expected = 0, pending = 0, phase = 0;
    long long bytes = 0;  // announced and not there yet

    void settle() {
        if (pending != 0 || bytes != 0) return;
        pending = expected;
        phase ^= 1;
        machine->happened();
    }
};

struct Cta {
    std::vector<u8> bytes;
    std::vector<u32> writer;  // of each chunk: thread + 1 that wrote it and has not fenced since
    std::vector<std::vector<u32>> unfenced;  // chunks that each thread wrote since its last fence
    std::map<u32, Barrier> barriers;
    std::map<u32, Meeting> named;
    Meeting cluster;  // of the cluster that this CTA is the first of
    u64 version = 0;  // moves with every write
    u32 start = 0;    // shared address of the first byte of dynamic shared memory
};

struct Memory {
    std::deque<Cta> ctas;  // of all launches of a run; nothing moves when another one begins

    // Room for the CTAs of a launch.
    void add(const Shape& s, u32 start) {
        for (u32 i = 0; i < s.grid; ++i) {
            Cta& cta = ctas.emplace_back();
            cta.start = start;
            cta.bytes.assign(s.smem_bytes, kPoison);
            cta.writer.assign(s.smem_bytes / kChunk + 2, 0);
            cta.unfenced.assign(s.block, {});
        }
    }

    Cta& own() { return ctas[machine->self().cta]; }

    u8* at(u32 cta, u32 address, u32 bytes) {
        Cta& c = ctas[cta];
        CHECK(
            address >= c.start && address + bytes <= c.start + c.bytes.size(),
            "shared address %u + %u of CTA %u is outside [%u, %zu)", address, bytes, cta, c.start,
            c.start + c.bytes.size());
        return c.bytes.data() + (address - c.start);
    }

    u8* at(u32 address, u32 bytes) { return at(machine->self().cta, address, bytes); }

    // What the generic proxy writes.
    void write(u32 address, const void* from, u32 bytes) {
        std::memcpy(at(address, bytes), from, bytes);
        ++own().version;
        const u32 chunk = (address - own().start) / kChunk;
        own().writer[chunk] = machine->self().index + 1;
        own().unfenced[machine->self().index].push_back(chunk);
    }

    void fence() {
        std::vector<u32>& chunks = own().unfenced[machine->self().index];
        for (const u32 chunk : chunks)
            if (own().writer[chunk] == machine->self().index + 1) own().writer[chunk] = 0;
        chunks.clear();
    }

    // The asynchronous proxy is about to read these bytes of the running thread's CTA.
    void check_published(u32 address, u32 bytes) {
        for (u32 c = (address - own().start) / kChunk; c < (address - own().start + bytes) / kChunk;
             ++c)
            CHECK(
                own().writer[c] == 0, "thread %u of CTA %u wrote %u without a fence",
                own().writer[c] - 1, machine->self().cta, own().start + c * kChunk);
    }

    Barrier& barrier(u32 cta, u32 address) {
        CHECK(address % 8 == 0, "an mbarrier at %u", address);
        const auto found = ctas[cta].barriers.find(address);
        CHECK(
            found != ctas[cta].barriers.end(), "CTA %u has no mbarrier at %u + %u", cta,
            ctas[cta].start, address - ctas[cta].start);
        return found->second;
    }

    void arrive(u32 cta, u32 address) {
        CHECK(machine->running(cta) > 0, "an arrival at CTA %u, which has left", cta);
        Barrier& b = barrier(cta, address);
        // Once waits have run out of time, barriers are as good as lost.
        if (machine->stalls_allowed && b.pending == 0) return;
        CHECK(b.pending > 0, "one arrival too many at %u of CTA %u", address, cta);
        --b.pending;
        b.settle();
    }

    void bytes_arrive(u32 cta, u32 address, u32 bytes) {
        Barrier& b = barrier(cta, address);
        b.bytes -= bytes;
        b.settle();
    }
};

inline Memory memory;

// Global memory that belongs to the launches of one stream; what those of another write there with
// ptx::st_v4 arrives late. (Plain stores of the language arrive at once: nothing can hold them.)
struct Region {
    const u8* begin;
    u64 bytes;
    u32 stream;
};

struct Remote {
    std::vector<Region> regions;
    std::vector<std::vector<std::shared_ptr<Later>>> writes;  // of each stream's launch
    std::map<const void*, Knowledge> words;                   // released with these

    bool is_remote(const void* at) const {
        for (const Region& r : regions)
            if (at >= r.begin && at < r.begin + r.bytes)
                return r.stream != machine->launch().stream;
        return false;
    }

    void write(std::function<void()> run) {
        const auto later = std::make_shared<Later>(Later{std::move(run)});
        Knowledge& known = machine->self().known;
        if (known == nullptr || known.use_count() > 1) {
            const Knowledge before = std::move(known);
            known = std::make_shared<Known>();
            if (before != nullptr) *known = {{}, {before}, before->depth + 1};
        }
        known->writes.push_back(later);
        const u32 stream = machine->launch().stream;
        if (writes.size() <= stream) writes.resize(stream + 1);
        writes[stream].push_back(later);
        if (machine->random.below(2)) machine->later(later);  // the others wait to be waited for
    }

    void fence() {
        if (machine->self().known != nullptr) machine->self().known->arrive();
    }

    void release(const void* word) { learn(words[word], machine->self().known); }

    void acquire(const void* word) {
        const auto found = words.find(word);
        if (found != words.end()) learn(machine->self().known, found->second);
    }

    // A launch ends when all it has written is there.
    void end(u32 stream) {
        if (stream >= writes.size()) return;
        for (const auto& write : writes[stream])
            write->finish();
        writes[stream].clear();
    }
};

inline Remote remote;

// A launch with dynamic shared memory that starts at any multiple of 16.
inline Work work_of(const Shape& shape, std::function<void()> body) {
    const auto begins = [shape](u32) { memory.add(shape, 1024 + machine->random.below(64) * 16); };
    return {shape, begins, std::move(body), {}};
}

inline void run_streams(Machine& m, const std::vector<Stream>& streams) {
    memory.ctas.clear();
    remote.words.clear();
    remote.writes.clear();
    m.run(streams);
}

inline void run_grid(Machine& m, const Shape& shape, std::function<void()> body) {
    run_streams(m, {{work_of(shape, std::move(body))}});
}

}  // namespace sim
