# SPDX-License-Identifier: Apache-2.0
"""Which kernel variants a config takes, sizes, and what one launch hands to the next. Launches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from prime_kernels.moe.cuda_buffers import Buffer

if TYPE_CHECKING:
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.cuda_buffers import Operand

PLAN, PREPARE, COMBINE, GATHER = "plan|t1024", "prepare|t256", "combine|bf16", "gather_rows|b16|t256|l4"
STAGE_K, TILE_M, TILE_N = 64, 128, 256
POOL_ALIGN = 64  # rows; kPoolAlign of kernels_src/moe/plan.cuh

_T = TypeVar("_T")


class PlanView(NamedTuple):
    """Addresses inside a plan: counts [E], starts [E + 1], pool row of every slot [T*K], token of every row [pool]."""

    counts: int
    starts: int
    slot_row: int
    row_src: int

    @classmethod
    def of(cls, plan: Operand, experts: int, slots: int) -> PlanView:
        """The addresses inside this plan."""
        base = plan.data_ptr()
        slot_row = base + 4 * (2 * experts + 1)
        return cls(base, base + 4 * experts, slot_row, slot_row + 4 * slots)


class Pull(NamedTuple):
    """Rows of `src` [T, H] to be copied to pool order in `dst`; `arrivals` when the same launch reads them."""

    src: Operand
    dst: Operand
    arrivals: Operand | None


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


def address(operand: Operand | None) -> int:
    """Address on the device; 0 for what a launch does without."""
    return 0 if operand is None else operand.data_ptr()


def split(weights: _T | tuple[_T, _T]) -> tuple[_T, _T | None]:
    """Packed weights and None, or the pair."""
    return weights if isinstance(weights, tuple) else (weights, None)


def pool_rows(config: MegaMoEConfig, num_tokens: int) -> int:
    """Rows of the pool: all routes, plus what aligning every expert to 64 rows can add. May be symbolic."""
    most = num_tokens * config.topk + (POOL_ALIGN - 1) * config.num_experts
    return (most + POOL_ALIGN - 1) // POOL_ALIGN * POOL_ALIGN


def plan_numel(config: MegaMoEConfig, num_tokens: int) -> int:
    """Length of the plan, laid out as `PlanView` says."""
    return 2 * config.num_experts + 1 + num_tokens * config.topk + pool_rows(config, num_tokens)


def preact_shape(config: MegaMoEConfig, num_tokens: int, save: str) -> tuple[int, int]:
    """Shape of what "preact" and "full" keep."""
    kept = config.hidden if save == "full" else 0
    return pool_rows(config, num_tokens), 2 * config.intermediate + kept


def kept_rows(preact: Operand | None, pool: int, config: MegaMoEConfig) -> Buffer | None:
    """The x rows behind z in what save="full" keeps; None for the other modes."""
    z_width = 2 * config.intermediate
    if preact is None or preact.shape[1] == z_width:
        return None
    size = preact.element_size()
    return Buffer(preact.data_ptr() + pool * z_width * size, (pool, config.hidden), size)
