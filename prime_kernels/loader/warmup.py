# SPDX-License-Identifier: Apache-2.0
"""The console verb warmup: compiles ahead what packs do not hold, also on a machine without a GPU."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from prime_kernels.errors import BackendUnavailable, PrimeKernelsError, UnsupportedConfig
from prime_kernels.loader import arch, device, jit, nvrtc, resolve, select
from prime_kernels.loader.arch import Target
from prime_kernels.loader.select import Accepted, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from prime_kernels.loader.resolve import Installation
    from prime_kernels.settings import Settings

_LAYER = {"hidden", "intermediate", "num_experts", "topk", "ep_size", "precision"}


def parse_layers(text: str, where: str) -> list[Problem]:
    """The layers of a TOML file: one [[layer]] table each, with the names of the console options (num_experts).

    Raises:
        UnsupportedConfig: Not TOML, no layer, or an unknown or missing field (E41).
        BackendUnavailable: Python older than 3.11 without the package tomli (E08).
    """
    name = next((name for name in ("tomllib", "tomli") if find_spec(name)), None)
    if name is None:
        raise BackendUnavailable(
            "--model reads TOML, which needs Python 3.11 or the package tomli.",
            code="E08",
            facts={"package": "tomli"},
            remedy="Run: pip install tomli, or give the layer as options.",
        )
    tomllib = import_module(name)
    try:
        layers = [Problem(**row) for row in tomllib.loads(text)["layer"]]
        good = all(isinstance(getattr(p, name), int) for p in layers for name in _LAYER - {"precision"})
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as err:
        raise _bad_model(where, str(err)) from err
    if not layers or not good:
        raise _bad_model(where, "no layer, or a size that is no integer")
    return layers


def _bad_model(where: str, what: str) -> UnsupportedConfig:
    return UnsupportedConfig(
        f"{where} has no usable [[layer]] tables: {what}.",
        facts={"file": where, "fields": sorted(_LAYER)},
        remedy=f"Write [[layer]] tables with {', '.join(sorted(_LAYER))}.",
    )


def _layers(args: argparse.Namespace) -> list[Problem | None]:
    from prime_kernels.loader.commands import problem_of

    if args.model is None:
        return [problem_of(args)]
    try:
        return list(parse_layers(Path(args.model).read_text(encoding="utf-8"), args.model))
    except (OSError, UnicodeDecodeError) as err:
        raise _bad_model(args.model, str(err)) from err


def targets_of(text: str | None) -> list[Target]:
    """Targets of a comma-separated list; None takes those of the GPUs here.

    Raises:
        UnsupportedConfig: Not a list of targets (E41).
        BackendUnavailable: None was given and there is no driver or no covered GPU (E01, E07).
    """
    if text is not None:
        return [arch.parse(part) for part in text.split(",")]
    found = {arch.default_target(facts.cc) for facts in device.machine().devices} - {None}
    if not found:
        raise device.no_device()
    return sorted(target for target in found if target is not None)


def todo(at: Installation, targets: list[Target], layers: list[Problem | None]) -> list[tuple[str, Target]]:
    """(key, target) of everything that serves a layer, is in no pack for that target, and can be compiled for it."""
    shipped = {(key, pack.header.arch) for pack in at.packs for key in pack.header.entries}
    wanted: dict[tuple[str, Target], None] = {}
    for layer in layers:
        for decision in select.keys_for("", at.facts_by_key(), layer):
            source = at.sources.entries.get(decision.key) if at.sources else None
            for target in targets if isinstance(decision, Accepted) and source is not None else ():
                if (decision.key, target) not in shipped and source is not None and target in source.archs:
                    wanted[decision.key, target] = None
    return list(wanted)


def build(key: str, target: Target, at: Installation) -> str:
    """Compile one kernel into the cache unless it is there; returns how it was had.

    Raises:
        CompileError: NVRTC is missing, too old, or fails (E30, E32).
        BackendUnavailable: The sources do not hold the key (E09).
    """
    unit = jit.read_unit(at.sources, key, at.sources_folder) if at.sources else None
    if unit is None:
        raise resolve.not_found(key, (target.major, target.minor), [])
    compiler, tried = nvrtc.find(at.settings.nvrtc)
    if compiler is None:
        raise nvrtc.missing(tried)
    problem = jit.unbuildable(compiler, target, None)
    if problem is not None:
        raise problem
    chosen = compiler
    hit = at.store.get_or_build(
        unit.cache_key(chosen.release, target),
        lambda: jit.compile_unit(unit, chosen, target, at.store),
        f"nvrtc {chosen.release}",
    )
    return hit.origin


def _job(item: tuple[str, Target, Settings, Path]) -> str | PrimeKernelsError:
    key, target, config, folder = item
    try:
        at = resolve.Installation.open(config, sources_folder=folder)
        return build(key, target, at)
    except PrimeKernelsError as err:
        return err


def warmup(args: argparse.Namespace, at: Installation | None = None) -> int:
    """Fill the cache with what layers need beyond the shipped kernels.

    Args:
        args: `arch` (comma-separated), `model` (TOML file), `jobs`, the layer's options, `json`.
        at: Installation to fill; None takes this process's.

    Returns:
        0 everything is there now, 1 something could not be compiled.

    Raises:
        ArtifactError: There is no usable cache directory (E20).
    """
    from prime_kernels.loader.upkeep import emit

    at = at or resolve.installation()
    where = at.store.require()
    items = todo(at, targets_of(args.arch), _layers(args))
    jobs = [(key, target, at.settings, at.sources_folder) for key, target in items]
    if args.jobs > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(_job, jobs))
    else:
        results = [_job(job) for job in jobs]
    failed = [result for result in results if isinstance(result, PrimeKernelsError)]
    rows: list[dict[str, Any]] = [
        {"key": key, "arch": str(target), "result": str(result)}
        for (key, target), result in zip(items, results, strict=True)
    ]
    lines = [f"{row['key']:<44} {row['arch']:<8} {row['result']}" for row in rows]
    lines.append(f"{len(rows) - len(failed)} of {len(rows)} kernels in {where}; the rest is shipped")
    codes = sorted({error.code for error in failed})
    result = "degraded" if failed else "ok"
    emit(args, {"result": result, "codes": codes, "cache": where, "kernels": rows}, lines)
    return int(bool(failed))
