// SPDX-License-Identifier: Apache-2.0
// epilogue/swiglu.cuh: the activation and its gradient on fp32 values.
//
// Layer:      epilogue (arch-free).
//
// h = g' * sigmoid(alpha g') * (u' + offset), with g' = min(g, clamp), u' = clip(u, -clamp, clamp);
// plain SwiGLU is its own class because the general one costs about a third more instructions in
// the two epilogues that are bound by them.
#pragma once
#include "../common/types.cuh"
#include "../ptx/matrix.cuh"

namespace prime::epilogue {

constexpr float kLog2e = 1.4426950408889634f;

struct ActivationArgs {
    float alpha;
    float clamp;  // +inf: none
    float up_offset;
    float reserved;
};

struct Gradient {
    float dg;
    float du;
    float h;  // before the score
};

PK_DEVICE float sigmoid(float x) {
    return ptx::rcp_approx(1.0f + ptx::exp2_approx(-kLog2e * x));
}

PK_DEVICE float round_bf16(float x) {
    return ptx::bf16_lo(ptx::pack_bf16(x, 0.0f));
}

// Comparisons, not fmin: a NaN must stay one.
PK_DEVICE float cut(float x, float high) {
    return x > high ? high : x;
}

PK_DEVICE float clip(float x, float limit) {
    return x < -limit ? -limit : cut(x, limit);
}

template <bool kPlain>
struct SwiGLU {
    PK_DEVICE static float forward(float g, float u, const ActivationArgs& args) {
        if constexpr (kPlain) {
            return g * sigmoid(g) * u;
        } else {
            g = cut(g, args.clamp);
            u = clip(u, args.clamp);
            return g * sigmoid(args.alpha * g) * (u + args.up_offset);
        }
    }

    // `dh` already carries the routing score.
    PK_DEVICE static Gradient backward(float dh, float g, float u, const ActivationArgs& args) {
        if constexpr (kPlain) {
            const float a = sigmoid(g);
            const float ga = g * a;
            return {dh * u * (a + ga * (1.0f - a)), dh * ga, ga * u};
        } else {
            const bool g_free = g <= args.clamp;
            const bool u_free = fabsf(u) <= args.clamp;
            g = cut(g, args.clamp);
            u = clip(u, args.clamp) + args.up_offset;
            const float a = sigmoid(args.alpha * g);
            const float ga = g * a;
            const float dg = dh * u * (a + args.alpha * ga * (1.0f - a));
            return {g_free ? dg : 0.0f, u_free ? dh * ga : 0.0f, ga * u};
        }
    }
};

}  // namespace prime::epilogue
