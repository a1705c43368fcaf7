// SPDX-License-Identifier: Apache-2.0
// check.hpp: the frame of a test program. `program NAME` runs the case of that name and prints how
// many facts it checked; `program NAME N` runs it N times, which is N different runs where it draws
// random numbers. A case that checks nothing fails; the first broken fact ends the program.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace test {

struct Case {
    const char* name;
    void (*run)();
    Case* next;

    static Case*& first() {
        static Case* head = nullptr;
        return head;
    }

    Case(const char* n, void (*f)()) : name(n), run(f), next(first()) { first() = this; }
};

inline unsigned long long checked = 0;

[[noreturn]] inline void fail(const char* file, int line, const char* what) {
    std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
    std::fflush(stderr);
    std::_Exit(1);  // the stack that runs may be that of a simulated thread
}

// A generator with a fixed seed: a failure can be repeated.
struct Random {
    unsigned long long state;

    explicit Random(unsigned long long seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}

    unsigned next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<unsigned>(state >> 32);
    }

    // In [0, n).
    unsigned below(unsigned n) { return next() % n; }
};

}  // namespace test

#define CASE(name)                                       \
    static void name();                                  \
    static const test::Case case_of_##name(#name, name); \
    static void name()

// CHECK(fact, "format with values", ...)
#define CHECK(fact, ...)                           \
    do {                                           \
        ++test::checked;                           \
        if (!(fact)) {                             \
            std::fprintf(stderr, __VA_ARGS__);     \
            std::fprintf(stderr, "\n");            \
            test::fail(__FILE__, __LINE__, #fact); \
        }                                          \
    } while (false)

int main(int argc, char** argv) {
    const bool asks = argc == 2 || argc == 3;
    const int times = argc == 3 ? std::atoi(argv[2]) : 1;
    for (const test::Case* c = test::Case::first(); asks && c != nullptr; c = c->next) {
        if (std::strcmp(c->name, argv[1]) != 0) continue;
        for (int i = 0; i < times; ++i)
            c->run();
        std::printf("%llu facts checked\n", test::checked);
        return test::checked > 0 ? 0 : 1;
    }
    std::fprintf(stderr, "usage: %s CASE [TIMES]\n", argv[0]);
    return 2;
}
