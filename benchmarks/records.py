# SPDX-License-Identifier: Apache-2.0
"""Result records: their schema, when a ratio may be in one, and the files they are appended to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NUMBER = (int, float)
# Field -> types it may have. None of them may be missing.
FIELDS: dict[str, tuple[type, ...]] = {
    "op": (str,),
    "shape": (str,),
    "ep": (int,),
    "tokens": (int,),
    "precision": (str,),
    "routing": (str,),
    "save": (str,),
    "ms": NUMBER,
    "p10": NUMBER,
    "p90": NUMBER,
    "baseline": (str, type(None)),
    "baseline_ms": (*NUMBER, type(None)),
    "ratio": (*NUMBER, type(None)),
    "tflops": NUMBER,
    "rel_err": (dict,),
    "peak_mib": (*NUMBER, type(None)),
    "gpu": (str,),
    "driver": (str, type(None)),
    "torch": (str,),
    "cubin": (str, type(None)),
    "commit": (str,),
    "dirty": (bool,),
    "n": (int,),
    "time": (str,),
    "backend": (str, type(None)),
    "engine": (str, type(None)),
    "ablation": (str, type(None)),
    "main_grad": (bool,),
    "wgrad_dtype": (str,),
    "reserve_sms": (int, type(None)),
    "num_sms": (int, type(None)),
    "host_us": NUMBER,
    "clock_mhz": (*NUMBER, type(None)),
    "power_w": (*NUMBER, type(None)),
    "sustained_ms": (*NUMBER, type(None)),
    "dense_tflops": (*NUMBER, type(None)),
}
OPTIONAL: dict[str, tuple[type, ...]] = {
    "virtual_ranks": (int,),
    "pacing_GBs": NUMBER,
    "one_rank_ms": NUMBER,
    "remote_bytes": (int,),
    "grouped_ms": NUMBER,
    "local_baseline_ms": NUMBER,
    "arm": (str,),
    "documents": (str,),
    "stock": (str,),
    "moe_share": NUMBER,
    "identity_ms": NUMBER,
}
OPS = ("forward", "backward", "forward+backward", "step")


def schema_problems(record: dict[str, Any]) -> list[str]:
    """What keeps a record from being one; empty when it is fine."""
    known = FIELDS | OPTIONAL
    problems = [f"{name} is missing" for name in FIELDS if name not in record]
    problems += [f"{name} is not a field" for name in record if name not in known]
    for name, value in record.items():
        types = known.get(name, (object,))
        # bool is an int to Python and not to a reader of the file.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types and object not in types):
            problems.append(f"{name} is {value!r}; need {' or '.join(kind.__name__ for kind in types)}")
    if record.get("op") not in OPS:
        problems.append(f"op is {record.get('op')!r}; need one of {', '.join(OPS)}")
    if record.get("ratio") is not None and record.get("baseline_ms") is None:
        problems.append("ratio without baseline_ms")
    return problems


def anchor_ms(anchors: dict[str, Any], *, shape: str, ep: int, op: str, tokens: int) -> float | None:
    """The anchor's time for this configuration, None where there is none."""
    if tokens != anchors["tokens"] or op not in ("forward", "backward", "forward+backward"):
        return None
    for anchor in anchors["anchor"]:
        if anchor["shape"] == shape and anchor["ep"] == ep:
            return float(sum(anchor[f"{part}_ms"] for part in op.split("+")))
    return None


def ratio_problem(
    anchors: dict[str, Any], *, shape: str, ep: int, op: str, tokens: int, routing: str, baseline_ms: float
) -> str | None:
    """Why no ratio may be recorded against this baseline; None when it may."""
    if routing != "uniform":
        return f"anchors exist for uniform routing, not {routing}"
    anchor = anchor_ms(anchors, shape=shape, ep=ep, op=op, tokens=tokens)
    if anchor is None:
        return f"no anchor for {op} of {shape} at ep {ep} and {tokens} tokens"
    off = baseline_ms / anchor - 1.0
    if abs(off) <= anchors["tolerance"]:
        return None
    meaning = (
        "faster than when the targets were set, so the anchor does not describe this machine and its torch; set it anew"
        if off < 0
        else "a slower baseline would flatter the ratio"
    )
    return f"baseline took {baseline_ms:.2f} ms, {off:+.0%} from its anchor {anchor:.2f} ms ({meaning})"


def results_path(folder: Path, record: dict[str, Any]) -> Path:
    """<folder>/<gpu-name>/<date>-<sha>.jsonl."""
    gpu = re.sub(r"[^a-z0-9]+", "-", record["gpu"].lower()).strip("-")
    return folder / gpu / f"{record['time'][:10]}-{record['commit'][:12]}.jsonl"


def append_record(folder: Path, record: dict[str, Any]) -> Path:
    """Check and append; returns the file.

    Raises:
        ValueError: the record does not fit the schema.
    """
    problems = schema_problems(record)
    if problems:
        raise ValueError("; ".join(problems))
    path = results_path(folder, record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return path


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records below a folder, oldest file first."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("*/*.jsonl"))
        for line in path.read_text().splitlines()
        if line.strip()
    ]
