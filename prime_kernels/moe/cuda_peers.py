# SPDX-License-Identifier: Apache-2.0
"""Calls of the cuda backend among the ranks of a group.

Forward: plan_peers (copies x to the arena), gate_up (pulls x), down (sends y), combine. Backward: stage_peers
(dy and x to the arena), gate_up where z was not kept, down_grad (pulls dy), gate_up_grad (pulls x, sends dx and the
scores' gradients), wgrad, combine.


Beside its tensors a rank has an arena (prime_kernels/peers): peers write counts, entries of its row list and results
there and read its tokens from there. Nothing that the backward needs stays in it: the plan is a tensor,
[counts E_l | starts E_l + 1 | place of every slot T*K | to a multiple of 16 bytes | entries of the pool rows], and a
slot's place is rank << 28 | pool row there, -1 without expert. `preact` is as with one rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from prime_kernels.moe.backend import Needs
from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.moe.cuda_calls import (
    BackwardAddresses,
    BackwardShape,
    Calls,
    ForwardAddresses,
    ForwardShape,
    PreparedCall,
    gate_up_of,
)
from prime_kernels.moe.cuda_peer_launch import PeerRecorder
from prime_kernels.moe.cuda_variants import (
    TILE_N,
    Pull,
    arena_layout,
    kept_rows,
    peer_kernel_keys,
    pool_rows,
    preact_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView
    from prime_kernels.moe.config import MegaMoEConfig
    from prime_kernels.peers.base import PeerMemory

_PLACE_BITS = 28  # kRankShift of kernels_src/moe/plan_peers.cuh: slots and pool rows


def unsupported_reason(config: MegaMoEConfig, ep_size: int) -> str | None:
    """Why slots or rows of this config cannot be numbered."""
    tokens = config.max_tokens_per_rank
    most = max(pool_rows(config, tokens, ep_size), tokens * config.topk)
    if most < 1 << _PLACE_BITS:
        return None
    return (
        f"max_tokens_per_rank={tokens} with topk={config.topk} and ep_size={ep_size} gives {most} pool rows; "
        f"need less than {1 << _PLACE_BITS}."
    )


def open_peers(runtime: RuntimeView, fault: Tensor) -> PeerMemory | None:
    """The arena of this rank, with every kernel of a call loaded; None where there are no peers. Collective."""
    peers = runtime.peers
    if peers is None and runtime.group is not None:
        from prime_kernels.peers.symmetric import create_peers

        layout, timeout_s = arena_layout(runtime.config, runtime.ep_size), runtime.config.peer_timeout_s
        peers = create_peers(layout, runtime.group, runtime.device, timeout_s=timeout_s)
    if peers is not None:
        warm_up(runtime.config, runtime.device, fault)
    return peers


def warm_up(config: MegaMoEConfig, device: torch.device, fault: Tensor) -> None:
    """Launch every kernel of a call once: a call of one rank that has no tokens, in an arena of its own.

    The driver may put off loading a kernel's code to its first launch, and then waits for kernels that are running,
    which among peers may be waiting for this very launch.
    """
    from prime_kernels.loader import load_kernel
    from prime_kernels.peers.loopback import create_peers

    for key in peer_kernel_keys(config):
        load_kernel(key, device=device.index)
    alone = config.replace(max_tokens_per_rank=1, num_experts=1, topk=1)
    (peers,) = create_peers(arena_layout(alone, 1), ranks=1, device=device, timeout_s=config.peer_timeout_s)
    calls = PeerCalls(alone, device.index, fault.data_ptr(), peers)
    forward = calls.of(ForwardShape(0, "inputs", False, False))
    backwards = [calls.of(BackwardShape(0, 0, False, Needs(True, True, True, True), fp32)) for fp32 in (False, True)]
    # Without tokens nothing reads or writes tokens, weights and results; only weight gradients are written, as zeros.
    sizes = [backwards[0].work_bytes, 4 * forward.plan_numel, 64]
    sizes += [4 * matrices * config.hidden * config.intermediate for matrices in (2, 1)]
    work, plan, counts, dw_gate_up, dw_down = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    addresses = dict.fromkeys(ForwardAddresses._fields, work.data_ptr()) | {"plan": plan.data_ptr()}
    addresses |= {"sent": counts.data_ptr(), "received": counts.data_ptr() + 32}
    forward.launch(device, ForwardAddresses(**addresses))
    addresses = dict.fromkeys(BackwardAddresses._fields, work.data_ptr()) | {"plan": plan.data_ptr()}
    addresses |= {"dw_gate_up": dw_gate_up.data_ptr(), "dw_down": dw_down.data_ptr()}
    for backward in backwards:
        backward.launch(device, BackwardAddresses(**addresses))
    torch.cuda.synchronize(device)


class PeerCalls(Calls):
    """Prepared calls of a runtime with peers."""

    def __init__(self, config: MegaMoEConfig, index: int, fault: int, peers: PeerMemory) -> None:
        super().__init__(config, index, fault)
        self._peers = peers

    def _make(self, shape: ForwardShape | BackwardShape) -> PreparedCall:
        recorder = PeerRecorder(self._config, self._index, self._fault, shape.tokens, self._peers)
        if isinstance(shape, ForwardShape):
            record_forward(recorder, shape)
            return PreparedCall(recorder, ForwardAddresses._fields, shape.save)
        record_backward(recorder, shape)
        return PreparedCall(recorder, BackwardAddresses._fields)


def record_forward(call: PeerRecorder, shape: ForwardShape) -> None:
    """plan_peers (copies x to the arena), gate_up (pulls rows of x), down (sends rows of y), combine."""
    config, tokens, take = call.config, shape.tokens, call.work.take
    hidden, inter, topk = config.hidden, config.intermediate, config.topk
    pool = pool_rows(config, tokens, call.ep_size)
    x, y = Buffer.of("x", tokens, hidden), Buffer.of("y", tokens, hidden)
    ids = Buffer.of("topk_ids", tokens, topk, itemsize=8 if shape.wide_ids else 4)
    scores = Buffer.of("topk_weights", tokens, topk, itemsize=4)
    sent = Buffer.of("sent", config.num_experts, itemsize=4)
    received = Buffer.of("received", call.experts, itemsize=4)
    preact = None
    if shape.save != "inputs":
        preact = Buffer.of("preact", *preact_shape(config, tokens, shape.save, call.ep_size))
    kept = kept_rows(preact, pool, config)
    score, counters = take(pool, itemsize=4), call.peer_counters(pool)
    x_rows = take(pool, hidden) if kept is None else kept
    h, y_rows = take(pool, inter), take(pool, hidden)
    call.plan_peers(x, ids, scores, (sent, received), score, counters.all)
    w_down = Buffer.of("w_down", call.experts, hidden, inter)
    weights = gate_up_of(call, shape.pair, "")
    if call.chained:
        call.forward(x_rows, weights, h, preact, w_down, score, y_rows, counters)
    else:
        extra = call.among_peers(counters.first)
        call.gate_up(Pull(x, x_rows, counters.first), weights, h, preact, "gate_up_peers", **extra)
        call.down(h, w_down, score, y_rows, "down_peers", **call.sending(counters, y_rows))
    call.combine_peers(y_rows, y)


def record_backward(call: PeerRecorder, shape: BackwardShape) -> None:
    """stage_peers, gate_up if z was not kept, down_grad, gate_up_grad, wgrad, combine.

    What peers may ask for is always done, whatever this rank needs: its tokens are staged, and theirs get dx.
    """
    config, tokens, needs, take = call.config, shape.tokens, shape.needs, call.work.take
    hidden, inter = config.hidden, config.intermediate
    pool = pool_rows(config, tokens, call.ep_size)
    dy, x = Buffer.of("dy", tokens, hidden), Buffer.of("x", tokens, hidden)
    weights, w_down = gate_up_of(call, shape.pair, ""), Buffer.of("w_down", call.experts, hidden, inter)
    preact = Buffer.of("preact", pool, shape.saved) if shape.saved else None
    kept = kept_rows(preact, pool, config)
    score, counters = take(pool, itemsize=4), call.peer_counters(pool)
    call.stage_peers(dy, x if kept is None else None, score, counters)
    x_rows, pull_x = kept, needs.w_gate_up and kept is None
    scaled = take(pool, inter)
    if preact is None:
        x_rows, pull_x = take(pool, hidden), False
        preact = take(pool, 2 * inter)
        extra = call.among_peers(counters.second)
        call.gate_up(Pull(x, x_rows, counters.second), weights, scaled, preact, "gate_up_peers", **extra)
    dy_rows, dz = take(pool, hidden), take(pool, 2 * inter)
    parts = take(pool, math.ceil(inter / TILE_N), itemsize=4)
    extra = call.among_peers(counters.first, pull_grads=1)
    pull = Pull(dy, dy_rows, counters.first)
    call.down_grad(pull, w_down, preact, score, (dz, scaled, parts), "down_grad_peers", **extra)
    if pull_x:
        x_rows = take(pool, hidden)
    dx_rows = take(pool, hidden)
    extra = call.sending(counters, dx_rows) | {"parts": parts.shape[1], "score_parts": parts.data_ptr()}
    later = Pull(x, x_rows, None) if pull_x and x_rows is not None else None
    call.gate_up_grad(later, dz, weights, dx_rows, "gate_up_grad_peers", **extra)
    if needs.w_gate_up or needs.w_down:
        size = 4 if shape.fp32 else 2
        dw_gate_up = gate_up_of(call, shape.pair, "d", size) if needs.w_gate_up else None
        dw_down = Buffer.of("dw_down", call.experts, hidden, inter, itemsize=size) if needs.w_down else None
        call.wgrad((dz, x_rows, dy_rows, scaled), dw_gate_up, dw_down, fp32=shape.fp32)
    dx = Buffer.of("dx", tokens, hidden) if needs.x else None
    dscore = Buffer.of("dscore", tokens, config.topk, itemsize=4) if needs.topk_weights else None
    if dx is not None or dscore is not None:
        call.combine_peers(dx_rows, dx, dscore)
