// SPDX-License-Identifier: Apache-2.0
// ptx/cluster.cuh: rank in the cluster, number of the SM, and the cluster-wide barrier.
// Layer: ptx.
#pragma once
#include "../common/types.cuh"

namespace prime::ptx {

PK_DEVICE u32 cluster_cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

PK_DEVICE u32 sm_id() {
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

PK_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

PK_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

PK_DEVICE void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

}  // namespace prime::ptx
