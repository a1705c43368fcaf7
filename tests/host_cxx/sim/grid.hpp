// SPDX-License-Identifier: Apache-2.0
// sim/grid.hpp: runs a kernel on the simulated machine and checks what every launch has to leave
// behind: no store unread, no copy under way into a CTA that has left.
#pragma once
#include "copies.hpp"
#include "multiply.hpp"

// What kernels call their dynamic shared memory; only its shared address is used.
namespace prime::roles {
unsigned char dynamic_smem[1];
}

namespace sim {

template <class Kernel>
void run_kernel(Machine& m, u32 grid, const typename Kernel::Args& args) {
    constexpr auto kLaunch = Kernel::kLaunch;
    bulks.clear();
    products.clear();
    reader.forget();
    run_grid(m, {grid, kLaunch.threads, kLaunch.cluster, kLaunch.smem_bytes}, [&] {
        Kernel::run(args);
        const auto bulk = bulks.find(m.self().cta * m.shape.block + m.self().index);
        CHECK(
            bulk == bulks.end() || bulk->second.finished(),
            "CTA %u thread %u leaves with stores that still read its shared memory", m.self().cta,
            m.self().index);
    });
    // A launch ends when all it has written is in memory.
    for (auto& [thread, bulk] : bulks) {
        bulk.groups.emplace_back();
        bulk.wait(0, false);
    }
}

}  // namespace sim
