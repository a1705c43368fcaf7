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

// A launch of a kernel; `args` has to stay where it is.
template <class Kernel>
Work kernel_work(u32 grid, const typename Kernel::Args& args) {
    constexpr auto kLaunch = Kernel::kLaunch;
    const Shape shape{grid, kLaunch.threads, kLaunch.cluster, kLaunch.smem_bytes};
    const auto first = std::make_shared<u32>(0);
    Work work = work_of(shape, [&args, first] {
        *first = machine->launch().threads.front().id;
        Kernel::run(args);
        const auto bulk = bulks.find(machine->self().id);
        CHECK(
            bulk == bulks.end() || bulk->second.finished(),
            "CTA %u thread %u leaves with stores that still read its shared memory", blockIdx.x,
            threadIdx.x);
    });
    // A launch ends when all it has written is in memory.
    work.ends = [first, threads = grid * kLaunch.threads](u32 stream) {
        remote.end(stream);
        const auto end = bulks.lower_bound(*first + threads);
        for (auto bulk = bulks.lower_bound(*first); bulk != end; ++bulk) {
            bulk->second.groups.emplace_back();
            bulk->second.wait(0, false);
        }
    };
    return work;
}

inline void run_kernels(Machine& m, const std::vector<Stream>& streams) {
    bulks.clear();
    products.clear();
    reader.forget();
    run_streams(m, streams);
}

template <class Kernel>
void run_kernel(Machine& m, u32 grid, const typename Kernel::Args& args) {
    run_kernels(m, {{kernel_work<Kernel>(grid, args)}});
}

}  // namespace sim
