// SPDX-License-Identifier: Apache-2.0
// sim/multiply.hpp: wgmma m64nNk16 of bf16, one thread's share of it at a time.
#pragma once
#include <array>

#include "builtins.hpp"

namespace sim {

// A shared-memory operand: bit fields and strides of the PTX ISA, 128-byte swizzle only.
struct Operand {
    u64 descriptor;
    bool mn_major;

    u32 field(u32 low) const { return static_cast<u32>(descriptor >> low & 0x3FFF) * 16; }

    void check() const {
        CHECK(descriptor >> 62 == 1, "descriptor %016llx has another swizzle", descriptor);
        CHECK((descriptor >> 49 & 7) == 0, "descriptor %016llx has a base offset", descriptor);
    }

    u32 address(u32 mn, u32 k) const {
        const u32 start = field(0), leading = field(16), stride = field(32);
        const u32 plain =
            mn_major ? start + mn % 64 * 2 + mn / 64 * leading + k % 8 * 128 + k / 8 * stride
                     : start + mn % 8 * 128 + mn / 8 * stride + k * 2;
        return plain ^ (plain >> 7 & 7) << 4;
    }

    // mn x 16 values, as they are now.
    std::vector<float> read(u32 cta, u32 mns) const {
        check();
        std::vector<float> values(mns * 16);
        for (u32 i = 0; i < mns * 16; ++i) {
            unsigned short bits;
            std::memcpy(&bits, memory.at(cta, address(i / 16, i % 16), 2), 2);
            values[i] = __uint_as_float(static_cast<u32>(bits) << 16);
        }
        return values;
    }
};

// Threads of a warpgroup read the same operands: what one has read serves the others until
// anything is written.
class Reader {
public:
    std::shared_ptr<const std::vector<float>> values(u32 cta, const Operand& operand, u32 mns) {
        const u64 version = memory.ctas[cta].version;
        for (const Entry& e : entries_)
            if (e.version == version && e.cta == cta && e.mns == mns &&
                e.operand.descriptor == operand.descriptor &&
                e.operand.mn_major == operand.mn_major)
                return e.values;
        Entry& e = entries_[next_++ % entries_.size()];
        const auto values = std::make_shared<const std::vector<float>>(operand.read(cta, mns));
        e = {cta, mns, version, operand, values};
        return values;
    }

    void forget() {
        for (Entry& e : entries_)
            e.mns = 0;
    }

private:
    struct Entry {
        u32 cta, mns = 0;
        u64 version;
        Operand operand;
        std::shared_ptr<const std::vector<float>> values;
    };

    std::array<Entry, 32> entries_;
    u32 next_ = 0;
};

inline Reader reader;

struct Product {
    float* d;
    u32 columns;
    Operand a, b;
    bool accumulate;

    // Thread (warp w, lane l): rows 16w + l/4 and + 8, columns 8j + 2(l%4) and + 1.
    void run(const Thread& thread) const {
        const u32 row = thread.index % 128 / 32 * 16 + thread.lane() / 4;
        const auto rows = reader.values(thread.cta, a, 64);
        const auto all = reader.values(thread.cta, b, columns);
        for (u32 j = 0; j < columns / 4; ++j) {
            // d[4i..]: two columns of the first row, then of the second.
            const float* right = all->data() + (j / 2 * 8 + thread.lane() % 4 * 2 + j % 2) * 16;
            for (u32 r = 0; r < 2; ++r) {
                const float* left = rows->data() + (row + r * 8) * 16;
                float sum = 0;
                for (u32 k = 0; k < 16; ++k)
                    sum += left[k] * right[k];
                float& to = d[j / 2 * 4 + r * 2 + j % 2];
                to = accumulate ? to + sum : sum;
            }
        }
    }
};

// What one thread has issued: groups in order, the last one still open.
struct Products {
    std::vector<std::vector<Product>> groups{1};

    void wait(u32 n) {
        const u32 committed = static_cast<u32>(groups.size()) - 1;
        for (u32 g = 0; g + n < committed; ++g) {
            for (const Product& p : groups[g])
                p.run(machine->self());
            groups[g].clear();
        }
        const u32 kept = committed < n ? committed : n;
        groups.erase(groups.begin(), groups.end() - 1 - kept);
    }
};

inline std::map<u32, Products> products;  // of each thread of the run that multiplies

inline Products& own_products() {
    return products[machine->self().id];
}

}  // namespace sim
