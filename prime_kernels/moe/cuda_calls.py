# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the cuda backend as launches that are prepared once per shape of a call.

What a call launches depends on its shapes and on what is asked for; only addresses differ between two such calls. So
every thread keeps the prepared launches of the shapes it has seen, and a call allocates, writes addresses and launches.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from prime_kernels.loader.prepared import Prepared
from prime_kernels.moe.cuda_buffers import Buffer
from prime_kernels.moe.cuda_launch import Recorder
from prime_kernels.moe.cuda_variants import TILE_N, Pull, kept_rows, pool_rows, preact_shape
from prime_kernels.moe.streams import current_stream

if TYPE_CHECKING:
    from prime_kernels.moe.backend import Needs
    from prime_kernels.moe.config import MegaMoEConfig

_MOST_SHAPES = 256  # per thread and runtime; one takes some 30 KB


class ForwardShape(NamedTuple):
    """What the launches of a forward depend on."""

    tokens: int
    save: str
    pair: bool
    wide_ids: bool


class BackwardShape(NamedTuple):
    """What the launches of a backward depend on; `saved` is the width of preact, 0 without."""

    tokens: int
    saved: int
    pair: bool
    needs: Needs
    fp32: bool


class ForwardAddresses(NamedTuple):
    """Addresses of a forward; 0 where there is no such tensor."""

    x: int
    topk_ids: int
    topk_weights: int
    w_gate_up: int
    w_up: int
    w_down: int
    y: int
    plan: int
    sent: int
    received: int
    preact: int
    work: int


class BackwardAddresses(NamedTuple):
    """Addresses of a backward; 0 where there is no such tensor."""

    dy: int
    x: int
    topk_weights: int
    w_gate_up: int
    w_up: int
    w_down: int
    plan: int
    preact: int
    dx: int
    dscore: int
    dw_gate_up: int
    dw_up: int
    dw_down: int
    work: int


class PreparedCall:
    """The launches of every call of one shape, in one thread.

    Attributes:
        work_bytes: Size of the temporaries.
        plan_numel: Length of the plan that a forward makes.
        preact_shape: What a forward keeps; None for nothing.
    """

    def __init__(self, recorder: Recorder, slots: tuple[str, ...], save: str = "inputs") -> None:
        self.work_bytes = recorder.work.bytes
        self.plan_numel = recorder.plan_numel
        sizes = recorder.config, recorder.tokens, save, recorder.ep_size
        self.preact_shape = None if save == "inputs" else preact_shape(*sizes)
        self._prepared = Prepared(recorder.steps, slots)

    def launch(self, device: torch.device, addresses: ForwardAddresses | BackwardAddresses) -> None:
        """Launch on the current stream of this device, which need not be the current one."""
        if device.index is None or device.index == torch.cuda.current_device():
            self._prepared.launch(current_stream(device), addresses)
        else:
            with torch.cuda.device(device):
                self._prepared.launch(current_stream(device), addresses)


class Calls(threading.local):
    """Prepared calls of one runtime. Every thread sees its own, since a launch writes into them."""

    def __init__(self, config: MegaMoEConfig, index: int, fault: int) -> None:
        self._config, self._index, self._fault = config, index, fault
        self._known: dict[ForwardShape | BackwardShape, PreparedCall] = {}

    def of(self, shape: ForwardShape | BackwardShape) -> PreparedCall:
        """The launches of this shape."""
        known = self._known.get(shape)
        return known if known is not None else self._prepare(shape)

    def _prepare(self, shape: ForwardShape | BackwardShape) -> PreparedCall:
        made = self._make(shape)
        while len(self._known) >= _MOST_SHAPES:
            del self._known[next(iter(self._known))]
        self._known[shape] = made
        return made

    def _make(self, shape: ForwardShape | BackwardShape) -> PreparedCall:
        recorder = Recorder(self._config, self._index, self._fault, shape.tokens, Buffer.of("plan"))
        if isinstance(shape, ForwardShape):
            record_forward(recorder, shape)
            return PreparedCall(recorder, ForwardAddresses._fields, shape.save)
        record_backward(recorder, shape)
        return PreparedCall(recorder, BackwardAddresses._fields)


def gate_up_of(call: Recorder, pair: bool, prefix: str, itemsize: int = 2) -> Buffer | tuple[Buffer, Buffer]:
    """[E_l, 2I, H], or gate and up [E_l, I, H]: weights or their gradients."""
    experts, inter, hidden = call.experts, call.config.intermediate, call.config.hidden
    first, second = f"{prefix}w_gate_up", f"{prefix}w_up"
    if not pair:
        return Buffer.of(first, experts, 2 * inter, hidden, itemsize=itemsize)
    size = (experts, inter, hidden)
    return Buffer.of(first, *size, itemsize=itemsize), Buffer.of(second, *size, itemsize=itemsize)


def record_forward(call: Recorder, shape: ForwardShape) -> None:
    """plan, gate_up (pulls rows of x), down, combine."""
    config, tokens, take = call.config, shape.tokens, call.work.take
    experts, hidden, inter = config.num_experts, config.hidden, config.intermediate
    pool = pool_rows(config, tokens)
    x, y = Buffer.of("x", tokens, hidden), Buffer.of("y", tokens, hidden)
    ids = Buffer.of("topk_ids", tokens, config.topk, itemsize=8 if shape.wide_ids else 4)
    weights = Buffer.of("topk_weights", tokens, config.topk, itemsize=4)
    counts = Buffer.of("sent", experts, itemsize=4), Buffer.of("received", experts, itemsize=4)
    preact = None if shape.save == "inputs" else Buffer.of("preact", *preact_shape(config, tokens, shape.save))
    kept = kept_rows(preact, pool, config)
    score, counters = take(pool, itemsize=4), call.counters(pool, 1)
    x_rows = take(pool, hidden) if kept is None else kept
    h, y_rows = take(pool, inter), take(pool, hidden)
    call.make_plan(ids, weights, counts, score, counters)
    call.gate_up(Pull(x, x_rows, counters.row(0)), gate_up_of(call, shape.pair, ""), h, preact)
    call.down(h, Buffer.of("w_down", experts, hidden, inter), score, y_rows)
    call.combine(y_rows, y)


def record_backward(call: Recorder, shape: BackwardShape) -> None:
    """prepare, gate_up if z was not kept, down_grad (pulls dy), gate_up_grad (pulls x unless kept), wgrad, combine."""
    config, tokens, needs, take = call.config, shape.tokens, shape.needs, call.work.take
    experts, hidden, inter = config.num_experts, config.hidden, config.intermediate
    pool = pool_rows(config, tokens)
    dy, x = Buffer.of("dy", tokens, hidden), Buffer.of("x", tokens, hidden)
    weights, w_down = gate_up_of(call, shape.pair, ""), Buffer.of("w_down", experts, hidden, inter)
    preact = Buffer.of("preact", pool, shape.saved) if shape.saved else None
    x_rows: Buffer | None = kept_rows(preact, pool, config)
    score, counters = take(pool, itemsize=4), call.counters(pool, 2)
    call.prepare(Buffer.of("topk_weights", tokens, config.topk, itemsize=4), score, counters)
    wants_rows = needs.w_gate_up and x_rows is None  # of x, by the weight gradient
    scaled = take(pool, inter)
    if preact is None:
        x_rows, wants_rows = take(pool, hidden), False
        preact = take(pool, 2 * inter)
        call.gate_up(Pull(x, x_rows, counters.row(1)), weights, scaled, preact)
    dy_rows, dz = take(pool, hidden), take(pool, 2 * inter)
    parts = take(pool, math.ceil(inter / TILE_N), itemsize=4)
    call.down_grad(Pull(dy, dy_rows, counters.row(0)), w_down, preact, score, (dz, scaled, parts))
    if wants_rows:
        x_rows = take(pool, hidden)
    dx = dscore = dx_rows = None
    if needs.x:
        dx_rows, dx = take(pool, hidden), Buffer.of("dx", tokens, hidden)
        pull = Pull(x, x_rows, None) if wants_rows and x_rows is not None else None
        call.gate_up_grad(pull, dz, weights, dx_rows)
    elif wants_rows and x_rows is not None:
        call.gather(x, x_rows)
    if needs.w_gate_up or needs.w_down:
        size = 4 if shape.fp32 else 2
        dw_gate_up = gate_up_of(call, shape.pair, "d", size) if needs.w_gate_up else None
        dw_down = Buffer.of("dw_down", experts, hidden, inter, itemsize=size) if needs.w_down else None
        call.wgrad((dz, x_rows, dy_rows, scaled), dw_gate_up, dw_down, fp32=shape.fp32)
    if needs.topk_weights:
        dscore = Buffer.of("dscore", tokens, config.topk, itemsize=4)
    if needs.x or needs.topk_weights:
        call.combine(dx_rows, dx, parts, dscore)
