# SPDX-License-Identifier: Apache-2.0
"""Which kernel variants a config takes, and what one launch hands to the next. Launches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import Weights
    from prime_kernels.moe.config import MegaMoEConfig

PLAN, PREPARE, COMBINE, GATHER = "plan|t1024", "prepare|t256", "combine|bf16", "gather_rows|b16|t256|l4"
STAGE_K, TILE_M, TILE_N = 64, 128, 256


class PlanView(NamedTuple):
    """Addresses inside a plan: counts [E], starts [E + 1], pool row of every slot [T*K], token of every row [pool]."""

    counts: int
    starts: int
    slot_row: int
    row_src: int

    @classmethod
    def of(cls, plan: Tensor, experts: int, slots: int) -> PlanView:
        """The addresses inside this plan."""
        base = plan.data_ptr()
        slot_row = base + 4 * (2 * experts + 1)
        return cls(base, base + 4 * experts, slot_row, slot_row + 4 * slots)


class Pull(NamedTuple):
    """Rows of `src` [T, H] to be copied to pool order in `dst`; `arrivals` when the same launch reads them."""

    src: Tensor
    dst: Tensor
    arrivals: Tensor | None


def gemm_key(op: str, config: MegaMoEConfig) -> str:
    """The variant of a GEMM that this config takes."""
    tile = f"t{TILE_M}x{TILE_N}x{STAGE_K}"
    act = "swiglu" if is_plain(config) else "clamped"
    return {
        "gate_up": f"gate_up|bf16|{act}|{tile}|s4|c2",
        "down": f"down|bf16|scored|{tile}|s4|c2",
        "down_grad": f"down_grad|bf16|{act}|{tile}|s3|c2",
        "gate_up_grad": f"gate_up_grad|bf16|{tile}|s4|c2",
        "wgrad_bf16": f"wgrad|bf16|{tile}|s4|c2",
        "wgrad_f32": f"wgrad|fp32|{tile}|s4|c2",
    }[op]


def kernel_keys(config: MegaMoEConfig) -> tuple[str, ...]:
    """Keys of every kernel that a call may need."""
    ops = ("gate_up", "down", "down_grad", "gate_up_grad", "wgrad_bf16", "wgrad_f32")
    return (PLAN, PREPARE, COMBINE, GATHER, *(gemm_key(op, config) for op in ops))


def is_plain(config: MegaMoEConfig) -> bool:
    """Whether the activation is SiLU-gated without clamp, slope or offset: a kernel class of its own."""
    activation = config.activation
    return activation.clamp is None and activation.alpha == 1.0 and activation.up_offset == 0.0


def address(tensor: Tensor | None) -> int:
    """Address on the device; 0 for what a launch does without."""
    return 0 if tensor is None else tensor.data_ptr()


def split(weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Packed weights and None, or the pair."""
    return weights if isinstance(weights, tuple) else (weights, None)
