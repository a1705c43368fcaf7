# SPDX-License-Identifier: Apache-2.0
"""Selective activation checkpointing: keep the fused forward's results, recompute everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import CheckpointPolicy

from prime_kernels.moe import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def save_ops() -> set[torch._ops.OpOverload]:
    """The ops to put on a save list, so that a checkpointed layer runs its fused forward once per step.

    Keeping an op keeps all its results: with save="inputs" that is y, T*H elements; with save="preact" also the
    pre-activations. Under full checkpointing prefer "preact", with this list prefer "inputs".

    Returns:
        Overloads for `CheckpointPolicy.MUST_SAVE`.

    Source: this file; the ops are in moe/ops.py.
    """
    return {ops.mega_moe_fwd, ops.mega_moe_fwd_preact}


def policy(base: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A policy function for `create_selective_checkpoint_contexts` that saves the fused forward.

    Args:
        base: Policy for all other ops, called with the same arguments. None recomputes them.

    Returns:
        policy(ctx, op, *args, **kwargs) -> CheckpointPolicy.

    Source: this file.
    """
    saved = save_ops()

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if op in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE if base is None else base(ctx, op, *args, **kwargs)

    return decide
