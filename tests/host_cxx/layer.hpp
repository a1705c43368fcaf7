// SPDX-License-Identifier: Apache-2.0
// layer.hpp: the operands of one mixture-of-experts layer, small enough for the simulated machine.
//
// Values are small integers times a power of two, so that sums are exact in fp32 in any order.
#pragma once
#include <cmath>
#include <vector>

#include "common/types.cuh"
#include "moe/gemm_args.cuh"
#include "sim/grid.hpp"

namespace layer {

using prime::i32;
using prime::u16;
using prime::u32;
using prime::u64;
using prime::u8;

inline float to_float(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

inline u16 to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if (std::isnan(value)) return 0x7FC0;
    return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// [batch, rows, columns] of bf16; starts as NaN everywhere.
struct Matrix {
    u32 batch, rows, columns;
    std::vector<u16> bits;

    Matrix(u32 b, u32 r, u32 c) : batch(b), rows(r), columns(c), bits(u64{b} * r * c, 0xFFFF) {}

    u16& at(u32 b, u32 r, u32 c) { return bits[(u64{b} * rows + r) * columns + c]; }
    float get(u32 b, u32 r, u32 c) const {
        return to_float(bits[(u64{b} * rows + r) * columns + c]);
    }

    void fill(test::Random& random, float scale) {
        for (u16& value : bits)
            value = to_bf16((static_cast<float>(random.below(5)) - 2.0f) * scale);
    }

    u64 pitch() const { return u64{columns} * 2; }
    u64 size() const { return pitch() * rows; }
};

// Tensor maps as kernels_src/moe/gemm_args.cuh states them.
inline sim::Tensor rows_of(Matrix& m) {
    return sim::make_tensor(m.bits.data(), 2, {m.columns, m.rows}, {m.pitch()}, {64, 64});
}

inline sim::Tensor halves_of(Matrix& m) {  // [rows, 2, I] as a matrix of 2I columns
    const u64 half = m.columns / 2;
    return sim::make_tensor(
        m.bits.data(), 2, {half, 2, m.rows}, {half * 2, m.pitch()}, {64, 1, 64});
}

// Rows [first, first + rows) of every expert of [expert, n, k], reduced over k.
inline sim::Tensor k_major(Matrix& m, u32 first, u32 rows) {
    return sim::make_tensor(
        m.bits.data() + u64{first} * m.columns, 2, {m.columns, rows, 1, m.batch},
        {m.pitch(), m.size(), m.size()}, {64, 128, 1, 1});
}

// The same of [expert, k, n].
inline sim::Tensor mn_major(Matrix& m, u32 first, u32 rows) {
    return sim::make_tensor(
        m.bits.data() + u64{first} * m.columns, 2, {64, rows, m.columns / 64, m.batch},
        {m.pitch(), 128, m.size()}, {64, 64, 2, 1});
}

struct Layer {
    u32 hidden, intermediate;
    std::vector<i32> counts, starts;  // rows per expert; first rows, multiples of 64
    std::vector<float> score;         // of pool rows, 0 in the padding

    Layer(u32 h, u32 i, std::vector<i32> c, test::Random& random)
        : hidden(h), intermediate(i), counts(std::move(c)) {
        starts.push_back(0);
        for (const i32 rows : counts) {
            starts.push_back(starts.back() + (rows + 63) / 64 * 64);
            for (i32 r = starts[starts.size() - 2]; r < starts.back(); ++r)
                score.push_back(r - starts[starts.size() - 2] < rows ? pick(random) : 0.0f);
        }
        score.resize(pool(), 0.0f);
    }

    u32 experts() const { return static_cast<u32>(counts.size()); }
    u32 used() const { return static_cast<u32>(starts.back()); }
    u32 pool() const { return used() + 128; }  // more than is used: nobody may touch the rest

    // Powers of two, zero and negative ones too.
    static float pick(test::Random& random) {
        constexpr float kScores[] = {1.0f, 0.5f, 0.25f, -0.5f, 0.0f, 2.0f};
        return kScores[random.below(6)];
    }

    // Expert of a pool row; experts() when it is padding or unused.
    u32 expert_of(u32 row) const {
        for (u32 e = 0; e < experts(); ++e)
            if (static_cast<i32>(row) >= starts[e] && static_cast<i32>(row) < starts[e] + counts[e])
                return e;
        return experts();
    }

    // [pool, columns]: values in the rows that exist, zeros in the padding, NaN in the unused rest.
    Matrix rows(u32 columns, float scale, test::Random& random) const {
        Matrix m(1, pool(), columns);
        m.fill(random, scale);
        for (u32 r = 0; r < pool(); ++r)
            for (u32 c = 0; c < columns && expert_of(r) == experts(); ++c)
                m.at(0, r, c) = r < used() ? 0 : 0xFFFF;
        return m;
    }
};

// Whether `value` is bf16 of `right`, or one of its two neighbours when `steps` is 1.
inline bool close(float value, double right, u32 steps) {
    const float rounded = to_float(to_bf16(static_cast<float>(right)));
    return std::fabs(value - rounded) <= steps * std::fabs(rounded) / 128.0f;
}

// Rows that exist equal expected(row, expert, column); padding is zero; the rest is untouched.
template <class F>
void check_rows(const Layer& l, const Matrix& got, const char* what, u32 steps, F&& expected) {
    for (u32 r = 0; r < l.pool(); ++r)
        for (u32 c = 0; c < got.columns; ++c) {
            const float value = got.get(0, r, c);
            const u32 e = l.expert_of(r);
            if (e < l.experts()) {
                const double right = expected(r, e, c);
                CHECK(
                    close(value, right, steps), "%s row %u column %u: %g, not %g", what, r, c,
                    value, right);
            } else if (r < l.used()) {
                CHECK(value == 0.0f, "%s padding row %u column %u: %g", what, r, c, value);
            } else {
                CHECK(std::isnan(value), "%s unused row %u column %u: %g", what, r, c, value);
            }
        }
}

// Row r of `a` times row n of expert e of `b`, from column `from` of a.
inline float dot(const Matrix& a, u32 r, u32 from, const Matrix& b, u32 e, u32 n) {
    float sum = 0;
    for (u32 k = 0; k < b.columns; ++k)
        sum += a.get(0, r, from + k) * b.get(e, n, k);
    return sum;
}

// The same with column n of rows [first, first + count) of expert e of `b`.
inline float dot_t(
    const Matrix& a, u32 r, u32 from, const Matrix& b, u32 e, u32 n, u32 first, u32 count) {
    float sum = 0;
    for (u32 k = 0; k < count; ++k)
        sum += a.get(0, r, from + k) * b.get(e, first + k, n);
    return sum;
}

inline double sigmoid(double x) {
    return 1.0 / (1.0 + std::exp(-x));
}

// What every grouped GEMM over the rows of `l` is given; plain SwiGLU.
inline prime::moe::GroupedArgs grouped_args(const Layer& l, prime::FaultRecord& fault) {
    prime::moe::GroupedArgs args{};
    args.counts = l.counts.data();
    args.starts = l.starts.data();
    args.row_score = l.score.data();
    args.fault = &fault;
    args.num_experts = l.experts();
    args.alpha = 1.0f;
    args.clamp = INFINITY;
    return args;
}

}  // namespace layer
