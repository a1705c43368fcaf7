# SPDX-License-Identifier: Apache-2.0
"""Which kernel variants a config takes, sizes, and what one launch hands to the next. Launches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.peers.arena import ROW_BYTES, ArenaLayout

if TYPE_CHECKING:
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.moe.cuda_buffers import Operand

PLAN, PREPARE, COMBINE, GATHER = "plan|t1024", "prepare|t256", "combine|bf16", "gather_rows|b16|t256|l4"
PLAN_PEERS = "plan_peers|t1024"
STAGE_PEERS = "stage_peers|t512"
STAGE_K, TILE_M, TILE_N = 64, 128, 256
POOL_ALIGN = 64  # rows; kPoolAlign of kernels_src/moe/plan.cuh
ROW_WORDS = ROW_BYTES // 4  # of a row's entry in the plan among peers

_T = TypeVar("_T")


class PlanView(NamedTuple):
    """Addresses inside a plan: counts [E_l], starts [E_l + 1], place of every slot [T*K], and of every pool row its
    token [pool], or among peers its entry of 16 bytes."""

    counts: int
    starts: int
    slot_row: int
    row_src: int

    @classmethod
    def of(cls, plan: Operand, experts: int, slots: int, align: int = 1) -> PlanView:
        """The addresses inside this plan. `align`: of the rows, in words."""
        base = plan.data_ptr()
        slot_row = 2 * experts + 1
        row_src = (slot_row + slots + align - 1) // align * align
        return cls(base, base + 4 * experts, base + 4 * slot_row, base + 4 * row_src)


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
        "forward": f"forward|bf16|{act}|{tile}|s4|c2",
        "down_peers": f"down_peers|bf16|scored|{tile}|s4|c2",
        "gate_up_peers": f"gate_up_peers|bf16|{act}|{tile}|s4|c2",
        "down_grad_peers": f"down_grad_peers|bf16|{act}|{tile}|s3|c2",
        "gate_up_grad_peers": f"gate_up_grad_peers|bf16|{tile}|s4|c2",
    }[op]


def kernel_keys(config: MegaMoEConfig) -> tuple[str, ...]:
    """Keys of every kernel that a call of one rank may need."""
    ops = ("gate_up", "down", "down_grad", "gate_up_grad", "wgrad_bf16", "wgrad_f32")
    return (PLAN, PREPARE, COMBINE, GATHER, *(gemm_key(op, config) for op in ops))


def peer_kernel_keys(config: MegaMoEConfig) -> tuple[str, ...]:
    """Keys of every kernel that a call among peers may need."""
    ops = ("forward", "gate_up_peers", "down_peers", "down_grad_peers", "gate_up_grad_peers", "wgrad_bf16", "wgrad_f32")
    return (PLAN_PEERS, STAGE_PEERS, COMBINE, *(gemm_key(op, config) for op in ops))


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


def pool_rows(config: MegaMoEConfig, num_tokens: int, ep_size: int = 1) -> int:
    """Rows of the pool: all routes, plus what aligning every expert to 64 rows can add. May be symbolic.

    With peers, whose tokens this rank does not know, all routes of all ranks at their largest: nothing can overflow.
    """
    tokens = num_tokens if ep_size == 1 else ep_size * config.max_tokens_per_rank
    most = tokens * config.topk + (POOL_ALIGN - 1) * (config.num_experts // ep_size)
    return (most + POOL_ALIGN - 1) // POOL_ALIGN * POOL_ALIGN


def plan_numel(config: MegaMoEConfig, num_tokens: int, ep_size: int = 1) -> int:
    """Length of the plan, laid out as `PlanView` says."""
    if ep_size > 1:
        return peer_plan_numel(config, num_tokens, ep_size)
    return 2 * config.num_experts + 1 + num_tokens * config.topk + pool_rows(config, num_tokens)


def peer_plan_numel(config: MegaMoEConfig, num_tokens: int, ep_size: int) -> int:
    """The same among peers, of which there may be one."""
    head = 2 * (config.num_experts // ep_size) + 1 + num_tokens * config.topk
    return (head + ROW_WORDS - 1) // ROW_WORDS * ROW_WORDS + pool_rows(config, num_tokens, ep_size) * ROW_WORDS


def preact_shape(config: MegaMoEConfig, num_tokens: int, save: str, ep_size: int = 1) -> tuple[int, int]:
    """Shape of what "preact" and "full" keep."""
    kept = config.hidden if save == "full" else 0
    return pool_rows(config, num_tokens, ep_size), 2 * config.intermediate + kept


def arena_layout(config: MegaMoEConfig, ep_size: int) -> ArenaLayout:
    """The arena of every rank of a group of this size."""
    return ArenaLayout.of(
        num_experts=config.num_experts,
        tokens=config.max_tokens_per_rank,
        topk=config.topk,
        hidden=config.hidden,
        pool_rows=pool_rows(config, config.max_tokens_per_rank, ep_size),
    )


def kept_rows(preact: Operand | None, pool: int, config: MegaMoEConfig) -> Buffer | None:
    """The x rows behind z in what save="full" keeps; None for the other modes."""
    z_width = 2 * config.intermediate
    if preact is None or preact.shape[1] == z_width:
        return None
    size = preact.element_size()
    return Buffer(preact.data_ptr() + pool * z_width * size, (pool, config.hidden), size)
