# SPDX-License-Identifier: Apache-2.0
"""A forward and backward small enough for compute-sanitizer: `python -m tests.sanitizer.small`, on one GPU.

compute-sanitizer --tool memcheck --kernel-name kernel_substring=pk_ python -m tests.sanitizer.small

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1: within one block of torch's pool nothing is out of bounds. Results are compared
with float64 on the host. Prints one JSON object; the exit status is 1 if an error is too large, or if a kernel was
launched that the filter misses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import fields

import torch
from torch import Tensor

import prime_kernels
from prime_kernels.loader import hostlib, kernels, load_kernel
from prime_kernels.loader.abi import PkLaunch
from tests.helpers.cases import Case, Result, dense_oracle, make_case, worst_errors

BOUND = 8e-3
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 200, 256, 192, 6, 2
NUM_SMS = 4
GATHER = "gather_rows|b16|t256|l4"


class Launches:
    """Counts, per kernel, what goes through the host library's launch function: the one way to launch there is.

    To be made before the first kernel is loaded, since a `Kernel` keeps the function.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        library = hostlib.host().lib
        launch = library.pk_host_launch

        def counted(request: int) -> int:
            status = int(launch(request))
            if status == 0:
                self._counts[PkLaunch.from_address(request).kernel] += 1
            return status

        library.pk_host_launch = counted

    def by_symbol(self) -> Counter[str]:
        """Launches so far by what the driver calls the kernel."""
        symbols = {kernel.handle: kernel.spec.symbol for kernel in kernels._kernels.values()}
        found: Counter[str] = Counter()
        for handle, count in self._counts.items():
            found[symbols.get(handle, f"unknown kernel {handle:#x}")] += count
        return found


def layer(case: Case, save: str) -> Result:
    """y and all gradients, on the host; the oracle's side never touches the device."""
    config = prime_kernels.MegaMoEConfig(
        num_experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        max_tokens_per_rank=TOKENS,
        num_sms=NUM_SMS,
        save=save,  # type: ignore[arg-type]
        backend="cuda",
    )
    moved = Case(**{field.name: getattr(case, field.name).cuda() for field in fields(case)})
    packed = case.w_gate_up.cuda()
    leaves: list[Tensor] = [moved.x, moved.topk_weights, packed, moved.w_down]
    x, scores, w_gate_up, w_down = (leaf.requires_grad_() for leaf in leaves)
    with prime_kernels.MegaMoERuntime.create(config) as runtime:
        y = prime_kernels.mega_moe(x, moved.topk_ids, scores, w_gate_up, w_down, runtime=runtime)
        assert isinstance(y, Tensor)
        grads = torch.autograd.grad(y, (x, scores, w_gate_up, w_down), moved.dy)
        runtime.synchronize()
    dx, dscores, dw_gate_up, dw_down = (grad.cpu() for grad in grads)
    return Result(y.detach().cpu(), dx, dscores, *dw_gate_up.chunk(2, 1), dw_down)


def small_case() -> Case:
    """Uneven routing: an expert without rows, one with a single row, skipped slots, the rest past a tile's end."""
    case = make_case(tokens=TOKENS, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS, topk=TOPK, seed=1)
    ids = case.topk_ids % 3
    ids[0, 0], ids[7, 1], ids[9] = 3, -1, -1
    ids[100:, 1] = 5
    return case.change(topk_ids=ids)


def read_past_the_end() -> None:
    """What the sanitizer must notice: rows gathered from behind a tensor, far enough to leave its allocation."""
    x = torch.zeros(512, 2048, dtype=torch.bfloat16).cuda()  # 2 MiB, no padding
    pool = torch.zeros_like(x)
    row_src = torch.full((512,), 512 + 16384, dtype=torch.int32).cuda()
    args = {"x": x.data_ptr(), "row_src": row_src.data_ptr(), "pool": pool.data_ptr(), "rows": 512, "row_bytes": 4096}
    load_kernel(GATHER, device=0).launch(grid=2, stream=torch.cuda.current_stream().cuda_stream, args=args)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer.small", description=__doc__)
    parser.add_argument("--save", default="preact,inputs", help="preact, inputs, full, comma separated")
    parser.add_argument("--read-past-the-end", action="store_true", help="do something wrong instead")
    args = parser.parse_args()
    if args.read_past_the_end:
        read_past_the_end()
        return 0
    torch.set_num_threads(2)
    case, launches = small_case(), Launches()
    want = dense_oracle(case)
    errors = [worst_errors(layer(case, save), want) for save in args.save.split(",")]
    symbols = launches.by_symbol()
    strange = sorted(symbol for symbol in symbols if not symbol.startswith("pk_"))
    worst = max(max(found.values()) for found in errors)
    print(json.dumps({"launches": symbols.total(), "kernels": len(symbols), "worst": worst, "unfiltered": strange}))
    return int(worst > BOUND or bool(strange) or not symbols)


if __name__ == "__main__":
    sys.exit(main())
