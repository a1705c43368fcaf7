// SPDX-License-Identifier: Apache-2.0
// comm/finish.cuh: how a launch among peers ends.
//
// Layer:      comm (arch-free).
#pragma once
#include "peers.cuh"

namespace prime::comm {

// Thread 0 of every CTA, when all its CTA has written and read is done and seen by that thread. The
// last CTA of the launch tells every peer, and waits for every peer to say the same: the others
// leave at once, so that what waits is one thread.
PK_DEVICE void finish(const Peers& p, u32* finished, FaultRecord* fault) {
    ptx::fence_sys();
    if (ptx::atom_add_acq_rel_gpu(finished, 1) + 1 != gridDim.x) return;
    // A rank that gave up on something says nothing: peers would take its results for complete.
    if (*reinterpret_cast<volatile u32*>(&fault->code) != 0) return;
    const u32 epoch = epoch_of(p);
    for (u32 peer = 0; peer < p.size; ++peer)
        tell(p, peer, Flag::kDone, epoch);
    PeerWaiter waiter{p, fault, Role::kEnd};
    for (u32 peer = 0; peer < p.size; ++peer)
        waiter.wait(Flag::kDone, peer, epoch, Wait::kPeerDone);
    profile::Timeline::leave(fault);
}

}  // namespace prime::comm
