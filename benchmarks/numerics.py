# SPDX-License-Identifier: Apache-2.0
"""The gate before every number: results of the timed configuration against an fp32 computation, expert by expert.

The reference walks over all local experts with the tokens of all ranks, in fp32 (no TF32), rounding the activation to
bf16 once as every implementation must. Errors are relative Frobenius norms, of whole tensors and of the worst expert,
128-row block and 16-column tile, so that a fault in one corner cannot hide in a large tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BOUND = 8e-3  # whole tensors: chains of bf16 roundings (2^-9 each) measure 2e-3 to 5e-3
BLOCK_BOUND = 2.5e-2  # a block's own norm may be a few times below the tensor's
ROW_BLOCK, COLUMN_TILE = 128, 16


@dataclass
class Batch:
    """Inputs of one rank. Weights hold this rank's experts."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    dy: Tensor
    w_gate_up: Tensor
    w_down: Tensor


@dataclass
class Outputs:
    """Results of one forward and backward."""

    y: Tensor
    dx: Tensor
    dtopk_weights: Tensor
    dw_gate_up: Tensor
    dw_down: Tensor


@dataclass
class Verdict:
    """Errors by tensor; `problems` is empty when all of them are within bounds."""

    rel_err: dict[str, float] = field(default_factory=dict)
    worst_block: float = 0.0
    problems: list[str] = field(default_factory=list)

    def note(self, name: str, got: Tensor, want: Tensor, *, whole: bool = True) -> None:
        """Compare one tensor; `whole` also counts it as a result of its own and not as a part of one."""
        error = relative_error(got, want)
        block = worst_block_error(got, want)
        self.worst_block = max(self.worst_block, block)
        if whole:
            self.rel_err[name] = error
        if not error < (BOUND if whole else BLOCK_BOUND):
            self.problems.append(f"{name}: relative error {error:.2e}")
        elif not block < BLOCK_BOUND:
            self.problems.append(f"{name}: relative error {block:.2e} in its worst block")


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; 0 or infinity where want is 0; infinity for a non-finite got."""
    difference = (got.float() - want.float()).norm().item()
    scale = want.float().norm().item()
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    ratio = difference / scale
    return ratio if ratio == ratio else float("inf")


def worst_block_error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of any 128-row block and any 16-column tile of a matrix whose block is not all 0."""
    if got.numel() == 0:
        return 0.0
    squares = torch.stack([(got.float() - want.float()).square(), want.float().square()])
    worst = 0.0
    for dim, size in ((1, ROW_BLOCK), (2, COLUMN_TILE)):
        sums = squares.sum(3 - dim, dtype=torch.float64)
        short = -sums.shape[1] % size
        blocks = torch.nn.functional.pad(sums, (0, short)).view(2, -1, size).sum(2)
        wrong, scale = blocks
        if not torch.isfinite(wrong).all() or (wrong[scale == 0] != 0).any():
            return float("inf")
        if (scale > 0).any():
            worst = max(worst, (wrong / scale)[scale > 0].max().sqrt().item())
    return worst


def check_layer(batch: Batch, outputs: Outputs, *, group: dist.ProcessGroup | None = None) -> Verdict:
    """Compare a layer's results with the reference. Collective over `group`; every rank checks its own part."""
    verdict = Verdict()
    rank = dist.get_rank(group) if group is not None else 0
    x, ids, scores, dy = (_gather(t, group) for t in (batch.x, batch.topk_ids, batch.topk_weights, batch.dy))
    y, dx = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for _ in range(2))
    dscores = torch.zeros(scores.shape, dtype=torch.float32, device=x.device)
    squares = {"dw_gate_up": [0.0, 0.0], "dw_down": [0.0, 0.0]}
    local = batch.w_down.shape[0]
    for expert in range(local):
        tokens, slots = (ids == rank * local + expert).nonzero(as_tuple=True)
        grads = _expert(batch, expert, x[tokens], dy[tokens], scores[tokens, slots, None])
        y.index_add_(0, tokens, grads["y"])
        dx.index_add_(0, tokens, grads["dx"])
        dscores[tokens, slots] = grads["dscores"]
        for name, sums in squares.items():
            got = getattr(outputs, name)[expert]
            verdict.note(f"{name}[{expert}]", got, grads[name], whole=False)
            sums[0] += (got.float() - grads[name]).square().sum(dtype=torch.float64).item()
            sums[1] += grads[name].square().sum(dtype=torch.float64).item()
    for name, (wrong, scale) in squares.items():
        verdict.rel_err[name] = (wrong / scale) ** 0.5 if scale else (0.0 if wrong == 0.0 else float("inf"))
        if not verdict.rel_err[name] < BOUND:
            verdict.problems.append(f"{name}: relative error {verdict.rel_err[name]:.2e}")
    for name, total in (("y", y), ("dx", dx), ("dtopk_weights", dscores)):
        verdict.note(name, getattr(outputs, name), _own_part(total, batch.x.shape[0], group))
    verdict.rel_err = {name: float(f"{error:.3e}") for name, error in verdict.rel_err.items()}
    return verdict


def _expert(batch: Batch, expert: int, x: Tensor, dy: Tensor, score: Tensor) -> dict[str, Tensor]:
    x, dy = x.float(), dy.float()
    w_gate_up, w_down = batch.w_gate_up[expert].float(), batch.w_down[expert].float()
    gate, up = (x @ w_gate_up.t()).to(batch.x.dtype).float().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    h = (gate * sigmoid * up).to(batch.x.dtype).float()
    dh = dy @ w_down  # without the score
    dgate = score * dh * up * sigmoid * (1 + gate * (1 - sigmoid))
    dz = torch.cat([dgate, score * dh * gate * sigmoid], dim=1)
    return {
        "y": score * (h @ w_down.t()),
        "dx": dz @ w_gate_up,
        "dscores": (dh * h).sum(1),
        "dw_gate_up": dz.t() @ x,
        "dw_down": dy.t() @ (score * h),
    }


def poison(device: torch.device, like: list[Tensor]) -> None:
    """Leave NaN in the memory that the next outputs and workspaces of these sizes will be made of."""
    blocks: list[Any] = [torch.full_like(tensor, float("nan")) for tensor in like for _ in range(2)]
    del blocks
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks, in rank order; every rank has the same number of rows."""
    if group is None:
        return own
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


def _own_part(total: Tensor, rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of all ranks' shares of this rank's rows."""
    if group is None:
        return total
    dist.all_reduce(total, group=group)
    rank = dist.get_rank(group)
    return total[rank * rows : (rank + 1) * rows]
