# SPDX-License-Identifier: Apache-2.0
"""Runs one forward and backward of `mega_moe` on a `Case`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prime_kernels import MegaMoEConfig, MegaMoERuntime, mega_moe
from tests.helpers.cases import Case, Result


def config_of(case: Case, **fields: Any) -> MegaMoEConfig:
    """The config a case needs; keyword arguments override."""
    sizes = {
        "num_experts": case.w_down.shape[0],
        "topk": case.topk_ids.shape[1],
        "hidden": case.w_down.shape[1],
        "intermediate": case.w_down.shape[2],
        "max_tokens_per_rank": 4096,
        "backend": "reference",
    }
    return MegaMoEConfig(**{**sizes, **fields})


@contextmanager
def open_runtime(case: Case, **fields: Any) -> Iterator[MegaMoERuntime]:
    with MegaMoERuntime.create(config_of(case, **fields), device="cpu") as runtime:
        yield runtime


def leaves_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, topk_weights, packed w_gate_up and w_down as fresh leaves."""
    tensors = (case.x, case.topk_weights, case.w_gate_up, case.w_down)
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)  # type: ignore[return-value]


def run(case: Case, runtime: MegaMoERuntime, **arguments: Any) -> Result:
    """One step with packed weights."""
    x, topk_weights, w_gate_up, w_down = leaves_of(case)
    y = mega_moe(
        x,
        case.topk_ids,
        topk_weights,
        w_gate_up,
        w_down,
        runtime=runtime,
        precision=runtime.config.precision,
        **arguments,
    )
    y.backward(case.dy)
    return result_of(y, x, topk_weights, w_gate_up, w_down)


def result_of(y: Tensor, x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Result:
    """Gradients as the oracle names them; a missing one is an error here, not a zero."""
    grads = [x.grad, topk_weights.grad, w_gate_up.grad, w_down.grad]
    assert all(grad is not None for grad in grads)
    dx, dtopk_weights, dw_gate_up, dw_down = grads
    dw_gate, dw_up = dw_gate_up.chunk(2, dim=1)
    return Result(y.detach(), dx, dtopk_weights, dw_gate, dw_up, dw_down)


def assert_same_bits(a: Result, b: Result) -> None:
    """Bitwise, NaN payloads included."""
    for name, left, right in zip(Result._fields, a, b, strict=True):
        assert left.dtype == right.dtype, name
        assert torch.equal(_bits(left), _bits(right)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def poison(*shapes: tuple[int, ...]) -> None:
    """Leave freed blocks of these shapes full of NaN, so that uninitialised memory shows."""
    blocks = [
        torch.full(shape, torch.nan, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)
    ]
    for block in blocks:
        assert block.numel() == 0 or bool(block.isnan().all())
    del blocks
