# SPDX-License-Identifier: Apache-2.0
"""SwiGLU over pre-activations z = [gate columns, up columns], and its exact gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.config import SwiGLU


def swiglu(z: Tensor, act: SwiGLU) -> Tensor:
    """[n, 2I] -> [n, I], in z's dtype: g * sigmoid(alpha * g) * (u + up_offset) of the clamped halves."""
    gate, up = _clamped(z, act)
    return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)


def swiglu_backward(z: Tensor, dh: Tensor, act: SwiGLU) -> Tensor:
    """Gradient of `swiglu` at z, [n, 2I]. Exactly 0 outside the clamp, as for torch.clamp."""
    gate, up = _clamped(z, act)
    sig = torch.sigmoid(act.alpha * gate)
    dgate = dh * (up + act.up_offset) * sig * (1 + act.alpha * gate * (1 - sig))
    dup = dh * gate * sig
    if act.clamp is not None:
        raw_gate, raw_up = z.chunk(2, dim=1)
        dgate = torch.where(raw_gate <= act.clamp, dgate, 0)
        dup = torch.where(raw_up.abs() <= act.clamp, dup, 0)
    return torch.cat([dgate, dup], dim=1)


def _clamped(z: Tensor, act: SwiGLU) -> tuple[Tensor, Tensor]:
    gate, up = z.chunk(2, dim=1)
    if act.clamp is None:
        return gate, up
    return gate.clamp(max=act.clamp), up.clamp(min=-act.clamp, max=act.clamp)
