# SPDX-License-Identifier: Apache-2.0
"""The lab's records as one Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEAD = (
    "kernel", "shape", "ms", "TFLOP/s", "ms apart", "ms beside a copy", "_grouped_mm ms", "its TFLOP/s", "sustained ms",
    "sustained TFLOP/s", "MHz, W", "clusters", "worst rel. error",
)  # fmt: skip
CAPTION = """\
Kernels: tile type, form (i: own epilogue; ii: 128 x 192, parked; iii: 128 x 256 as two n = 128, parked), CTAs of a
cluster. ms: the faster of both starts, together and with the second warpgroup two steps later ("apart": the latter).
Beside a copy: of 0.4 TB/s by two warps of every CTA. Sustained: mean over seconds without a pause, with median clock
and power of that time. TFLOP/s count real rows. `_grouped_mm` is torch's plain product, without what follows it."""


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def cells(record: dict[str, Any]) -> list[str]:
    """One row; a case without times has its error instead."""
    name = [record["case"], record["shape"]]
    if "error" in record:
        return [*name, f"**{record['error']}**".replace("|", "/"), *[""] * (len(HEAD) - 3)]
    ms = min(record["ms_stagger0"], record["ms_stagger1"])
    errors = [*record["rel_err"].values(), *record["rel_err_after"].values()]
    return [
        *name,
        f"{ms:.3f}",
        f"{record['tflops']:.0f}",
        f"{record['ms_stagger1']:.3f}",
        f"{record['ms_copy_0.4TBs']:.3f}",
        f"{record['peer_ms']:.3f}",
        f"{record['tflops_peer']:.0f}",
        f"{record['ms_sustained']:.3f}",
        f"{record['tflops_sustained']:.0f}",
        f"{_number(record.get('clock_mhz'))}, {_number(record.get('power_w'))}",
        str(record["max_clusters"]),
        f"{max(errors):.1e}",
    ]


def render(records: Sequence[dict[str, Any]]) -> str:
    """All rows in their order, under what was measured where."""
    places = dict.fromkeys(_place(record) for record in records if "gpu" in record)
    lines = [*places, *([""] if places else [])]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(record)) + " |" for record in records]
    return "\n".join([*lines, "", CAPTION])


def _place(record: dict[str, Any]) -> str:
    commit = (record["commit"] or "unknown commit")[:12] + (" dirty" if record["dirty"] else "")
    return f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, {commit}, {record['time'][:10]}."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
