# SPDX-License-Identifier: Apache-2.0
"""Everything of the unfused path that is no GEMM and no transport, each as one pass over memory.

On CUDA the functions are compiled with `torch.compile` at first use (a few seconds each, once per process and width);
on the CPU they run as they are. If compilation is impossible on a machine, they run as they are too, several times
slower: that is logged once with the reason, and no result changes beyond rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from prime_kernels.moe.activation import swiglu, swiglu_backward

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.config import SwiGLU

_log = logging.getLogger("prime_kernels")


def gather(x: Tensor, order: Tensor, topk: int) -> Tensor:
    """[T, D], slots [n] -> [n, D]. The token's row of each slot."""
    out: Tensor = _run(_gather, x, order, topk)
    return out


def activate(z: Tensor, act: SwiGLU) -> Tensor:
    """[n, 2I] -> [n, I] in z's dtype, computed in fp32."""
    out: Tensor = _run(_activate, z, act)
    return out


def activate_backward(z: Tensor, dh: Tensor, scores: Tensor, act: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients around the activation.

    Args:
        z: [n, 2I]. Pre-activations.
        dh: [n, I] z.dtype. Gradient of the unweighted expert output times W2.
        scores: [n, 1] fp32. Routing weight of each row.

    Returns:
        dz [n, 2I] z.dtype; scores * h [n, I] z.dtype, the operand of dW2; d(scores) [n, 1] fp32.
    """
    dz, weighted_h, dscores = _run(_activate_backward, z, dh, scores, act)
    return dz, weighted_h, dscores


def sum_slots(rows: Tensor, slot_rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, D], [T, K] -> [T, D]. Weighted sum of each token's rows in slot order, in fp32; slots at -1 add nothing."""
    if rows.shape[0] == 0:
        return rows.new_zeros(slot_rows.shape[0], rows.shape[1], dtype=dtype)
    out: Tensor = _run(_sum_slots, rows, slot_rows, weights, dtype)
    return out


def _gather(x: Tensor, order: Tensor, topk: int) -> Tensor:
    return x[order // topk]


def _activate(z: Tensor, act: SwiGLU) -> Tensor:
    return swiglu(_wide(z), act).to(z.dtype)


def _activate_backward(z: Tensor, dh: Tensor, scores: Tensor, act: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    wide, wide_dh, s = _wide(z), _wide(dh), scores.to(_wide(z).dtype)
    h = swiglu(wide, act).to(z.dtype).to(wide.dtype)
    dz = swiglu_backward(wide, s * wide_dh, act).to(z.dtype)
    return dz, (s * h).to(z.dtype), (wide_dh * h).sum(1, keepdim=True)


def _sum_slots(rows: Tensor, slot_rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = None
    for k in range(slot_rows.shape[1]):
        index = slot_rows[:, k]
        part = _wide(rows[index.clamp(min=0)])
        if weights is not None:
            part = part * weights[:, k, None]
        # where, not a product with 0: the row that a skipped slot borrows may be NaN.
        part = torch.where(index[:, None] >= 0, part, 0.0)
        total = part if total is None else total + part
    assert total is not None  # topk >= 1
    return total.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _run(function: Callable[..., Any], first: Tensor, *args: Any) -> Any:
    if not first.is_cuda or function in _uncompilable or 0 in first.shape:
        return function(first, *args)
    for value in (first, *args):
        if isinstance(value, torch.Tensor):
            # Rows vary from call to call; one compiled kernel serves them all.
            torch._dynamo.maybe_mark_dynamic(value, 0)
    try:
        return _compiled(function)(first, *args)
    except torch._dynamo.exc.TorchDynamoException as error:
        _uncompilable.add(function)
        _log.warning("torch.compile failed for %s, running it eagerly: %s", function.__name__, error)
        return function(first, *args)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


_uncompilable: set[Callable[..., Any]] = set()
