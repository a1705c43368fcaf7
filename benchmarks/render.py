# SPDX-License-Identifier: Apache-2.0
"""Turn result records into benchmarks/RESULTS.md and the table of the README: `python benchmarks/render.py`.

`--check` writes nothing and fails when a file is not what the records say. `--plots` draws what there are records for.
Numbers in those places come from here and from nowhere else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402  (after the path of the package)

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
README = ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
MAX_SPREAD = 0.05
EMPTY = "no measurement recorded yet"
# What makes two records measurements of the same thing; the newer one counts.
SAME = (
    "gpu", "op", "shape", "ep", "virtual_ranks", "pacing_GBs", "tokens", "precision", "routing", "save", "backend",
    "engine", "ablation", "main_grad", "wgrad_dtype", "reserve_sms", "num_sms", "arm", "documents",
)  # fmt: skip
CAVEATS = """\
## Where these numbers stop meaning anything

- Times compare within one row's run only: clocks, power limits and drivers differ between runs.
- `ratio` is baseline / ms. It is there only if the baseline of that run is within 10 % of the anchor in
  [anchors.toml](anchors.toml) for this shape; the baseline is the unfused recipe described in
  [baselines.py](baselines.py).
- On one GPU the recipe runs as it is written, and sends its rows to itself; "local" is the time of the same recipe
  without that exchange. `ratio` refers to the former.
- Routing is synthetic. A router in training is less even, and a layer that waits for its fullest rank shows it.
- "% of dense" is the layer's rate over that of one 8192 x 8192 x 8192 bf16 GEMM in the same run, not over a data sheet.
- Rows marked "not a ranking" spread by more than 5 % between the 10th and 90th percentile.
- `sustained` is the mean over seconds without a pause: what a training step sees once the chip is warm. The median is
  of single calls with pauses between them.
- `peak` is memory that torch allocated during one call, without inputs and weights.
"""


def newest(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The latest record of every configuration, in a stable order."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(found, key=lambda record: str(record["time"])):
        latest[tuple(record.get(name) for name in SAME)] = record
    return sorted(latest.values(), key=_order)


def _order(record: dict[str, Any]) -> tuple[Any, ...]:
    ops = records.OPS.index(record["op"])
    return record["gpu"], record["shape"], record["ep"], record["tokens"], ops, str(record["time"])


def spread(record: dict[str, Any]) -> float:
    """(p90 - p10) / median."""
    return float((record["p90"] - record["p10"]) / record["ms"])


def results_table(found: list[dict[str, Any]]) -> str:
    """One row for each record."""
    head = (
        "| shape | op | ep | tokens | routing | backend | ms (p10-p90) | unfused ms | ratio | TFLOP/s (% of dense) "
        "| sustained ms | MHz, W | worst rel. error | peak MiB | commit |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for record in found:
        dense = record["dense_tflops"]
        share = f" ({record['tflops'] / dense:.0%})" if dense else ""
        note = " not a ranking" if spread(record) > MAX_SPREAD else ""
        cells = [
            record["shape"],
            record["op"],
            str(record["ep"]) + (f" ({record['virtual_ranks']} virtual)" if "virtual_ranks" in record else ""),
            str(record["tokens"]),
            record["routing"],
            "-".join(str(part) for part in (record["backend"], record["precision"], record["ablation"]) if part),
            f"{record['ms']:.3f} ({record['p10']:.3f}-{record['p90']:.3f}){note}",
            _unfused(record),
            _number(record["ratio"], ".2f"),
            f"{record['tflops']:.0f}{share}",
            _number(record["sustained_ms"], ".3f"),
            f"{_number(record['clock_mhz'], '.0f')}, {_number(record['power_w'], '.0f')}",
            _number(max(record["rel_err"].values(), default=None), ".1e"),
            _number(record["peak_mib"], ".0f"),
            record["commit"][:12] + (" dirty" if record["dirty"] else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results_page(found: list[dict[str, Any]]) -> str:
    """All of RESULTS.md."""
    parts = ["<!-- SPDX-License-Identifier: Apache-2.0 -->", "# Results", ""]
    parts += ["Rendered by `python benchmarks/render.py` from the records below `results/`; do not edit.", ""]
    latest = newest(found)
    if not latest:
        parts += [EMPTY, ""]
    for gpu in dict.fromkeys(record["gpu"] for record in latest):
        mine = [record for record in latest if record["gpu"] == gpu]
        stacks = sorted({f"torch {record['torch']}, driver {record['driver']}" for record in mine})
        parts += [f"## {gpu}", "", "; ".join(stacks) + ".", "", results_table(mine), ""]
    return "\n".join(parts) + "\n" + CAVEATS


def readme_table(found: list[dict[str, Any]]) -> str:
    """The README's short table: the fused backend in its default configuration, uniform routing, most tokens."""
    chosen = [
        record
        for record in newest(found)
        if record["backend"] == "cuda"
        and record["op"] in ("forward", "backward")
        and record["routing"] == "uniform"
        and record["ablation"] is None
        and "virtual_ranks" not in record
    ]
    if not chosen:
        return EMPTY
    most = max(record["tokens"] for record in chosen)
    columns = (
        "GPU",
        "layer",
        "direction",
        "GPUs",
        "precision",
        "fused",
        "unfused",
        "ratio",
        "no exchange",
        "`grouped`",
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for record in chosen:
        if record["tokens"] == most:
            cells = (record["gpu"], record["shape"], record["op"], record["ep"], record["precision"])
            others = (record.get("local_baseline_ms"), record.get("grouped_ms"))
            values = (record["ms"], record["baseline_ms"], record["ratio"], *others)
            times = [_number(value, ".2f") for value in values]
            lines.append("| " + " | ".join(map(str, (*cells, *times))) + " |")
    lines += [
        "",
        f"{most} tokens per GPU, uniform routing; medians, ms. `ratio` refers to the unfused recipe as it is "
        'written, which on one GPU sends rows to itself; "no exchange" is the recipe without that, to compare with '
        "when one GPU is all there is. "
        "`grouped` is this package's own unfused backend. All rows and their caveats: benchmarks/RESULTS.md.",
    ]
    return "\n".join(lines)


def replace_between(text: str, begin: str, end: str, inner: str) -> str:
    """The text with what lies between two marker lines replaced.

    Raises:
        ValueError: the markers are not there once each, in this order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"need {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{inner}\n{end}{rest.split(end)[1]}"


def _unfused(record: dict[str, Any]) -> str:
    """The baseline's time, and on one GPU what it takes without its exchange."""
    local = record.get("local_baseline_ms")
    return _number(record["baseline_ms"], ".2f") + ("" if local is None else f" ({local:.2f} local)")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(argv: list[str] | None = None) -> int:
    """Write or check the rendered files; exit status 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="render.py", description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plots", type=Path, nargs="?", const=IMAGES, metavar="FOLDER", help="draw; docs/images")
    args = parser.parse_args(argv)
    found = records.read_records(args.results)
    wanted = {
        RESULTS: results_page(found),
        README: replace_between(README.read_text(), BEGIN, END, readme_table(found)),
    }
    different = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    for path in different:
        print(f"{path.relative_to(ROOT)} {'differs from the records' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path])
    if args.plots is not None:
        from benchmarks import plots  # needs the extra "plot"

        for path in plots.write(newest(found), args.plots):
            print(f"{path} written")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
