# SPDX-License-Identifier: Apache-2.0
"""Row exchange of the unfused backends: which (token, slot) goes to which rank, and the transport both ways.

A *slot* is one entry of `topk_ids`, numbered t * K + k. Rows travel sorted by (expert, token, slot); on the owner they
lie sorted by (local expert, source rank, token, slot). That is the order in which one rank holding all experts would
see the concatenated batch, so results do not depend on ep_size.

Slots whose id is -1, or any other id outside [0, E), travel nowhere and cost nothing. T may be 0 and may differ per
rank; every rank of the group takes part in every call.

`dispatch` and `combine_rows` are transposes of each other, and so are `gather_slots` and `sum_slots` without weights:
the backward of a layer uses the same four functions the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from prime_kernels.moe.abort import PeerChannel


@dataclass(frozen=True)
class Routing:
    """Where every routed row of one call goes. Dims: T tokens here, K topk, E experts, E_l local experts.

    At ep_size 1 nothing is sent and `num_sent == num_recv == T * K` without asking the device; rows at and after
    `recv_per_local_expert.sum()` are skipped slots, belong to no expert, and hold values nobody may use.
    """

    num_tokens: int
    topk: int
    num_sent: int
    num_recv: int
    order: Tensor
    """[num_sent] int64. Slot of each sent row, sorted by (expert, token, slot)."""
    slot_rows: Tensor
    """[T, K] int64. Sent row of each slot; -1 for a skipped slot. Inverse of `order`."""
    tokens_per_expert: Tensor
    """[E] int32. Rows that this rank sends to each expert."""
    recv_per_local_expert: Tensor
    """[E_l] int32. Rows that each local expert computes."""
    recv_counts: tuple[int, ...] | None
    """`recv_per_local_expert` on the host; None at ep_size 1, where nobody had to ask the device."""
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    arrival: Tensor | None
    """[num_recv] int64. Arrival position of each row of the local order; None when arrival order is that order."""
    peer_flags: int
    """Bitwise or of the `flags` of all ranks of the group."""
    group: ProcessGroup | None
    channel: PeerChannel | None

    @property
    def offsets(self) -> Tensor:
        """[E_l] int32. End row of each local expert, the form grouped GEMMs take."""
        return self.recv_per_local_expert.cumsum(0, dtype=torch.int32)


def build_routing(
    topk_ids: Tensor,
    *,
    num_experts: int,
    group: ProcessGroup | None = None,
    ep_rank: int = 0,
    ep_size: int = 1,
    channel: PeerChannel | None = None,
    phase: str = "forward",
    flags: int = 0,
) -> Routing:
    """Sort this rank's slots and tell every peer how many rows each of its experts gets. Collective when ep_size > 1.

    Args:
        topk_ids: [T, K] int32 or int64. Global expert ids; ids outside [0, E) are skipped.
        num_experts: E over the whole group; rank r owns experts [r * E_l, (r + 1) * E_l).
        group: Process group of ep_size ranks that rows travel in; None at ep_size 1.
        ep_rank: This rank in the group.
        ep_size: Ranks of the group; divides E.
        channel: Carries the counts together with the abort protocol. None: counts travel in `group`, unprotected.
        phase: "forward" or "backward", for error texts and for noticing ranks that are in different calls.
        flags: Small bit set for the peers; the union comes back as `Routing.peer_flags`.

    Raises:
        PeerAborted, PeerTimeout, ConfigMismatch: from `channel`.
    """
    order, slot_rows, counts = _sort_slots(topk_ids, num_experts)
    return _route(order, slot_rows, counts, topk_ids.shape, group, ep_size, channel, phase, flags)


def pack_plan(routing: Routing) -> Tensor:
    """The static part of a routing as one tensor, [T * K + E] int32: what autograd keeps for backward."""
    slots = routing.slot_rows.reshape(-1).to(torch.int32)
    return torch.cat([slots, routing.tokens_per_expert])


def plan_numel(num_tokens: int, topk: int, num_experts: int) -> int:
    """Elements of `pack_plan`'s tensor; a static function of the call's sizes."""
    return num_tokens * topk + num_experts


def routing_from_plan(
    plan: Tensor,
    shape: torch.Size,
    *,
    group: ProcessGroup | None = None,
    ep_size: int = 1,
    channel: PeerChannel | None = None,
    phase: str = "backward",
    flags: int = 0,
) -> Routing:
    """The `Routing` of a forward call, from its `pack_plan`, without sorting again. Collective when ep_size > 1.

    Args:
        plan: [T * K + E] int32, as `pack_plan` returned it.
        shape: (T, K) of that call.
    """
    num_slots = shape[0] * shape[1]
    rows, counts = plan[:num_slots].long(), plan[num_slots:]
    # Skipped slots have no row; they follow the routed ones in slot order, as the stable sort left them.
    skipped = rows < 0
    tail = counts.sum() + skipped.cumsum(0) - 1
    order = torch.empty_like(rows)
    order.scatter_(0, torch.where(skipped, tail, rows), torch.arange(num_slots, device=plan.device))
    return _route(order, rows.reshape(shape), counts, shape, group, ep_size, channel, phase, flags)


def gather_slots(x: Tensor, routing: Routing) -> Tensor:
    """[T, D] -> [num_sent, D]. One copy of a token's row for each of its routed slots."""
    return x.index_select(0, routing.order // routing.topk)


def dispatch(rows: Tensor, routing: Routing) -> Tensor:
    """[num_sent, D] in sent order -> [num_recv, D] in the owner's order. Collective when ep_size > 1."""
    if routing.arrival is None:
        return rows
    arrived = _all_to_all(rows, routing.recv_splits, routing.send_splits, routing)
    return arrived.index_select(0, routing.arrival)


def combine_rows(rows: Tensor, routing: Routing) -> Tensor:
    """[num_recv, D] in the owner's order -> [num_sent, D] in sent order. Collective when ep_size > 1."""
    if routing.arrival is None:
        return rows
    leaving = torch.empty_like(rows, memory_format=torch.contiguous_format)
    leaving.index_copy_(0, routing.arrival, rows)
    return _all_to_all(leaving, routing.send_splits, routing.recv_splits, routing)


def sum_slots(rows: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Add up the rows of each token in slot order, in fp32; every bit is reproducible.

    Args:
        rows: [num_sent, D] any float dtype, sent order.
        weights: [T, K] fp32 factor of each slot, or None for 1. Skipped slots add nothing, whatever their weight.

    Returns:
        [T, D] fp32, or fp64 when rows are fp64.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(routing.num_tokens, rows.shape[1], dtype=dtype, device=rows.device)
    if routing.num_sent == 0:
        return total
    for k in range(routing.topk):
        index = routing.slot_rows[:, k]
        part = rows.index_select(0, index.clamp(min=0)).to(dtype)
        if weights is not None:
            part *= weights[:, k, None]
        # where, not a product with 0: the row that a skipped slot borrows may be NaN.
        total += torch.where(index[:, None] >= 0, part, 0)
    return total


def slots_to_rows(values: Tensor, routing: Routing) -> Tensor:
    """[T, K] -> [num_sent, 1]. Per-slot values such as routing weights, in sent order."""
    return values.reshape(-1).index_select(0, routing.order).unsqueeze(1)


def rows_to_slots(values: Tensor, routing: Routing) -> Tensor:
    """[num_sent, 1] -> [T, K]. Inverse of `slots_to_rows`; skipped slots are 0."""
    if routing.num_sent == 0:
        return values.new_zeros(routing.slot_rows.shape)
    picked = values.reshape(-1).index_select(0, routing.slot_rows.reshape(-1).clamp(min=0))
    return torch.where(routing.slot_rows >= 0, picked.view(routing.slot_rows.shape), 0)


def _sort_slots(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [T*K], slot_rows [T, K], counts [E]); skipped slots last in `order`. No host synchronisation."""
    # Radix sorts read one pass per key byte, so the keys are as narrow as E allows.
    key_dtype = torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32
    routed = (topk_ids >= 0) & (topk_ids < num_experts)
    keys = torch.where(routed, topk_ids, num_experts).reshape(-1).to(key_dtype)
    keys, order = torch.sort(keys, stable=True)
    # bincount would synchronise with the host to size its output.
    bounds = torch.searchsorted(keys, torch.arange(num_experts + 1, dtype=key_dtype, device=keys.device))
    rows = torch.empty_like(order)
    rows.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    slot_rows = torch.where(routed, rows.view(topk_ids.shape), -1)
    return order, slot_rows, bounds.diff().to(torch.int32)


def _route(
    order: Tensor,
    slot_rows: Tensor,
    counts: Tensor,
    shape: torch.Size,
    group: ProcessGroup | None,
    ep_size: int,
    channel: PeerChannel | None,
    phase: str,
    flags: int,
) -> Routing:
    num_tokens, topk = shape
    if ep_size == 1:
        rows = (order.numel(),)
        return Routing(
            num_tokens, topk, *rows, *rows, order, slot_rows, counts, counts, None, rows, rows, None, flags, None, None
        )
    # One device-to-host copy: split sizes of a collective are host values.
    sent = counts.to("cpu", torch.int64).view(ep_size, -1)
    if channel is not None:
        received, flags = channel.exchange(sent, phase=phase, flags=flags, tokens=num_tokens)
    else:
        received = _exchange_counts(sent, group, counts.device)
    send_splits = tuple(sent.sum(1).tolist())
    recv_splits = tuple(received.sum(1).tolist())
    num_sent, num_recv = sum(send_splits), sum(recv_splits)
    return Routing(
        num_tokens,
        topk,
        num_sent,
        num_recv,
        order[:num_sent],
        slot_rows,
        counts,
        received.sum(0).to(counts.device, torch.int32, non_blocking=True),
        tuple(received.sum(0).tolist()),
        send_splits,
        recv_splits,
        _arrival_order(received.to(counts.device), num_recv),
        flags,
        group,
        channel,
    )


def _arrival_order(received: Tensor, num_recv: int) -> Tensor:
    """Positions that turn (source, expert) blocks into (expert, source) blocks. `received`: [R, E_l] rows per block."""
    ends = received.reshape(-1).cumsum(0).view_as(received)
    starts = (ends - received).t().reshape(-1)
    lengths = received.t().reshape(-1)
    shift = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(num_recv, device=received.device)
    return places + torch.repeat_interleave(shift, lengths, output_size=num_recv)


def _exchange_counts(sent: Tensor, group: ProcessGroup | None, device: torch.device) -> Tensor:
    out = torch.empty_like(sent, device=device)
    dist.all_to_all_single(out, sent.to(device), group=group)
    return out.cpu()


def _all_to_all(rows: Tensor, out_splits: tuple[int, ...], in_splits: tuple[int, ...], routing: Routing) -> Tensor:
    out = rows.new_empty(sum(out_splits), *rows.shape[1:])
    # Bytes: gloo knows fewer dtypes than torch, and transport has no business with them.
    raw_out, raw_in = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
    if routing.channel is not None and rows.device.type == "cpu":
        routing.channel.all_to_all(raw_out, raw_in, list(out_splits), list(in_splits))
    else:
        dist.all_to_all_single(raw_out, raw_in, list(out_splits), list(in_splits), group=routing.group)
    return out
