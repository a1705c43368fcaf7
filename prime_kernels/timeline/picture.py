# SPDX-License-Identifier: Apache-2.0
"""A traced pass as a picture: every SM over time, rank below rank, and below it what the chip did as curves.

An SM has two bands: the upper, larger one says what its tensor cores did or what kept them, the lower one what its
loading and copying warps did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from prime_kernels.timeline import records as rec
from prime_kernels.timeline.states import HELPERS, MULTIPLY, STATES, copied_bytes, remote_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from prime_kernels.timeline.call import Launch, Pass

WIDTH, HEIGHT, DPI = 1200, 1000, 100
BINS = 1000
# Colours of STATES and HELPERS: math in blue and violet, transport in green, what is lost in red, yellow and grey.
COLOURS = {
    "multiply": "#2b6cb0",
    "peers": "#7a1f1f",
    "epilogue": "#8e6bbf",
    "activations": "#c58fd6",
    "operands": "#d64545",
    "rows": "#f08c2e",
    "tile list": "#e6c229",
    "start": "#9aa5b1",
    "sending": "#1f9fb0",
    "last peer": "#c2185b",
    "tail": "#52606d",
    "no rows": "#cbd2d9",
    "other": "#000000",
}
HELPER_COLOURS = {
    "waits for a peer": "#d81b60",
    "waits for rows": "#8b1e3f",
    "copies": "#2f9e77",
    "sends": "#0b7285",
    "waits for a free stage": "#d9e8d9",
    "idle": "#ffffff",
}
LABELS = {
    "multiply": "math: multiplies",
    "peers": "math: a peer is not ready",
    "epilogue": "math: both in the epilogue",
    "activations": "math: waits for activations",
    "operands": "math: waits for operands",
    "rows": "math: waits for copied rows",
    "tile list": "math: waits for a tile",
    "start": "not started",
    "sending": "done, sends rows",
    "last peer": "done, a peer is not",
    "tail": "done",
    "no rows": "no rows",
    "other": "not recorded",
}
HELPER_LABELS = {
    "waits for a peer": "copy: waits for a peer",
    "waits for rows": "schedule, load: wait for rows",
    "copies": "copy: moves rows",
    "sends": "copy: sends rows",
    "waits for a free stage": "load: waits for a free stage",
}

AMONG_PEERS = ("peers", "sending", "last peer", "waits for a peer", "sends")  # what one rank never does


def _rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def _rows_of(launch: Launch, call: Pass) -> Tensor:
    """[CTAs] row of the picture: CTAs of a rank in order of their SM, rank after rank."""
    assert launch.timeline is not None
    share = call.sms // call.ranks
    order = torch.argsort(launch.timeline.sm)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order))
    return rows.clamp(max=share - 1) + launch.rank * share


def raster(call: Pass, edges: Tensor, band: int) -> Tensor:
    """[SMs * band, bins, 3] uint8: the longest state of every SM in every bin; white where no launch has records.

    Args:
        call: The pass.
        edges: [bins + 1] ns since the first launch with records began.
        band: Lines of pixels of an SM; the last quarter, at least one, shows the helpers.
    """
    bins = len(edges) - 1
    image = torch.full((call.sms, band, bins, 3), 255, dtype=torch.uint8)
    math = torch.tensor([_rgb(COLOURS[name]) for name in STATES], dtype=torch.uint8)
    helpers = torch.tensor([_rgb(HELPER_COLOURS[name]) for name in HELPERS], dtype=torch.uint8)
    lower = max(1, band // 4)
    for launch, offset in zip(call.launches, call.start_ns(), strict=True):
        sweep = launch.sweep
        if sweep is None or offset is None:
            continue
        rows = _rows_of(launch, call)
        local = edges - offset
        for which, colours, place in (
            (sweep.state, math, slice(0, band - lower)),
            (sweep.helper, helpers, slice(band - lower, band)),
        ):
            times = torch.stack([sweep.binned(which, index, local) for index in range(len(colours))])
            inside = times.sum(0) * 2 > (edges[1:] - edges[:-1])[None, :]  # bins that are mostly of this launch
            chosen = colours[times.argmax(0)]
            part = image[rows, place]
            image[rows, place] = torch.where(inside[:, None, :, None], chosen[:, None], part)
    return image.view(call.sms * band, bins, 3)


def curves(call: Pass, edges: Tensor) -> tuple[Tensor, Tensor]:
    """[bins] per cent of the SMs whose tensor cores multiply, and [bins] GB/s that the copying warps move.

    Args:
        call: The pass.
        edges: [bins + 1] ns since the first launch with records began.
    """
    width = (edges[1:] - edges[:-1]).double()
    busy = torch.zeros(len(width), dtype=torch.float64)
    moved = torch.zeros_like(busy)
    for launch, offset in zip(call.launches, call.start_ns(), strict=True):
        if launch.timeline is None or launch.sweep is None or offset is None:
            continue
        busy += launch.sweep.binned(launch.sweep.state, MULTIPLY, edges - offset).sum(0).double()
        moved += copied_bytes(launch.timeline, 2 * call.config.hidden, edges - offset)
    return busy / (width * call.sms) * 100, moved / width


def transport(call: Pass, edges: Tensor) -> tuple[Tensor, Tensor]:
    """[bins] GB/s that ranks pull from one another, and that they send.

    Args:
        call: The pass.
        edges: [bins + 1] ns since the first launch with records began.
    """
    moved = torch.zeros(2, len(edges) - 1, dtype=torch.float64)
    for launch, offset in zip(call.launches, call.start_ns(), strict=True):
        if launch.timeline is not None and offset is not None:
            for row, event in zip(moved, (rec.COPY, rec.PUSH), strict=True):
                row += remote_bytes(launch.timeline, event, 2 * call.config.hidden, edges - offset)
    pulled, pushed = moved / (edges[1:] - edges[:-1]).double()
    return pulled, pushed


def _span(call: Pass) -> int:
    ends = [
        offset + launch.timeline.span_ns
        for launch, offset in zip(call.launches, call.start_ns(), strict=True)
        if launch.timeline is not None and offset is not None
    ]
    return max(ends)


def _legend(axes: Any, patch: Any, call: Pass) -> None:
    alone = call.ranks == 1
    entries = [
        patch(color=colours[name], label=label)
        for labels, colours in ((LABELS, COLOURS), (HELPER_LABELS, HELPER_COLOURS))
        for name, label in labels.items()
        if not (alone and name in AMONG_PEERS)
    ]
    axes.legend(handles=entries, ncols=5, loc="lower left", bbox_to_anchor=(-0.01, 1.035), fontsize=8, frameon=False)


def draw(path: Path, call: Pass, title: str) -> Path | None:
    """Write the picture, 1200 pixels wide.

    Args:
        path: File to write, a PNG; its folder exists.
        call: The pass.
        title: Its heading.

    Returns:
        The path written; None where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        return None
    span = _span(call)
    edges = torch.linspace(0, span, BINS + 1, dtype=torch.float64).to(torch.int64)
    band = max(4, 528 // call.sms)
    busy, moved = curves(call, edges)
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
    FigureCanvasAgg(figure)
    top = figure.add_axes((0.07, 0.32, 0.86, 0.528))
    low = figure.add_axes((0.07, 0.06, 0.86, 0.21), sharex=top)
    figure.suptitle(title, fontsize=12, x=0.07, ha="left", y=0.985)
    image = raster(call, edges, band).numpy()
    top.imshow(image, aspect="auto", interpolation="nearest", extent=(0, span / 1000, call.sms, 0))
    top.set_ylabel("SM" if call.ranks == 1 else f"SMs of {call.ranks} virtual ranks")
    top.tick_params(labelbottom=False)
    _legend(top, Patch, call)
    middles = ((edges[1:] + edges[:-1]) / 2000).numpy()
    low.plot(middles, busy.numpy(), color=COLOURS["multiply"], linewidth=1, label="tensor cores busy, % of SMs")
    low.set(xlabel="us", ylabel="% of SMs", ylim=(0, 105), xlim=(0, span / 1000))
    right = low.twinx()
    if call.ranks == 1:
        lines = {"rows copied, GB/s read + written": (moved, HELPER_COLOURS["copies"])}
    else:
        pulled, pushed = transport(call, edges)
        lines = {
            "pulled from peers, GB/s of all ranks": (pulled, HELPER_COLOURS["copies"]),
            "sent to peers, GB/s of all ranks": (pushed, COLOURS["rows"]),
        }
    for label, (values, colour) in lines.items():
        right.plot(middles, values.numpy(), color=colour, linewidth=1, label=label)
    most = max(float(values.max()) for values, _ in lines.values())
    right.set(ylabel="GB/s", ylim=(0, max(1.0, most * 1.15)))
    handles = [*low.get_lines(), *right.get_lines()]
    low.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False)
    _mark_launches(top, low, call)
    figure.savefig(path, dpi=DPI)
    return path


def _mark_launches(top: Any, low: Any, call: Pass) -> None:
    """A line where each launch begins, over the rows of its rank; names of the first rank's; a line between ranks."""
    share = call.sms // call.ranks
    for rank in range(call.ranks):
        if rank:
            top.axhline(rank * share, color="black", linewidth=1.2)
        if call.ranks > 1:
            place = (1.005, 1 - (rank + 0.5) / call.ranks)
            top.annotate(f"rank {rank}", place, xycoords="axes fraction", rotation=90, va="center", fontsize=9)
    for launch, offset in zip(call.launches, call.start_ns(), strict=True):
        if launch.timeline is None or offset is None:
            continue
        upper = launch.rank * share
        top.vlines(offset / 1000, upper, upper + share, color="black", linewidth=0.8)
        if launch.rank == 0:
            low.axvline(offset / 1000, color="black", linewidth=0.8)
            note = f"{launch.name} {launch.timeline.span_ns * 1e-6:.2f} ms"
            top.annotate(note, (offset / 1000, 0), xytext=(2, 3), textcoords="offset points", fontsize=9)
