# SPDX-License-Identifier: Apache-2.0
"""`plan_memory`: the bytes a config costs, computed on any machine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.moe.config import MegaMoEConfig, common_reason
from prime_kernels.moe.cuda_variants import POOL_ALIGN, TILE_N, arena_layout, plan_numel, pool_rows


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per rank at T = max_tokens_per_rank, bf16 tensors, for the fused kernels.

    Attributes:
        symmetric_bytes: Peer-visible arena, one per (group, config), shared by all layers; torch does not count it.
        workspace_bytes: Temporaries of the larger of forward and backward, shared by all layers.
        saved_bytes_per_layer: What autograd keeps between forward and backward, per layer and microbatch.
        prepared_bytes_per_layer: Quantised weights beside the bf16 ones; 0 for bf16.
        pool_rows: Rows of the local pool, which holds whatever the routing sends here.
        max_recv_rows: Rows this rank receives when every rank sends it everything.
    """

    symmetric_bytes: int
    workspace_bytes: int
    saved_bytes_per_layer: int
    prepared_bytes_per_layer: int
    pool_rows: int
    max_recv_rows: int

    def explain(self) -> str:
        """The plan as text, one quantity a line."""
        rows = (
            ("symmetric memory", self.symmetric_bytes, "once per group; not in torch's statistics"),
            ("workspace", self.workspace_bytes, "during a call, shared by all layers"),
            ("saved for backward", self.saved_bytes_per_layer, "per layer and microbatch in flight"),
            ("prepared weights", self.prepared_bytes_per_layer, "per layer"),
        )
        lines = [f"{name:<20}{size / 2**20:>12.1f} MiB  {note}" for name, size, note in rows]
        lines.append(f"{'pool rows':<20}{self.pool_rows:>12}      worst case received {self.max_recv_rows}")
        return "\n".join(lines)


def plan_memory(config: MegaMoEConfig, *, ep_size: int = 1) -> MemoryPlan:
    """Bytes that this config costs one rank of a group of `ep_size`.

    Args:
        config: The config; `max_tokens_per_rank` is the T of the plan.
        ep_size: Ranks of the group, 1..256.

    Returns:
        A `MemoryPlan`.

    Raises:
        UnsupportedConfig: `ep_size` does not divide the experts or is out of range.

    Source: this file; the regions are those of the arena in docs/design.md.
    """
    reason = common_reason(config, ep_size=ep_size)
    if reason is not None:
        raise UnsupportedConfig(reason, facts={"ep_size": ep_size})
    tokens, topk = config.max_tokens_per_rank, config.topk
    rows = pool_rows(config, tokens, ep_size)
    plan = 4 * plan_numel(config, tokens, ep_size)
    saved = tokens * config.hidden * 2 + tokens * topk * (8 + 4) + plan
    if config.save != "inputs":
        saved += rows * 2 * config.intermediate * 2
    if config.save == "full":
        saved += rows * config.hidden * 2
    return MemoryPlan(
        symmetric_bytes=_symmetric_bytes(config, ep_size),
        workspace_bytes=_workspace_bytes(config, ep_size, rows),
        saved_bytes_per_layer=saved,
        prepared_bytes_per_layer=_prepared_bytes(config, ep_size),
        pool_rows=rows,
        max_recv_rows=ep_size * tokens * topk,
    )


def _symmetric_bytes(config: MegaMoEConfig, ep_size: int) -> int:
    """The arena; 0 without peers and for backends that use ordinary collectives."""
    if ep_size == 1 or config.backend in ("grouped", "reference"):
        return 0
    return arena_layout(config, ep_size).end


def _workspace_bytes(config: MegaMoEConfig, ep_size: int, rows: int) -> int:
    """Temporaries of the larger of forward and backward: what lives at the same time."""
    hidden, intermediate = 2 * config.hidden, 2 * config.intermediate  # bytes of a row
    kept = hidden if config.save == "full" else 0  # x rows are then part of what is saved
    again = 2 * intermediate if config.save == "inputs" else 0  # recomputed pre-activations
    forward = rows * (hidden - kept + intermediate)  # x rows, h
    backward = rows * (2 * hidden - kept + 3 * intermediate + again)  # x rows, dy rows, dz, s*h
    counters = 4 * rows // POOL_ALIGN
    parts = -(-config.intermediate // TILE_N)  # of a score's gradient
    results = rows * (hidden + 4)  # y or dx rows, scores
    sets = (1, 2) if ep_size == 1 else (3, 3)  # of counters, in either direction
    return results + max(forward + sets[0] * counters, backward + sets[1] * counters + rows * 4 * parts)


def _prepared_bytes(config: MegaMoEConfig, ep_size: int) -> int:
    weights = config.num_experts // ep_size * 3 * config.intermediate * config.hidden
    if config.precision == "bf16":
        return 0
    if config.precision == "mxfp8":
        return 2 * (weights + weights // 32)  # codes along either axis, one e8m0 per 32
    return weights + weights // (128 * 128) * 4  # square blocks serve both directions, one fp32 per 128x128
