// SPDX-License-Identifier: Apache-2.0
// gradients.hpp: what the kernels of a backward have to compute, by plain loops.
#pragma once
#include "layer.hpp"

namespace layer {

// dz, score * h and <dh', h> of one row and column, from the rounded z and the unscaled dh'.
struct Right {
    double dg, du, scaled_h, product;
};

struct Activation {
    double limit, alpha, offset;

    Right operator()(double g, double u, double dh, double score) const {
        const double gc = std::fmin(g, limit);
        const double up = std::fmin(std::fmax(u, -limit), limit) + offset;
        const double s = layer::sigmoid(alpha * gc);
        const double slope = s + alpha * gc * s * (1 - s);
        const double h = layer::to_float(layer::to_bf16(static_cast<float>(gc * s * up)));
        return {
            g <= limit ? score * dh * up * slope : 0,
            std::fabs(u) <= limit ? score * dh * gc * s : 0, score * h, dh * h};
    }
};

// Gradients of one kind, fp32 or bf16: [expert, rows, columns], NaN or a start value everywhere.
struct Gradient {
    u32 experts, rows, columns, element;
    std::vector<u8> bytes;

    Gradient(u32 e, u32 r, u32 c, u32 size, bool start)
        : experts(e), rows(r), columns(c), element(size), bytes(u64{e} * r * c * size, 0xFF) {
        for (u32 i = 0; start && i < e * r * c; ++i) {
            const float value = first(i);
            std::memcpy(bytes.data() + u64{i} * 4, &value, 4);
        }
    }

    static float first(u32 i) { return static_cast<float>(i % 7) - 3.0f; }

    float get(u32 i) const {
        u32 bits = 0;
        std::memcpy(&bits, bytes.data() + u64{i} * element, element);
        return __uint_as_float(element == 2 ? bits << 16 : bits);
    }

    // Rows [from, from + count) of every expert.
    sim::Tensor map(u32 from, u32 count) {
        const u64 pitch = u64{columns} * element;
        return sim::make_tensor(
            bytes.data() + from * pitch, element, {columns, count, experts}, {pitch, pitch * rows},
            {128 / element, 64, 1});
    }

    // Element (e, m, n) is the sum of left[r][m] * right[r][n] over rows r of e, or what it was.
    void check(
        const Layer& l, const Matrix& left, const Matrix& right, bool added, bool written) const {
        for (u32 i = 0; i < experts * rows * columns; ++i) {
            const u32 e = i / columns / rows, m = i / columns % rows, n = i % columns;
            float sum = added ? first(i) : 0.0f;
            for (i32 r = l.starts[e]; r < l.starts[e] + l.counts[e]; ++r)
                sum += left.get(0, r, m) * right.get(0, r, n);
            if (element == 2) sum = layer::to_float(layer::to_bf16(sum));
            const float value = get(i);
            const bool fine = written ? value == sum : std::isnan(value);
            CHECK(fine, "expert %u (%u, %u): %g, not %g", e, m, n, value, sum);
        }
    }

    // The same where sums are not exact in fp32: up to the rounding of every addition.
    void check_near(const Layer& l, const Matrix& left, const Matrix& right) const {
        for (u32 i = 0; i < experts * rows * columns; ++i) {
            const u32 e = i / columns / rows, m = i / columns % rows, n = i % columns;
            double sum = 0, size_of_sum = 0;
            for (i32 r = l.starts[e]; r < l.starts[e] + l.counts[e]; ++r) {
                const double part = left.get(0, r, m) * right.get(0, r, n);
                sum += part;
                size_of_sum += std::fabs(part);
            }
            CHECK(
                std::fabs(get(i) - sum) <= size_of_sum * 1e-5, "expert %u (%u, %u): %g, not %g", e,
                m, n, get(i), sum);
        }
    }
};

}  // namespace layer
