# SPDX-License-Identifier: Apache-2.0
"""The reference's work on the rows of this rank's experts, expert by expert; formulas in reference.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.moe.activation import swiglu, swiglu_backward

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from prime_kernels.moe.backend import Needs, Weights
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.exchange import Routing
    from prime_kernels.moe.recipe import Operands

# Bits of `Routing.peer_flags`: what some rank needs, so that all of them take part.
NEED_DX, NEED_DSCORE, NEED_ROWS = 1, 2, 4


class ExpertBackward:
    """The experts' share of a backward: row gradients and weight gradients, expert by expert."""

    def __init__(
        self,
        config: MegaMoEConfig,
        operands: Operands,
        saved: SavedRows,
        routing: Routing,
        needs: Needs,
        wgrad_dtype: torch.dtype,
    ) -> None:
        self._config, self._operands, self._saved, self._routing = config, operands, saved, routing
        self._needs, self._wgrad_dtype = needs, wgrad_dtype
        # What any rank asks for: rows sent here are due back to it.
        self.wants_dx = bool(routing.peer_flags & NEED_DX)
        self.wants_dscore = bool(routing.peer_flags & NEED_DSCORE)
        self.dx_rows: Tensor
        self.ds_rows: Tensor
        self.dw_gate_up: Weights | None = None
        self.dw_down: Tensor | None = None

    def run(self, rows: Tensor, dy_rows: Tensor, scores: Tensor, w_gate_up: Weights, w_down: Tensor) -> None:
        acc_dtype = self._operands.acc_dtype
        self.dx_rows = dy_rows.new_zeros(dy_rows.shape, dtype=acc_dtype)
        self.ds_rows = scores.new_zeros(scores.shape, dtype=acc_dtype)
        self.dw_gate_up = _zeros(w_gate_up, self._wgrad_dtype) if self._needs.w_gate_up else None
        self.dw_down = torch.zeros_like(w_down, dtype=self._wgrad_dtype) if self._needs.w_down else None
        for expert, span in spans(self._routing):
            self._expert(expert, span, rows[span], dy_rows[span], scores[span].to(acc_dtype))

    def _expert(self, expert: int, span: slice, x: Tensor, dy: Tensor, s: Tensor) -> None:
        operands, act = self._operands, self._config.activation
        dy_q = operands.rows_backward(dy)
        z = self._saved.z(span)
        if z is None:
            z = gate_up_rows(operands, x, expert).to(x.dtype)
        z = z.to(operands.acc_dtype)
        h = swiglu(z, act).to(x.dtype).to(operands.acc_dtype)
        if self.dw_down is not None:
            self.dw_down[expert] = operands.tokens(dy_q).t() @ operands.tokens((s * h).to(x.dtype))
        if not (self._needs.w_gate_up or self.wants_dx or self.wants_dscore):
            return
        dh = dy_q @ operands.down(expert, dgrad=True)  # without s
        self.ds_rows[span] = (dh * h).sum(1, keepdim=True)
        dz = swiglu_backward(z, s * dh, act).to(x.dtype)
        if self.wants_dx:
            self.dx_rows[span] = operands.rows_backward(dz) @ operands.gate_up(expert, dgrad=True)
        if self.dw_gate_up is not None:
            # The forward's rows: of an fp8 forward, the values its codes stand for.
            _store(self.dw_gate_up, expert, operands.tokens(dz).t() @ operands.tokens(operands.rows(x)))


class SavedRows:
    """What forward kept of the rows this rank computed. Rows beyond the pool's capacity were not kept."""

    def __init__(self, preact: Tensor | None, num_rows: int, intermediate: int) -> None:
        self._preact = preact
        self._width = 2 * intermediate
        self.has_all_x = preact is not None and preact.shape[1] > self._width and num_rows <= preact.shape[0]

    @property
    def x(self) -> Tensor:
        """[rows, H]; only with `has_all_x`."""
        assert self._preact is not None
        return self._preact[:, self._width :].contiguous()

    def z(self, span: slice) -> Tensor | None:
        """One expert's pre-activations; None when any of them is missing, since a GEMM over fewer rows may round
        differently."""
        if self._preact is None or span.stop > self._preact.shape[0]:
            return None
        return self._preact[span, : self._width]


def gate_up_rows(operands: Operands, rows: Tensor, expert: int) -> Tensor:
    return operands.rows(rows) @ operands.gate_up(expert).t()


def spans(routing: Routing) -> Iterator[tuple[int, slice]]:
    """Local experts that have rows, with their rows."""
    end = 0
    for expert, count in enumerate(routing.recv_per_local_expert.tolist()):
        start, end = end, end + count
        if count:
            yield expert, slice(start, end)


def _zeros(weights: Weights, dtype: torch.dtype) -> Weights:
    if isinstance(weights, tuple):
        gate, up = weights
        return torch.zeros_like(gate, dtype=dtype), torch.zeros_like(up, dtype=dtype)
    return torch.zeros_like(weights, dtype=dtype)


def _store(target: Weights, expert: int, value: Tensor) -> None:
    if isinstance(target, tuple):
        target[0][expert], target[1][expert] = value.chunk(2)
    else:
        target[expert] = value
