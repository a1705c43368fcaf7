// SPDX-License-Identifier: Apache-2.0
// sim/machine.hpp: a GPU for headers that need other threads: every simulated thread runs on a
// stack of its own, one at a time, and gives way wherever it waits.
//
// Several launches can run at once, each with its own shape, and some one after the other, as those
// of a stream do.
//
// Interleavings are random and repeatable: a seed decides when a launch begins, which warps run in a
// round and when copies that were started take place. When nothing can go on, the machine stalls: an error that
// lists who waits for what, unless the test expects waits to run out of time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "../check.hpp"

namespace sim {

using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 kStackBytes = 64 * 1024;
constexpr u32 kQuietRounds = 4096;         // of polling alone, before that is a stall
constexpr u32 kShortQuietRounds = 2;       // the same where stalls are expected
constexpr u32 kLongQuietRounds = 128;      // after which such stalls take time and all poll alike
constexpr u64 kStallNs = 3 * 1000 * 1000;  // so much: a second is longer than anybody's 512 polls
constexpr u64 kLongestNs = 1000ull * 1000 * 1000 * 1000;  // that a launch may take, stalls and all

constexpr u32 kSleepChance = 128;  // one in so many rounds of a warp puts a lane to sleep
constexpr u32 kSleepRounds = 128;  // at most

constexpr u32 kLaunchPace = 4;     // of several launches, one may run in so many rounds only
constexpr u32 kLateRounds = 2000;  // at most, by which a launch or a cluster of several begins late

struct Shape {
    u32 grid, block, cluster, smem_bytes;
};

// A launch as it is asked for.
struct Work {
    Shape shape;
    std::function<void(u32 first_cta)> begins;
    std::function<void()> body;  // of every thread
    std::function<void(u32 stream)> ends;
};

// Launches that run one after the other.
using Stream = std::vector<Work>;

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

// What a thread has written to other ranks' memory, or has been told of: others may see it late,
// until a fence at system scope by a thread that knows of it.
struct Known {
    std::vector<std::shared_ptr<Later>> writes;
    std::vector<std::shared_ptr<Known>> from;
    u32 depth = 0;

    bool nothing() const { return writes.empty() && from.empty(); }

    void arrive() {
        std::vector<std::shared_ptr<Known>> all = std::move(from);
        for (const auto& write : writes)
            write->finish();
        while (!all.empty()) {
            const std::shared_ptr<Known> known = std::move(all.back());
            all.pop_back();
            for (const auto& write : known->writes)
                write->finish();
            known->writes.clear();
            for (auto& more : known->from)
                all.push_back(std::move(more));
            known->from.clear();
        }
        writes.clear();
        from.clear();
    }
};
using Knowledge = std::shared_ptr<Known>;

inline void learn(Knowledge& to, const Knowledge& what) {
    constexpr u32 kDeepest = 50;
    if (what == nullptr || what == to || what->nothing()) return;
    if (to == nullptr || to->nothing()) {
        to = what;
        return;
    }
    const u32 depth = std::max(to->depth, what->depth) + 1;
    to = std::make_shared<Known>(Known{{}, {to, what}, depth});
    if (depth > kDeepest) to->arrive();
}

struct Launch;

struct Thread {
    jmp_buf place;
    std::unique_ptr<u8[]> stack;
    Launch* launch = nullptr;
    u32 id = 0;     // of all threads of a run
    u32 cta = 0;    // of all CTAs of a run
    u32 index = 0;  // in the CTA
    Knowledge known;
    const u32* word = nullptr;    // runs once this is not `held`; null: can run
    const u32* stalls = nullptr;  // or a stall came, if this is not null
    u32 held = 0, stalls_held = 0;
    const char* where = "";
    bool started = false, done = false, polling = false;

    u32 lane() const { return index % 32; }
    bool free() const { return word == nullptr || *word != held; }
    bool ready() const { return free() || (stalls != nullptr && *stalls != stalls_held); }
};

// A counter that threads wait on until it moves.
struct Meeting {
    u32 arrived = 0;
    u32 generation = 0;
    bool votes[2] = {false, false};  // of this generation and of the one before
    Knowledge known[2];              // what those who meet tell one another
};

// A lane of a warp that does not run for some rounds: nothing but collectives keeps lanes together.
struct Sleep {
    u32 lane = 0, rounds = 0;
};

// What all lanes of a warp wait for: as long as it has not come there is no need to look at them.
struct Rest {
    static constexpr u32 kMost = 4;
    const u32* words[kMost];
    u32 held[kMost];
    u32 count = 0, stalls = 0;
    bool valid = false;

    void add(const u32* word, u32 value) {
        for (u32 i = 0; i < count; ++i)
            if (words[i] == word && held[i] == value) return;
        valid = valid && count < kMost;
        if (!valid) return;
        words[count] = word;
        held[count++] = value;
    }

    bool lasts(u32 stalls_now) const {
        for (u32 i = 0; i < count; ++i)
            if (*words[i] != held[i]) return false;
        return valid && stalls == stalls_now;
    }
};

struct Warp {
    Thread* threads = nullptr;
    Rest rest;
    u32 arrived = 0, mask = 0, generation = 0;
    u32 active = 0, asking = 0, asked = 0;  // of __activemask
    u32 stalls = 0;                         // that this warp has seen
    Knowledge known[2];                     // of __syncwarp, as of a meeting
    u32 pace = 1;                           // it runs in one of so many rounds
    u32 late = 0;                           // rounds before it begins
    Sleep sleep;
    const char* what = nullptr;
    u64 slots[2][32];

    u32 live_lanes() const {
        u32 lanes = 0;
        for (u32 i = 0; i < 32; ++i)
            lanes |= (threads[i].done ? 0u : 1u) << i;
        return lanes;
    }
};

// A launch that runs.
struct Launch {
    const Work& work;
    u32 stream;
    u32 first_cta;
    u32 alive;            // threads
    u32 pace = 1;         // it runs in one of so many rounds
    bool pauses = false;  // in this round
    std::vector<Thread> threads;
    std::vector<Warp> warps;

    const Shape& shape() const { return work.shape; }
};

class Machine;
inline Machine* machine = nullptr;  // the one that runs

class Machine {
public:
    explicit Machine(u64 seed) : random(seed) { machine = this; }

    test::Random random;
    bool stalls_allowed = false;
    u64 now_ns = 1;

    // Runs all launches of all streams.
    void run(const std::vector<Stream>& streams);

    Thread& self() { return *current_; }
    const Launch& launch() const { return *current_->launch; }
    const Shape& shape() const { return launch().shape(); }
    Warp& warp() { return current_->launch->warps[warp_index()]; }
    u32 running(u32 cta) const { return running_[cta]; }  // threads that have not returned
    u32 block_index() const { return current_->cta - launch().first_cta; }
    u32 rank() const { return block_index() % shape().cluster; }
    // The CTA that is `rank` in the cluster of the running thread.
    u32 peer(u32 rank) const { return current_->cta - this->rank() + rank; }

    // Gives way until `word` is not `held`.
    void block(const char* where, const u32& word, u32 held);

    // The same; false when the machine stalled instead.
    bool try_block(const char* where, const u32& word, u32 held);

    // Gives way for a round without having got anywhere.
    void poll(const char* where);

    // All of `members` threads meet.
    void meet(Meeting& meeting, u32 members, const char* where);

    void later(const std::shared_ptr<Later>& what) { pending_.push_back(what); }

    // Says that something happened that polling threads may be waiting for.
    void happened() { quiet_ = 0; }

private:
    // A stream whose next launch begins when `rounds` have passed.
    struct Due {
        u32 stream, rounds;
    };

    u32 warp_index() const { return block_index() * (shape().block / 32) + current_->index / 32; }
    void start(Thread& thread);
    void resume(Thread& thread);
    void suspend();
    void begin(const Work& work, u32 stream);
    void finish_launches(std::vector<Due>& due);
    bool run_warp(Warp& warp, bool pauses);
    bool round();
    u32 delay();
    bool take_one_later();
    void stall();
    static void entry();

    std::vector<std::unique_ptr<Launch>> launches_;  // that run
    std::vector<std::unique_ptr<u8[]>> stacks_;      // that nobody uses
    std::vector<u32> running_;
    std::vector<u32> next_;  // launch of each stream
    std::vector<std::shared_ptr<Later>> pending_;
    Thread* current_ = nullptr;
    jmp_buf scheduler_;
    ucontext_t fresh_;
    u64 started_ns_ = 0;
    u32 threads_ = 0, streams_ = 0, quiet_ = 0;
};

inline void Machine::entry() {
    Thread& thread = *machine->current_;
    thread.launch->work.body();
    thread.done = true;
    --thread.launch->alive;
    --machine->running_[thread.cta];
    machine->happened();
    _longjmp(machine->scheduler_, 1);
}

inline void Machine::start(Thread& thread) {
    thread.started = true;
    getcontext(&fresh_);
    fresh_.uc_stack = {thread.stack.get(), 0, kStackBytes};
    fresh_.uc_link = nullptr;
    makecontext(&fresh_, &Machine::entry, 0);
    setcontext(&fresh_);
}

inline void Machine::resume(Thread& thread) {
    current_ = &thread;
    threadIdx = {thread.index, 0, 0};
    blockIdx = {block_index(), 0, 0};
    blockDim = {shape().block, 1, 1};
    gridDim = {shape().grid, 1, 1};
    if (_setjmp(scheduler_) == 0) {
        if (!thread.started) start(thread);
        _longjmp(thread.place, 1);
    }
}

inline void Machine::suspend() {
    if (_setjmp(current_->place) == 0) _longjmp(scheduler_, 1);
}

inline void Machine::block(const char* where, const u32& word, u32 held) {
    Thread& thread = *current_;
    thread.where = where;
    thread.held = held;
    thread.word = &word;
    if (word == held) suspend();
    thread.word = nullptr;
}

inline bool Machine::try_block(const char* where, const u32& word, u32 held) {
    Thread& thread = *current_;
    thread.stalls = &warp().stalls;
    thread.stalls_held = *thread.stalls;
    block(where, word, held);
    thread.stalls = nullptr;
    return word != held;
}

inline void Machine::poll(const char* where) {
    current_->where = where;
    current_->polling = true;
    suspend();
    current_->polling = false;
}

inline void Machine::meet(Meeting& meeting, u32 members, const char* where) {
    const u32 generation = meeting.generation;
    Knowledge& known = meeting.known[generation & 1];
    learn(known, self().known);
    if (++meeting.arrived == members) {
        meeting.arrived = 0;
        ++meeting.generation;
        meeting.votes[meeting.generation & 1] = false;
        meeting.known[meeting.generation & 1] = nullptr;
        happened();
    } else {
        block(where, meeting.generation, generation);
    }
    learn(self().known, known);
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

inline bool Machine::run_warp(Warp& warp, bool pauses) {
    if (warp.late > 0) {
        --warp.late;
        happened();
        return true;
    }
    if (warp.rest.lasts(warp.stalls)) return false;
    Rest& rest = warp.rest;
    rest = {.stalls = warp.stalls, .valid = true};
    Sleep& sleep = warp.sleep;
    if (sleep.rounds > 0)
        --sleep.rounds;
    else if (random.below(kSleepChance) == 0)
        sleep = {random.below(32), random.below(kSleepRounds)};
    pauses = pauses || (warp.pace > 1 && random.below(warp.pace) != 0);
    pauses = pauses && quiet_ <= kLongQuietRounds;
    bool moved = false;
    for (u32 i = 0; i < 32; ++i) {
        Thread& thread = warp.threads[i];
        if (thread.done) continue;
        if (!thread.ready()) {
            rest.add(thread.word, thread.held);
            continue;
        }
        moved = true;
        // Also of those that go on later: a slow launch is no stall.
        if (!thread.polling && thread.free()) happened();
        if (!pauses && (sleep.rounds == 0 || i != sleep.lane)) resume(thread);
    }
    rest.valid = rest.valid && !moved;
    return moved;
}

inline bool Machine::round() {
    u32 count = 0;
    for (const auto& launch : launches_) {
        launch->pauses = launch->pace > 1 && random.below(launch->pace) != 0;
        count += static_cast<u32>(launch->warps.size());
    }
    if (count == 0) return false;
    // From a random warp on, once around.
    u32 skipped = random.below(count), l = 0;
    while (skipped >= launches_[l]->warps.size())
        skipped -= static_cast<u32>(launches_[l++]->warps.size());
    bool moved = false;
    for (u32 i = 0; i < count; ++i) {
        moved |= run_warp(launches_[l]->warps[skipped], launches_[l]->pauses);
        if (++skipped < launches_[l]->warps.size()) continue;
        skipped = 0;
        l = (l + 1) % static_cast<u32>(launches_.size());
    }
    return moved;
}

inline void Machine::stall() {
    if (stalls_allowed && now_ns - started_ns_ < kLongestNs) {
        // Warps poll at their own pace, so that their waits run out one after the other.
        for (const auto& launch : launches_)
            for (Warp& warp : launch->warps)
                warp.stalls += random.below(warp.pace + 1) == 0;
        if (quiet_ > kLongQuietRounds) now_ns += kStallNs;
        return;
    }
    for (const auto& launch : launches_)
        for (const Thread& thread : launch->threads) {
            const bool alike = thread.lane() != 0 && (&thread - 1)->where == thread.where;
            if (thread.done || alike) continue;
            std::fprintf(
                stderr, "launch %u of stream %u, CTA %u, from thread %u on: %s\n",
                next_[launch->stream] - 1, launch->stream, thread.cta - launch->first_cta,
                thread.index, thread.where);
        }
    test::fail(__FILE__, __LINE__, "nothing can go on");
}

inline u32 Machine::delay() {
    if (streams_ == 1 || random.below(2) == 0) return 0;
    return random.below(random.below(4) == 0 ? kLateRounds : 64);
}

inline void Machine::begin(const Work& work, u32 stream) {
    const Shape& s = work.shape;
    const u32 first_cta = static_cast<u32>(running_.size());
    auto launch = std::make_unique<Launch>(Launch{work, stream, first_cta, s.grid * s.block});
    running_.insert(running_.end(), s.grid, s.block);
    if (work.begins) work.begins(first_cta);
    if (streams_ > 1 && random.below(3) == 0) launch->pace = 1 + random.below(kLaunchPace);
    launch->threads = std::vector<Thread>(launch->alive);
    launch->warps = std::vector<Warp>(launch->alive / 32);
    for (Warp& warp : launch->warps) {
        warp.threads = launch->threads.data() + (&warp - launch->warps.data()) * 32;
        warp.pace = random.below(4) == 0 ? 1 + random.below(8) : 1;
    }
    // A cluster that finds no room at once begins later than the others.
    const u32 clusters = s.grid / s.cluster, warps = launch->alive / 32 / clusters;
    for (u32 c = 0; streams_ > 1 && c < clusters; ++c)
        if (random.below(6) == 0)
            for (u32 w = c * warps, late = random.below(kLateRounds); w < (c + 1) * warps; ++w)
                launch->warps[w].late = late;
    for (u32 i = 0; i < launch->alive; ++i) {
        Thread& thread = launch->threads[i];
        thread.launch = launch.get();
        thread.id = threads_++;
        thread.cta = first_cta + i / s.block;
        thread.index = i % s.block;
        if (stacks_.empty()) stacks_.push_back(std::make_unique_for_overwrite<u8[]>(kStackBytes));
        thread.stack = std::move(stacks_.back());
        stacks_.pop_back();
    }
    launches_.push_back(std::move(launch));
}

inline void Machine::finish_launches(std::vector<Due>& due) {
    for (u32 l = 0; l < launches_.size();) {
        if (launches_[l]->alive > 0) {
            ++l;
            continue;
        }
        const std::unique_ptr<Launch> launch = std::move(launches_[l]);
        launches_.erase(launches_.begin() + l);
        for (Thread& thread : launch->threads)
            stacks_.push_back(std::move(thread.stack));
        if (launch->work.ends) launch->work.ends(launch->stream);
        due.push_back({launch->stream, delay()});
        happened();
    }
}

inline void Machine::run(const std::vector<Stream>& streams) {
    streams_ = static_cast<u32>(streams.size());
    started_ns_ = now_ns;
    threads_ = 0;
    running_.clear();
    next_.assign(streams_, 0);
    std::vector<Due> due;
    for (u32 s = 0; s < streams_; ++s)
        due.push_back({s, delay()});
    while (!launches_.empty() || !due.empty()) {
        now_ns += 1000;
        for (u32 d = 0; d < due.size();) {
            if (due[d].rounds > 0) {
                --due[d++].rounds;
                happened();
                continue;
            }
            const u32 s = due[d].stream;
            due.erase(due.begin() + d);
            if (next_[s] < streams[s].size()) begin(streams[s][next_[s]++], s);
        }
        const bool moved = round();
        // Copies take their time: some rounds see none, some several.
        u32 copies = moved ? random.below(3) : 1 + random.below(2);
        bool took = false;
        while (copies-- > 0 && take_one_later())
            took = true;
        const u32 patience = stalls_allowed ? kShortQuietRounds : kQuietRounds;
        const bool rests = (!moved && !took && due.empty()) || ++quiet_ % (patience + 1) == 0;
        if (rests && !launches_.empty()) stall();
        finish_launches(due);
    }
    while (take_one_later()) {
    }
}

}  // namespace sim
