// SPDX-License-Identifier: Apache-2.0
// sim/machine.hpp: a GPU for headers that need other threads: every simulated thread runs on a
// stack of its own, one at a time, and gives way wherever it waits.
//
// Interleavings are random and repeatable: a seed decides which warps run in a round and when
// copies that were started take place. When nothing can go on, the machine stalls: an error that
// lists who waits for what, unless the test expects waits to run out of time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#include "../check.hpp"

namespace sim {

using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kStackBytes = 64 * 1024;
constexpr u32 kQuietRounds = 4096;          // of polling alone, before that is a stall
constexpr u32 kShortQuietRounds = 2;        // the same where stalls are expected
constexpr u64 kStallNs = 10 * 1000 * 1000;  // what a stall adds to the clock
constexpr u64 kLongestNs = 1000ull * 1000 * 1000 * 1000;  // that a launch may take, stalls and all

constexpr u32 kSleepChance = 128;  // one in so many rounds of a warp puts a lane to sleep
constexpr u32 kSleepRounds = 128;  // at most

struct Shape {
    u32 grid, block, cluster, smem_bytes;
};

struct Thread {
    jmp_buf place;
    ucontext_t entry;
    std::unique_ptr<u8[]> stack;
    u32 cta, index;
    const u32* word = nullptr;  // runs once this is not `held`, or a stall came; null: can run
    const u32* stalls = nullptr;
    u32 held = 0, stalls_held = 0;
    const char* where = "";
    bool started = false, done = false, polling = false;

    u32 lane() const { return index % 32; }
    bool ready() const { return word == nullptr || *word != held || *stalls != stalls_held; }
};

// A counter that threads wait on until it moves.
struct Meeting {
    u32 arrived = 0;
    u32 generation = 0;
    bool votes[2] = {false, false};  // of this generation and of the one before
};

struct Warp {
    u32 arrived = 0, mask = 0, generation = 0;
    u32 active = 0, asking = 0, asked = 0;  // of __activemask
    u32 stalls = 0;                         // that this warp has seen
    const char* what = nullptr;
    u64 slots[2][32];
};

// A lane of a warp that does not run for some rounds: nothing but collectives keeps lanes together.
struct Sleep {
    u32 lane = 0, rounds = 0;
};

// Something that was started and takes place later: at a random time, or when it is waited for.
struct Later {
    std::function<void()> run;
    bool done = false;

    void finish() {
        if (done) return;
        done = true;
        run();
    }
};

class Machine;
inline Machine* machine = nullptr;  // the one that runs

class Machine {
public:
    explicit Machine(u64 seed) : random(seed) { machine = this; }

    test::Random random;
    Shape shape{};
    bool stalls_allowed = false;
    u64 now_ns = 1;

    // Runs body() in every thread of a grid until all have returned.
    void launch(const Shape& s, std::function<void()> body);

    Thread& self() { return *current_; }
    Warp& warp() { return warps_[(current_->cta * shape.block + current_->index) / 32]; }
    u32 live_lanes(const Warp& warp) const;
    u32 running(u32 cta) const { return running_[cta]; }  // threads that have not returned
    u32 rank() const { return current_->cta % shape.cluster; }
    // The CTA that is `rank` in the cluster of the running thread.
    u32 peer(u32 rank) const { return current_->cta / shape.cluster * shape.cluster + rank; }

    // Gives way until `word` is not `held`; false when the machine stalled instead.
    bool block(const char* where, const u32& word, u32 held);

    // Gives way for a round without having got anywhere.
    void poll(const char* where);

    // All of `members` threads meet.
    void meet(Meeting& meeting, u32 members, const char* where);

    void later(const std::shared_ptr<Later>& what) { pending_.push_back(what); }

    // Says that something happened that polling threads may be waiting for.
    void happened() { quiet_ = 0; }

private:
    void start(Thread& thread);
    void resume(Thread& thread);
    void suspend();
    bool round();
    bool take_one_later();
    void stall();
    static void entry();

    std::function<void()> body_;
    std::vector<std::unique_ptr<Thread>> threads_;
    std::vector<Warp> warps_;
    std::vector<u32> running_;
    std::vector<u32> pace_;  // a warp runs in one of `pace` rounds
    std::vector<Sleep> sleeps_;
    std::vector<std::shared_ptr<Later>> pending_;
    Thread* current_ = nullptr;
    jmp_buf scheduler_;
    u64 started_ns_ = 0;
    u32 alive_ = 0, quiet_ = 0;
};

inline void Machine::entry() {
    machine->body_();
    machine->current_->done = true;
    --machine->alive_;
    --machine->running_[machine->current_->cta];
    machine->happened();
    _longjmp(machine->scheduler_, 1);
}

inline void Machine::start(Thread& thread) {
    thread.started = true;
    getcontext(&thread.entry);
    thread.entry.uc_stack = {thread.stack.get(), 0, kStackBytes};
    thread.entry.uc_link = nullptr;
    makecontext(&thread.entry, &Machine::entry, 0);
    setcontext(&thread.entry);
}

inline void Machine::resume(Thread& thread) {
    current_ = &thread;
    threadIdx = {thread.index, 0, 0};
    blockIdx = {thread.cta, 0, 0};
    if (_setjmp(scheduler_) == 0) {
        if (!thread.started) start(thread);
        _longjmp(thread.place, 1);
    }
}

inline void Machine::suspend() {
    if (_setjmp(current_->place) == 0) _longjmp(scheduler_, 1);
}

inline bool Machine::block(const char* where, const u32& word, u32 held) {
    Thread& thread = *current_;
    thread.stalls = &warp().stalls;
    thread.stalls_held = *thread.stalls;
    thread.where = where;
    thread.held = held;
    thread.word = &word;
    if (word == held) suspend();
    thread.word = nullptr;
    return word != held;
}

inline u32 Machine::live_lanes(const Warp& warp) const {
    const u64 first = static_cast<u64>(&warp - warps_.data()) * 32;
    u32 lanes = 0;
    for (u32 i = 0; i < 32; ++i)
        lanes |= (threads_[first + i]->done ? 0u : 1u) << i;
    return lanes;
}

inline void Machine::poll(const char* where) {
    current_->where = where;
    current_->polling = true;
    suspend();
    current_->polling = false;
}

inline void Machine::meet(Meeting& meeting, u32 members, const char* where) {
    const u32 generation = meeting.generation;
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.generation;
        meeting.votes[meeting.generation & 1] = false;
        happened();
        return;
    }
    while (!block(where, meeting.generation, generation)) {
    }
}

inline bool Machine::take_one_later() {
    if (pending_.empty()) return false;
    std::swap(pending_[random.below(static_cast<u32>(pending_.size()))], pending_.back());
    const std::shared_ptr<Later> what = pending_.back();
    pending_.pop_back();
    what->finish();
    happened();
    return true;
}

inline bool Machine::round() {
    bool moved = false;
    const u32 count = static_cast<u32>(warps_.size());
    const u32 first = random.below(count);
    for (u32 i = 0; i < count; ++i) {
        const u32 w = (first + i) % count;
        Sleep& sleep = sleeps_[w];
        if (sleep.rounds > 0)
            --sleep.rounds;
        else if (random.below(kSleepChance) == 0)
            sleep = {random.below(32), random.below(kSleepRounds)};
        const bool pauses = pace_[w] > 1 && random.below(pace_[w]) != 0;
        for (u32 t = w * 32; t < w * 32 + 32; ++t) {
            Thread& thread = *threads_[t];
            if (thread.done || !thread.ready()) continue;
            moved = true;
            if (pauses) break;
            if (sleep.rounds > 0 && t % 32 == sleep.lane) continue;
            if (!thread.polling) happened();
            resume(thread);
        }
    }
    return moved;
}

inline void Machine::stall() {
    if (stalls_allowed && now_ns - started_ns_ < kLongestNs) {
        // Warps poll at their own pace, so that their waits run out one after the other.
        for (u32 w = 0; w < warps_.size(); ++w)
            warps_[w].stalls += random.below(pace_[w] + 1) == 0;
        now_ns += kStallNs;
        quiet_ = 0;
        return;
    }
    for (u32 w = 0; w < warps_.size(); ++w)
        for (u32 t = w * 32; t < w * 32 + 32; ++t) {
            const Thread& thread = *threads_[t];
            const bool alike = t % 32 != 0 && threads_[t - 1]->where == thread.where;
            if (thread.done || alike) continue;
            std::fprintf(
                stderr, "CTA %u, from thread %u on: %s\n", thread.cta, thread.index, thread.where);
        }
    test::fail(__FILE__, __LINE__, "nothing can go on");
}

inline void Machine::launch(const Shape& s, std::function<void()> body) {
    shape = s;
    body_ = std::move(body);
    blockDim = {s.block, 1, 1};
    gridDim = {s.grid, 1, 1};
    alive_ = s.grid * s.block;
    started_ns_ = now_ns;
    warps_.assign(alive_ / 32, Warp{});
    running_.assign(s.grid, s.block);
    pace_.assign(alive_ / 32, 1);
    sleeps_.assign(alive_ / 32, Sleep{});
    for (u32& pace : pace_)
        pace = random.below(4) == 0 ? 1 + random.below(8) : 1;
    for (u32 i = 0; i < alive_; ++i) {
        if (i == threads_.size()) {
            threads_.push_back(std::make_unique<Thread>());
            threads_[i]->stack = std::make_unique_for_overwrite<u8[]>(kStackBytes);
        }
        Thread& thread = *threads_[i];
        thread.cta = i / s.block;
        thread.index = i % s.block;
        thread.started = thread.done = false;
        thread.word = nullptr;
    }
    while (alive_ > 0) {
        now_ns += 1000;
        const bool moved = round();
        // Copies take their time: some rounds see none, some several.
        u32 copies = moved ? random.below(3) : 1 + random.below(2);
        bool took = false;
        while (copies-- > 0 && take_one_later())
            took = true;
        const u32 patience = stalls_allowed ? kShortQuietRounds : kQuietRounds;
        if ((!moved && !took) || ++quiet_ > patience) stall();
    }
    while (take_one_later()) {
    }
}

}  // namespace sim
