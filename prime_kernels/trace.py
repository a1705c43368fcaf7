# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels trace`: what every SM does during one pass of a layer, and where its time goes.

Writes, for each direction, a trace that ui.perfetto.dev opens, a picture, and a summary that splits the distance to the
floor into causes. The kernels that record are builds of their own (keys ending in "|profile"); the normal ones carry
nothing of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from prime_kernels.devices import choose_device
from prime_kernels.errors import BackendUnavailable, UnsupportedConfig
from prime_kernels.moe.config import MegaMoEConfig
from prime_kernels.peers.arena import MAX_PEERS
from prime_kernels.timeline import call as calls
from prime_kernels.timeline import perfetto, picture, summary

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from prime_kernels.timeline.call import Pass

# Hidden, intermediate, experts, top-k; benchmarks/shapes.toml has the same.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}
NO_PICTURE = "not drawn: matplotlib is not installed (pip install 'prime-kernels[plot]')"


def layer(shape: str | None, tokens: int) -> MegaMoEConfig:
    """The layer that `--shape` names.

    Args:
        shape: A name of `SHAPES`, or hidden, intermediate, experts and top-k as in "2048x768x128x8".
        tokens: T.

    Raises:
        UnsupportedConfig: It is neither, or sizes that no layer has (E41).
    """
    if shape in SHAPES:
        sizes: tuple[int, ...] = SHAPES[shape]
    elif shape is not None and re.fullmatch(r"\d{1,7}(x\d{1,7}){3}", shape):
        sizes = tuple(int(size) for size in shape.split("x"))
    else:
        raise UnsupportedConfig(
            f"--shape is {shape!r}; need a name or hidden x intermediate x experts x topk.",
            facts={"shape": shape, "names": sorted(SHAPES)},
            remedy=f"Take one of {', '.join(SHAPES)}, or sizes such as 2048x768x128x8.",
        )
    hidden, intermediate, experts, topk = sizes
    return MegaMoEConfig(
        num_experts=experts, topk=topk, hidden=hidden, intermediate=intermediate, max_tokens_per_rank=tokens
    )


def _check_ranks(config: MegaMoEConfig, ranks: int, pacing: float | None) -> None:
    """Refuse ranks that cannot be, before anything asks for a GPU.

    Raises:
        UnsupportedConfig: Experts that cannot be shared out evenly, or a pace without ranks (E41).
    """
    if config.num_experts % ranks or ranks > MAX_PEERS:
        raise UnsupportedConfig(
            f"--virtual-ranks is {ranks}; need at most {MAX_PEERS}, and a divisor of the {config.num_experts} experts.",
            facts={"virtual_ranks": ranks, "num_experts": config.num_experts},
            remedy="Take 2, 4 or 8.",
        )
    if ranks == 1 and pacing is not None:
        raise UnsupportedConfig(
            f"--pacing is {pacing:g} GB/s, but one rank moves nothing to another.",
            facts={"pacing": pacing},
            remedy="Give it together with --virtual-ranks.",
        )


def _passes(args: argparse.Namespace) -> Iterator[Pass]:
    if args.records is not None:
        yield calls.load(Path(args.records))
        return
    config, ranks = layer(args.shape, args.tokens), args.virtual_ranks
    _check_ranks(config, ranks, args.pacing)
    device = choose_device(args.device)
    if device.type != "cuda":
        raise BackendUnavailable(
            "--device is the CPU; only the CUDA kernels record what they do.",
            code="E07",
            facts={"device": str(device)},
            remedy="Run it on a machine with a supported GPU, or show earlier records with --records.",
        )
    from prime_kernels.timeline.capture import Capture
    from prime_kernels.timeline.capture_ranks import RanksCapture

    if ranks == 1:
        capture: Capture | RanksCapture = Capture(config, args.tokens, device)
    else:
        capture = RanksCapture(config, args.tokens, device, ranks=ranks, pacing_gb_s=args.pacing)
    for direction in ("forward", "backward") if args.direction == "both" else (args.direction,):
        yield capture.trace(direction, args.rounds)


def show(call: Pass, folder: Path, *, keep_records: bool) -> tuple[str, dict[str, object]]:
    """Write everything about one pass.

    Args:
        call: The pass.
        folder: Where to; made if missing.
        keep_records: Also write the records themselves.

    Returns:
        The summary as text with the files written, and the same for programs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = summary.summarise(call)
    text = summary.text(call, found)
    title = text.splitlines()[0] + f"\n{found.ms:.3f} ms, floor {found.floor_ms:.3f} ms ({found.bound})"
    trace = perfetto.write(folder / f"{call.direction}.json", call)
    drawn = picture.draw(folder / f"{call.direction}.png", call, title)
    files = [str(trace)] + ([str(drawn)] if drawn is not None else [])
    if keep_records:
        records = folder / f"{call.direction}.records"
        calls.save(records, call)
        files.append(str(records))
    facts: dict[str, object] = {"direction": call.direction, "device": call.device, "tokens": call.tokens}
    facts |= {**asdict(found), "accounted": found.accounted, "accounted_normal": found.accounted_normal}
    facts |= {"virtual_ranks": call.ranks, "pacing_gb_s": call.pacing_gb_s, "link_bytes": call.link_bytes}
    names = [it.name if call.ranks == 1 else f"rank {it.rank}: {it.name}" for it in call.launches]
    times = [[it.ms, it.normal_ms, it.profile_ms] for it in call.launches]
    facts |= {"launches": dict(zip(names, times, strict=True)), "files": files}
    lines = [text, f"  open {trace} in ui.perfetto.dev", f"  picture {drawn or NO_PICTURE}"]
    (folder / f"{call.direction}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "\n".join(lines), facts


def run(args: argparse.Namespace) -> int:
    """Trace a layer, or show what was traced before.

    Args:
        args: Options of the verb.

    Returns:
        0; 1 where the causes miss the distance to the floor by more than 5 %.

    Raises:
        UnsupportedConfig: A shape or an option that does not exist (E41).
        BackendUnavailable: No GPU, or no recording kernels for it (E01 to E03, E07, E09).
        LaunchError: A launch failed or gave up (E43, E44).
    """
    results = []
    for call in _passes(args):
        text, facts = show(call, Path(args.out), keep_records=args.keep_records)
        results.append(facts)
        if not args.json:
            print(text, flush=True)
    if args.json:
        print(json.dumps({"passes": results}))
    explained = [facts["accounted"] for facts in results]
    return 0 if all(isinstance(it, float) and abs(it - 1) <= summary.ALLOWED_REST for it in explained) else 1
