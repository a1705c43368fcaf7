// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx/tma.cuh.
#pragma once
#include "../common/types.cuh"
#include "sim/copies.hpp"

namespace prime::ptx {

constexpr u64 kEvictNormal = 0;
constexpr u64 kEvictFirst = 1;

inline u32 own_mask() {
    return 1u << sim::machine->rank();
}

inline void tma_load_2d(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, u64) {
    sim::load_box(dst, map, bar, {c0, c1}, own_mask());
}

inline void tma_load_3d(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, u64) {
    sim::load_box(dst, map, bar, {c0, c1, c2}, own_mask());
}

inline void tma_load_4d(
    u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3, u64) {
    sim::load_box(dst, map, bar, {c0, c1, c2, c3}, own_mask());
}

inline void tma_load_4d_multicast(
    u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3, u16 mask, u64) {
    sim::load_box(dst, map, bar, {c0, c1, c2, c3}, mask);
}

inline void tma_store_2d(const TensorMap* map, u32 src, i32 c0, i32 c1) {
    sim::store_box(map, src, {c0, c1}, false);
}

inline void tma_store_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
    sim::store_box(map, src, {c0, c1, c2}, false);
}

inline void tma_add_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
    sim::store_box(map, src, {c0, c1, c2}, true);
}

inline void bulk_commit() {
    sim::own_bulk().groups.emplace_back();
}

template <int N>
void bulk_wait_read() {
    sim::own_bulk().wait(N, true);
}

template <int N>
void bulk_wait() {
    sim::own_bulk().wait(N, false);
}

}  // namespace prime::ptx
