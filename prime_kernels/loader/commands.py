# SPDX-License-Identifier: Apache-2.0
"""The console verbs about kernels: doctor, check, list, explain, verify, cache, warmup.

Each takes the parsed arguments and returns the exit code: 0 ok, 1 degraded or mismatch, 2 unusable. Errors are raised;
the console script prints them. None needs torch; only `doctor` and `explain` without --arch ask the driver.
"""

from __future__ import annotations

import re

from prime_kernels.errors import BackendUnavailable, UnsupportedConfig
from prime_kernels.loader import arch as arch_module
from prime_kernels.loader import hostlib, resolve, select
from prime_kernels.loader.select import Accepted, Problem, Rejected
from prime_kernels.loader.upkeep import cache as cache
from prime_kernels.loader.upkeep import emit
from prime_kernels.loader.upkeep import verify as verify
from prime_kernels.loader.warmup import warmup as warmup
from prime_kernels.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from prime_kernels.loader.resolve import Installation
    from prime_kernels.loader.select import Decision

OK, DEGRADED, UNUSABLE = 0, 1, 2
RESULTS = ("ok", "degraded", "unusable")
NEWEST_DRIVER = 99990
_FIELDS = ("hidden", "intermediate", "num_experts", "topk")


def problem_of(args: argparse.Namespace) -> Problem | None:
    """The layer that the arguments describe; None if they describe none.

    Raises:
        UnsupportedConfig: Only part of it is given, or no kernel takes such a layer anywhere (E41).
    """
    given: dict[str, Any] = {name: getattr(args, name, None) for name in _FIELDS}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise UnsupportedConfig(
            f"a layer needs hidden, intermediate, num-experts and topk; missing: {', '.join(missing)}.",
            facts={"missing": missing},
            remedy="Give all four, or none.",
        )
    _check_layer(given, args.ep_size, args.precision)
    return Problem(**given, ep_size=args.ep_size, precision=args.precision)


def _check_layer(sizes: dict[str, Any], ep_size: int, precision: str) -> None:
    """Refuse a layer that the op would refuse on every machine, with the op's own sentence (E41)."""
    from prime_kernels.moe.config import MegaMoEConfig, common_reason

    described: dict[str, Any] = {**sizes, "precision": precision}
    config = MegaMoEConfig(**described, max_tokens_per_rank=4096)
    reason = common_reason(config, ep_size=ep_size, backend="cuda")
    if reason is not None:
        facts = described | {"ep_size": ep_size}
        raise UnsupportedConfig(reason, facts=facts, remedy="Ask for a layer that the op supports.")


def parse_driver(text: str | None) -> int:
    """CUDA version of a driver as cuDriverGetVersion writes it: "13.0" -> 13000; None is the newest.

    Raises:
        UnsupportedConfig: Not MAJOR.MINOR (E41).
    """
    if text is None:
        return NEWEST_DRIVER
    match = re.fullmatch(r"(\d{2})\.(\d{1,2})", text)
    if match is None:
        raise UnsupportedConfig(
            f"--driver is {text!r}; need MAJOR.MINOR of its CUDA version.",
            facts={"driver": text},
            remedy="Write for example 13.0; nvidia-smi shows it as CUDA Version.",
        )
    return int(match[1]) * 1000 + int(match[2]) * 10


def _capability(text: str) -> tuple[int, int]:
    """Compute capability of a target that is asked about; refuses one that nothing here runs on."""
    target = arch_module.parse(text)
    cc = (target.major, target.minor)
    error = select.not_covered(cc, f"--arch is {text}", ())
    if error is not None:
        raise error
    return cc


def doctor(args: argparse.Namespace) -> int:
    """Say whether this machine can run the kernels, and why not.

    Args:
        args: `json`.

    Returns:
        0 ok, 1 degraded, 2 unusable.
    """
    from prime_kernels.loader import report

    sections = report.collect(settings())
    level = max(section.level for section in sections)
    codes = sorted({code for section in sections for code in section.codes})
    lines = []
    for section in sections:
        verdict = ("OK", "NOTE", "BAD")[section.level] if section.name.startswith(("driver", "gpu")) else ""
        head, *rest = section.lines
        lines.append(f"{section.name:<9} {head}" + (f"   {verdict}" if verdict and not section.codes else ""))
        lines += [f"{'':<9} {line}" for line in rest]
    package_sound = not any(section.name == "package" and section.level for section in sections)
    sound = "; the installation itself is sound" if level == UNUSABLE and package_sound else ""
    lines.append(f"{'result':<9} {report.RESULTS[level].upper()}{sound} (exit {level})")
    data = {section.name: section.data for section in sections}
    emit(args, {"result": report.RESULTS[level], "codes": codes, **data}, lines)
    return level


def _traces(
    at: Installation, kernel: str, cc: tuple[int, int], driver: int, problem: Problem | None
) -> dict[str, list[Decision]]:
    """The steps by which each key of a family would be had on a GPU, nothing compiled."""
    traces: dict[str, list[Decision]] = {}
    for decision in select.keys_for(kernel, at.facts_by_key(), problem):
        traces[decision.key] = [decision]
        if isinstance(decision, Accepted):
            try:
                traces[decision.key] = resolve.resolve(decision.key, cc, driver, at, build=False)[1]
            except BackendUnavailable as error:
                traces[decision.key] = [Rejected("-", decision.key, error.message.splitlines()[0])]
    if not traces:
        raise resolve.not_found(kernel, cc, [])
    return traces


def _row(decision: Decision) -> dict[str, Any]:
    reason = decision.reason if isinstance(decision, Rejected) else None
    return {"key": decision.key, "where": decision.where, "ok": reason is None, "reason": reason}


def _verdict(chosen: list[Accepted], wanted: int) -> int:
    """0 if every kernel is there, 1 if some have to be compiled or are missing, 2 if there is none."""
    ready = [found for found in chosen if not found.where.startswith("nvrtc")]
    return UNUSABLE if not chosen else OK if len(ready) == wanted else DEGRADED


def check(args: argparse.Namespace, at: Installation | None = None) -> int:
    """Say whether a GPU and driver would be served; needs neither.

    Args:
        args: `arch`, `driver`, the layer's options, `json`.
        at: Installation to ask; None takes this process's.

    Returns:
        0 every kernel is there, 1 some have to be compiled or do not serve the layer, 2 nothing does.
    """
    at = at or resolve.installation()
    problem, cc, driver = problem_of(args), _capability(args.arch), parse_driver(args.driver)
    traces = _traces(at, "mega_moe" if problem is not None else "", cc, driver, problem)
    answers = [select.first_accepted(steps) or steps[-1] for steps in traces.values()]
    code = _verdict([answer for answer in answers if isinstance(answer, Accepted)], len(answers))
    too_old = select.driver_problem(
        driver, arch_module.targets_for(cc)[0], [pack.header for pack in at.packs], at.settings.pack
    )
    lines = []
    for answer in answers:
        verdict = f"no: {answer.reason}" if isinstance(answer, Rejected) else "OK"
        lines.append(f"{answer.key:<44} {answer.where:<14} {verdict}")
    codes = [too_old.code] if too_old else []
    data = {"result": RESULTS[code], "codes": codes, "kernels": [_row(answer) for answer in answers]}
    emit(args, data, [*lines, *([str(too_old)] if too_old else [])])
    return code


def list_(args: argparse.Namespace, at: Installation | None = None) -> int:
    """List the kernels of this installation.

    Args:
        args: `arch` (None lists all), `json`.
        at: Installation to ask; None takes this process's.

    Returns:
        0.
    """
    at = at or resolve.installation()
    wanted = None if args.arch is None else arch_module.parse(args.arch)
    rows = [
        {
            "key": row.key,
            "arch": str(row.arch),
            "pack": pack.header.set,
            "toolkit": row.toolkit,
            "regs": row.regs,
            "smem_bytes": row.smem_bytes,
            "bytes": row.len,
            "status": row.status,
        }
        for pack in at.packs
        for row in pack.header.entries.values()
        if wanted is None or row.arch == wanted
    ]
    for key, source in (at.sources.entries if at.sources else {}).items():
        for target in source.archs:
            if wanted in (None, target) and not any(r["key"] == key and r["arch"] == str(target) for r in rows):
                rows.append({"key": key, "arch": str(target), "pack": "source", "status": "compiled at first use"})
    lines = [f"{'KEY':<40} {'ARCH':<8} {'PACK':<7} {'TOOLKIT':<9} {'REGS':>4} {'SMEM':>7} {'SIZE':>7}  STATUS"]
    for item in rows:
        numbers = [str(item.get(name, "-")) for name in ("toolkit", "regs", "smem_bytes", "bytes")]
        text = "{:<9} {:>4} {:>7} {:>7}".format(*numbers)
        lines.append(f"{item['key']:<40} {item['arch']:<8} {item['pack']:<7} {text}  {item['status']}")
    emit(args, {"kernels": rows}, lines)
    return OK


def _tried(steps: list[Decision]) -> list[Decision]:
    """The steps up to the one that was taken."""
    taken = next((at for at, step in enumerate(steps, 1) if isinstance(step, Accepted)), len(steps))
    return steps[:taken]


def explain(args: argparse.Namespace, at: Installation | None = None) -> int:
    """Show how a kernel is chosen, candidate by candidate.

    Args:
        args: `kernel` (family or key), `device` or `arch` and `driver`, the layer's options, `json`.
        at: Installation to ask; None takes this process's.

    Returns:
        0 everything is shipped or cached, 1 something has to be compiled, 2 nothing serves.
    """
    at = at or resolve.installation()
    problem = problem_of(args)
    if args.arch is not None:
        cc, driver = _capability(args.arch), parse_driver(args.driver)
    else:
        facts = hostlib.host().device(args.device)
        cc, driver = facts.cc, hostlib.host().driver_version()
    traces = _traces(at, args.kernel, cc, driver, problem)
    chosen = [found for steps in traces.values() if (found := select.first_accepted(steps))]
    code, trace = _verdict(chosen, len(chosen)), [step for steps in traces.values() for step in _tried(steps)]
    ends = [f"-> {found.key}: {found.where}" for found in chosen]
    if code == DEGRADED:
        ends.append("-> what NVRTC makes is compiled once; `prime-kernels warmup` does it ahead")
    data = {"result": RESULTS[code], "codes": [], "trace": [_row(step) for step in trace]}
    emit(args, data | {"chosen": [_row(found) for found in chosen]}, [select.trace_text(trace), *ends])
    return code
