# SPDX-License-Identifier: Apache-2.0
"""Pictures of result records, 1200 pixels wide; `python benchmarks/render.py --plots` writes those that have records.

Shown is the fused backend as it comes: BF16, uniform routing, no ablation.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import records
from build_tools.tomlfile import read_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Records = list[dict[str, Any]]

HERE = Path(__file__).resolve().parent
WIDTH, DPI, FONT = 1200, 100, 12
OURS, BASELINE, FLOOR, VIRTUAL = "#2b6cb0", "#d64545", "#52606d", "#f08c2e"
COLOURS = {"forward": "#2b6cb0", "backward": "#8e6bbf", "forward+backward": "#2f9e77"}
LAYER_OPS = tuple(COLOURS)


def shown(found: Records) -> Records:
    """Records of the fused layer in its default configuration."""
    wanted = {"backend": "cuda", "precision": "bf16", "routing": "uniform", "save": "preact", "ablation": None}
    wanted |= {"wgrad_dtype": "bfloat16", "reserve_sms": None, "num_sms": None, "main_grad": False}
    return [it for it in found if it["op"] in LAYER_OPS and all(it[name] == value for name, value in wanted.items())]


def floor_ms(record: dict[str, Any]) -> float | None:
    """What an H200 cannot be faster than, as `prime-kernels trace` has it, with even routing; None elsewhere."""
    if record["gpu"] != "NVIDIA H200" or record["ep"] != 1 or record["op"] not in ("forward", "backward"):
        return None
    from prime_kernels import MegaMoEConfig
    from prime_kernels.timeline.floor import floor_of

    sizes, tokens = read_toml(HERE / "shapes.toml")[record["shape"]], record["tokens"]
    config = MegaMoEConfig(**sizes, max_tokens_per_rank=tokens)
    rows, experts = tokens * config.topk, config.num_experts
    counts = [rows // experts + (expert < rows % experts) for expert in range(experts)]
    ops = {"forward": ("gate_up", "down"), "backward": ("down_grad", "gate_up_grad", "wgrad")}[record["op"]]
    return floor_of(record["op"], config, tokens, counts, ops).ms


def grouped(found: Records, *names: str) -> dict[tuple[Any, ...], Records]:
    """Records by the values of these fields, in order of their first one."""
    groups: dict[tuple[Any, ...], Records] = defaultdict(list)
    for record in found:
        groups[tuple(record.get(name) for name in names)].append(record)
    return dict(groups)


def _panels(titles: Iterable[str], height: int = 380) -> tuple[Any, list[Any]]:
    """A figure and one set of axes for each title, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = list(titles)
    columns = min(2, len(texts))
    lines = -(-len(texts) // columns)
    figure = Figure(figsize=(WIDTH / DPI, (lines * height + 60) / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for one, title in zip(axes, texts, strict=False):
        one.set_title(title, fontsize=FONT)
        one.tick_params(labelsize=FONT - 1)
    for one in axes[len(texts) :]:
        one.remove()
    return figure, axes[: len(texts)]


def _line(axes: Any, points: list[tuple[float, float | None]], label: str, **style: Any) -> None:
    """A line through the points that there are."""
    there = sorted((x, y) for x, y in points if y is not None)
    if there:
        axes.plot(*zip(*there, strict=True), marker="o", label=label, **style)


def time_against_tokens(found: Records) -> Any:
    """Figure: ms against T with the floor and the baseline; None with fewer than two T of anything."""
    alone = [it for it in shown(found) if it["ep"] == 1 and "virtual_ranks" not in it]
    groups = {
        key: rows
        for key, rows in grouped(alone, "gpu", "shape", "op").items()
        if len({it["tokens"] for it in rows}) > 1
    }
    if not groups:
        return None
    figure, panels = _panels(f"{shape}, {op}, one {gpu}" for gpu, shape, op in groups)
    for axes, rows in zip(panels, groups.values(), strict=True):
        _line(axes, [(it["tokens"], it["ms"]) for it in rows], "this package", color=OURS)
        _line(axes, [(it["tokens"], it["baseline_ms"]) for it in rows], "unfused recipe", color=BASELINE)
        _line(axes, [(it["tokens"], floor_ms(it)) for it in rows], "floor", color=FLOOR, linestyle="--")
        axes.set(xscale="log", yscale="log")
        ticks = sorted({it["tokens"] for it in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens", fontsize=FONT)
        axes.set_ylabel("ms (median)", fontsize=FONT)
        axes.legend(fontsize=FONT - 1)
    return figure


def rate_of_shapes(found: Records) -> Any:
    """Figure: TFLOP/s of every model shape at its most tokens; None without records of one GPU."""
    alone = [it for it in shown(found) if it["ep"] == 1 and "virtual_ranks" not in it]
    by_gpu = grouped(alone, "gpu")
    if not by_gpu:
        return None
    figure, panels = _panels((f"rate of the layer, one {gpu}" for (gpu,) in by_gpu), height=440)
    for axes, rows in zip(panels, by_gpu.values(), strict=True):
        most = {key: max(same, key=lambda it: it["tokens"]) for key, same in grouped(rows, "shape", "op").items()}
        shapes = list(dict.fromkeys(shape for shape, _ in most))
        ops = [op for op in LAYER_OPS if any(known == op for _, known in most)]
        width = 0.8 / len(ops)
        for number, op in enumerate(ops):
            bars = [(place, most[shape, op]) for place, shape in enumerate(shapes) if (shape, op) in most]
            at = [place + (number - (len(ops) - 1) / 2) * width for place, _ in bars]
            drawn = axes.bar(at, [it["tflops"] for _, it in bars], width, label=op, color=COLOURS[op])
            axes.bar_label(drawn, [f"{it['tflops']:.0f}" for _, it in bars], fontsize=FONT - 1)
        dense = [it["dense_tflops"] for it in most.values() if it["dense_tflops"]]
        if dense:
            axes.axhline(min(dense), color=FLOOR, linestyle="--", label="one dense GEMM in the same run (least)")
        tokens = {shape: max(it["tokens"] for (name, _), it in most.items() if name == shape) for shape in shapes}
        axes.set_xticks(range(len(shapes)), [f"{shape}\nT {tokens[shape]}" for shape in shapes])
        axes.set_ylabel("TFLOP/s of routed rows", fontsize=FONT)
        axes.set_ylim(0, 1.25 * max([*dense, *(it["tflops"] for it in most.values())]))
        axes.legend(fontsize=FONT - 1, ncols=3, loc="upper left")
    return figure


def time_against_ranks(found: Records) -> Any:
    """Figure: ms against R, virtual ranks marked as such; None without records of more than one rank."""
    every = shown(found)
    several = [it for it in every if it["ep"] > 1 or it.get("virtual_ranks", 1) > 1]
    groups = grouped(several, "gpu", "shape", "op", "tokens")
    if not groups:
        return None
    figure, panels = _panels(f"{shape}, {op}, T {tokens} a rank, {gpu}" for gpu, shape, op, tokens in groups)
    for axes, (key, rows) in zip(panels, groups.items(), strict=True):
        one = [it for it in grouped(every, "gpu", "shape", "op", "tokens")[key] if it["ep"] == 1]
        first = [(1, it["ms"]) for it in one if "virtual_ranks" not in it]
        real = [(it["ep"], it["ms"]) for it in rows if "virtual_ranks" not in it]
        _line(axes, first + real if real else [], "GPUs", color=OURS)
        virtual = [it for it in rows if "virtual_ranks" in it]
        # R ranks share one GPU's compute: their links, too, are a part of one.
        links = {round(it["virtual_ranks"] * it.get("pacing_GBs", 0)) for it in virtual}
        for number, link in enumerate(sorted(links)):
            same = [it for it in virtual if round(it["virtual_ranks"] * it.get("pacing_GBs", 0)) == link]
            label = f"virtual ranks of one GPU, {f'{link} / R GB/s each' if link else 'no pace'}"
            style = {"color": VIRTUAL, "linestyle": ("--", ":", "-.")[number % 3], "markerfacecolor": "white"}
            _line(axes, [(it["virtual_ranks"], it["ms"]) for it in same], label, **style)
        at_once = [(it["virtual_ranks"], it.get("one_rank_ms")) for it in virtual]
        _line(axes, at_once, "one rank with all their tokens", color=FLOOR, linewidth=1)
        ticks = sorted({1} | {it.get("virtual_ranks", it["ep"]) for it in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("ranks", fontsize=FONT)
        axes.set_ylabel("ms (median)", fontsize=FONT)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=FONT - 1)
    return figure


def speedups(found: Records) -> list[tuple[str, str, str, float]]:
    """(system, shape with its ranks, op, its time / ours) of every figure of anchors.toml that has a record."""
    anchors = read_toml(HERE / "anchors.toml")
    own = {
        (it["shape"], it["ep"], it["op"]): it["ms"]
        for it in shown(found)
        if it["gpu"] == anchors["gpu"] and it["tokens"] == anchors["tokens"] and "virtual_ranks" not in it
    }
    rows = []
    for system in anchors["system"]:
        for op in ("forward", "backward"):
            ms = own.get((system["shape"], system["ep"], op))
            if ms is not None and f"{op}_ms" in system:
                ranks = f"{system['ep']} GPU" + ("s" if system["ep"] > 1 else "")
                rows.append((system["name"], f"{system['shape']}, {ranks}", op, system[f"{op}_ms"] / ms))
    return rows


def speedup_of_systems(found: Records) -> Any:
    """Figure: times of public systems over this package's; None without a record that any of them can stand beside."""
    rows = speedups(found)
    if not rows:
        return None
    anchors = read_toml(HERE / "anchors.toml")
    layers = list(dict.fromkeys(layer for _, layer, _, _ in rows))
    figure, panels = _panels(layers, height=420)
    for axes, layer in zip(panels, layers, strict=True):
        mine = [(system, op, factor) for system, place, op, factor in rows if place == layer]
        systems = sorted({system for system, _, _ in mine})
        for number, op in enumerate(("forward", "backward")):
            bars = [(systems.index(system), factor) for system, its, factor in mine if its == op]
            at = [place + (number - 0.5) * 0.38 for place, _ in bars]
            drawn = axes.barh(at, [factor for _, factor in bars], 0.36, color=COLOURS[op], label=op)
            axes.bar_label(drawn, [f" {factor:.2f}" for _, factor in bars], fontsize=FONT - 1)
        axes.set_yticks(range(len(systems)), [system.replace(" (", "\n(") for system in systems])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xlabel("time of the other / of this package", fontsize=FONT)
        axes.set_xlim(0, 1.18 * max(factor for *_, factor in mine))
        axes.legend(fontsize=FONT - 1)
    note = f"Others in runs of their own, not beside these:\n{anchors['source']}"
    figure.supxlabel(note, fontsize=FONT - 2)
    return figure


PLOTS: dict[str, Callable[[Records], Any]] = {
    "time-tokens": time_against_tokens,
    "tflops": rate_of_shapes,
    "time-ranks": time_against_ranks,
    "speedup": speedup_of_systems,
}


def write(found: Records, folder: Path) -> list[Path]:
    """Draw what there are records for.

    Args:
        found: The newest record of every configuration.
        folder: Where to; made if there is anything to draw.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed (extra "plot").
    """
    made = []
    for name, make in PLOTS.items():
        figure = make(sorted(found, key=lambda it: records.OPS.index(it["op"])))
        if figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # Without the version of matplotlib, so that the same records give the same file.
            figure.savefig(folder / f"{name}.png", dpi=DPI, metadata={"Software": None})
            made.append(folder / f"{name}.png")
    return made
