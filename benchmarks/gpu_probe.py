# SPDX-License-Identifier: Apache-2.0
"""Ask an installed prime_kernels, wherever it is, for kernels by name: right, the same again, from where, how fast.

Prints one JSON object. Started by one_gpu.py from a copy outside the repository, so that it finds no other package than
the one on PYTHONPATH. Needs torch and one GPU, and of this project nothing but the package.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

GATHER, TOPK_SUM = "gather_rows|b16|t256|l4", "topk_sum|bf16|t256"
LAUNCHES = 400
MIN_MAPS = 5
GEMM_BOUND = 3e-3  # one rounding to bf16 is 1.7e-3


def digest(tensor: Tensor) -> str:
    """Of the tensor's bits."""
    here = tensor.detach().contiguous().cpu()
    return hashlib.sha256(ctypes.string_at(here.data_ptr(), here.nbytes)).hexdigest()[:16]


def normal(*shape: int, seed: int) -> Tensor:
    """bf16, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).cuda()


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of some work and of the device's share of it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def gather(x: Tensor, row_src: Tensor, pool: Tensor) -> Tensor:
    from prime_kernels.loader import load_kernel

    args = {"x": x.data_ptr(), "row_src": row_src.data_ptr(), "pool": pool.data_ptr(), "rows": len(row_src)}
    stream = torch.cuda.current_stream().cuda_stream
    kernel = load_kernel(GATHER, device=0)
    kernel.launch(grid=256, stream=stream, args={**args, "row_bytes": 2 * x.shape[1]})
    return pool


def topk_sum(slots: Tensor, ids: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    from prime_kernels.loader import load_kernel

    tokens, topk, hidden = slots.shape
    args = {"slots": slots.data_ptr(), "ids": ids.data_ptr(), "weights": weights.data_ptr(), "y": y.data_ptr()}
    args |= {"tokens": tokens, "topk": topk, "hidden": hidden, "reserved": 0}
    load_kernel(TOPK_SUM, device=0).launch(grid=256, stream=torch.cuda.current_stream().cuda_stream, args=args)
    return y


def plain_topk_sum(slots: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(slots.shape[0], slots.shape[2], device="cuda")
    for k in range(slots.shape[1]):
        total = torch.where(ids[:, k, None] == -1, total, total + weights[:, k, None] * slots[:, k].float())
    return total.to(torch.bfloat16)


def passengers() -> dict[str, Any]:
    """The two kernels that need nothing else: the first call of each timed, results compared bit by bit."""
    x, slots = normal(257, 2048, seed=1), normal(515, 8, 768, seed=2)
    row_src = (torch.arange(1000, dtype=torch.int32) % 258 - 1).cuda()
    ids = (torch.arange(515 * 8, dtype=torch.int32) % 17 - 1).view(515, 8).cuda()
    weights = torch.rand(515, 8, generator=torch.Generator().manual_seed(3)).cuda()
    pools, sums = (
        [torch.full((rows, cols), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        for rows, cols in ((1000, 2048), (515, 768))
    )
    want = {
        GATHER: torch.where(row_src[:, None] < 0, torch.zeros_like(x[:1]), x[row_src.clamp(min=0).long()]),
        TOPK_SUM: plain_topk_sum(slots, ids, weights),
    }
    first: dict[str, float] = {}
    first[GATHER], _ = seconds(lambda: gather(x, row_src, pools[0]))
    first[TOPK_SUM], _ = seconds(lambda: topk_sum(slots, ids, weights, sums[0]))
    for pool, total in zip(pools[1:], sums[1:], strict=True):
        gather(x, row_src, pool)
        topk_sum(slots, ids, weights, total)
    outputs = {GATHER: [digest(pool) for pool in pools], TOPK_SUM: [digest(total) for total in sums]}
    return {
        "first_call_s": first,
        "digests": {key: found[0] for key, found in outputs.items()},
        "right": {key: found[0] == digest(want[key]) for key, found in outputs.items()},
        "repeatable": {key: len(set(found)) == 1 for key, found in outputs.items()},
    }


def gemm_call() -> tuple[Callable[[], Tensor], Tensor]:
    """(a call of a small grouped GEMM, what it should give), by the public module."""
    from prime_kernels import deep_gemm

    groups, rows, n, k = 4, 128, 512, 768
    a, b = normal(groups * rows, k, seed=4), normal(groups, n, k, seed=5)
    layout = torch.arange(groups, dtype=torch.int32).repeat_interleave(rows).cuda()
    want = torch.einsum("grk,gnk->grn", a.view(groups, rows, k).double(), b.double()).view(-1, n)

    def call() -> Tensor:
        d = torch.full((groups * rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
        return d

    return call, want


def gemm() -> dict[str, Any]:
    """One grouped GEMM."""
    call, want = gemm_call()
    results = [call() for _ in range(3)]
    error = float((results[0].double() - want).norm() / want.norm())
    return {
        "digests": {"gemm": digest(results[0])},
        "right": {"gemm": error < GEMM_BOUND},
        "repeatable": {"gemm": len({digest(result) for result in results}) == 1},
    }


def microseconds(launch_once: Callable[[], None]) -> dict[str, float]:
    """Host time of one launch: median and 90th percentile of many."""
    took = []
    for number in range(LAUNCHES):
        if number % 100 == 0:  # far from filling the queue, which would make the host wait for the device
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        launch_once()
        took.append((time.perf_counter_ns() - began) / 1e3)
    torch.cuda.synchronize()
    took.sort()
    return {"median": statistics.median(took), "p90": took[LAUNCHES * 9 // 10]}


def general_launch() -> dict[str, Any]:
    """A launch of `gemm_call`, which packs everything anew: what the calls of the deep_gemm module do."""
    from prime_kernels.loader import Kernel

    launches: list[tuple[Any, dict[str, Any]]] = []
    original = Kernel.launch

    def record(self: Any, **arguments: Any) -> None:
        launches.append((self, arguments))
        original(self, **arguments)

    Kernel.launch = record  # type: ignore[method-assign]
    try:
        gemm_call()[0]()
    finally:
        Kernel.launch = original  # type: ignore[method-assign]
    kernel, arguments = next(launch for launch in launches if len(launch[1].get("maps") or ()) >= MIN_MAPS)
    found: dict[str, Any] = {"key": kernel.spec.key, "maps": len(arguments["maps"])}
    return found | microseconds(lambda: kernel.launch(**arguments))


def prepared_launch(call: Callable[[], Any]) -> dict[str, Any]:
    """A launch that `call` of the layer prepares: with five tensor maps, or the fewest above that a kernel has.

    Not one that waits for counters of other launches. `moved` is the same with all addresses new every time.
    """
    from prime_kernels.loader.prepared import Address, Prepared
    from prime_kernels.moe import cuda_calls

    found: list[tuple[Any, Any, int, Any]] = []

    class Recording(Prepared):
        def __init__(self, steps: Any, slots: Any) -> None:
            super().__init__(steps, slots)
            self.recorded = steps, slots

        def launch(self, stream: int, addresses: Any) -> None:
            steps, slots = self.recorded
            found.extend((step, slots, stream, addresses) for step in steps)
            super().launch(stream, addresses)

    cuda_calls.Prepared = Recording  # type: ignore[misc]
    try:
        kept = call()  # what it returns holds the rows' order, which the launch below reads
    finally:
        cuda_calls.Prepared = Prepared  # type: ignore[misc]
    able = [one for one in found if len(one[0].maps or ()) >= MIN_MAPS]
    able = [one for one in able if not isinstance(one[0].args.get("arrivals"), Address)]
    step, slots, stream, addresses = min(able, key=lambda one: len(one[0].maps))
    prepared = Prepared([step], slots)
    nowhere = (None,) * len(slots)

    def moved() -> None:
        prepared._addresses = nowhere
        prepared.launch(stream, addresses)

    all_moved = microseconds(moved)
    stayed = microseconds(lambda: prepared.launch(stream, addresses))
    del kept
    return {**stayed, "key": step.kernel.spec.key, "maps": len(step.maps), "moved": all_moved}


def launch() -> dict[str, Any]:
    """Host time of a launch with tensor maps, the same one again and again: by the layer, and in general."""
    # Temporaries went back to torch's pool with the calls; nobody else uses them while this runs.
    call, runtime = layer_call()
    took = prepared_launch(call) | {"general": general_launch()}
    runtime.close()
    return {"launch_us": took}


class Operands(NamedTuple):
    """Of a small layer."""

    sizes: dict[str, int]
    x: Tensor
    ids: Tensor
    scores: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy: Tensor

    @classmethod
    def make(cls) -> Operands:
        tokens, hidden, inter, experts, topk = 256, 1024, 512, 16, 4
        sizes = {"num_experts": experts, "topk": topk, "hidden": hidden, "intermediate": inter}
        x, dy = normal(tokens, hidden, seed=6), normal(tokens, hidden, seed=7)
        w_gate_up, w_down = normal(experts, 2 * inter, hidden, seed=8) / 32, normal(experts, hidden, inter, seed=9) / 22
        ids = (torch.arange(tokens * topk) * 7 % experts).view(tokens, topk).cuda()
        scores = torch.full((tokens, topk), 0.25, device="cuda")
        for leaf in (x, scores, w_gate_up, w_down):
            leaf.requires_grad_()
        return cls(sizes | {"max_tokens_per_rank": tokens}, x, ids, scores, w_gate_up, w_down, dy)


def layer_call() -> tuple[Callable[[], Tensor], Any]:
    """(a forward of a small layer, its runtime)."""
    import prime_kernels

    o = Operands.make()
    runtime = prime_kernels.MegaMoERuntime.create(prime_kernels.MegaMoEConfig(**o.sizes, backend="cuda"))
    return lambda: prime_kernels.mega_moe(o.x, o.ids, o.scores, o.w_gate_up, o.w_down, runtime=runtime), runtime


def layer() -> dict[str, Any]:
    """The first call of the whole layer in this process, part by part."""
    o = Operands.make()
    began = time.perf_counter()
    import prime_kernels

    call, config = prime_kernels.mega_moe, prime_kernels.MegaMoEConfig
    imported = time.perf_counter() - began
    create_s, runtime = seconds(lambda: prime_kernels.MegaMoERuntime.create(config(**o.sizes, backend="cuda")))
    operands = o.x, o.ids, o.scores, o.w_gate_up, o.w_down
    forward_s, y = seconds(lambda: call(*operands, runtime=runtime))
    backward_s, _ = seconds(lambda: y.backward(o.dy))
    again_s, z = seconds(lambda: call(*operands, runtime=runtime))
    bits = {"mega_moe": digest(y), "mega_moe dw": digest(o.w_down.grad)}  # type: ignore[arg-type]
    parts = {"import": imported, "create": create_s, "forward": forward_s, "backward": backward_s, "again": again_s}
    leaves = o.x, o.scores, o.w_gate_up, o.w_down
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
    runtime.close()
    return {"layer_s": parts, "digests": bits, "repeatable": {"mega_moe": digest(z) == bits["mega_moe"]}}


def time_loads() -> dict[str, float]:
    """Seconds that each kernel takes to be found or compiled and loaded, from now on."""
    from prime_kernels.loader import kernels

    took: dict[str, float] = {}
    original = kernels._load

    def load(host: Any, name: str, *rest: Any) -> Any:
        began = time.perf_counter()
        kernel = original(host, name, *rest)
        took[name] = time.perf_counter() - began
        return kernel

    kernels._load = load
    return took


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "passengers": passengers,
    "gemm": gemm,
    "launch": launch,
    "layer": layer,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), help="in this order")
    parser.add_argument("--time-loads", action="store_true", help="of every kernel; brings the loader in early")
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()  # CUDA is up from here on
    report: dict[str, Any] = {"digests": {}, "right": {}, "repeatable": {}}
    if args.time_loads:
        report["load_s"] = time_loads()
    for part in args.parts:
        for name, value in PARTS[part]().items():
            report[name] = {**report.get(name, {}), **value}
    import prime_kernels
    from prime_kernels.loader import kernels

    report["package"] = str(prime_kernels.__file__)
    report["version"] = prime_kernels.__version__
    report["origins"] = {key: kernel.spec.origin for (key, _), kernel in kernels._kernels.items()}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
