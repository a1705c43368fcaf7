# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs: request x packs x device and driver -> one decision per candidate. Pure.

The trace is the answer to "why this one" and "why none"; error messages and `prime-kernels explain` print it.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_kernels.errors import BackendUnavailable
from prime_kernels.loader import arch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from prime_kernels.loader.arch import Target
    from prime_kernels.loader.manifest import Entry, PackHeader

SETS_MIN_DRIVER = {"cu130": 13000, "cu129": 12090}


@dataclass(frozen=True, slots=True)
class Problem:
    """The layer that a kernel is wanted for; sizes in elements, ranks of the expert-parallel group."""

    hidden: int
    intermediate: int
    num_experts: int
    topk: int
    ep_size: int = 1
    precision: str = "bf16"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A candidate that serves the request."""

    where: str
    key: str
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that does not, and why."""

    where: str
    key: str
    reason: str


Decision = Accepted | Rejected


def version_text(driver: int) -> str:
    """13010 -> "13.1"."""
    return f"{driver // 1000}.{driver % 1000 // 10}"


def serves_reason(facts: Mapping[str, Any], problem: Problem) -> str | None:
    """Why a variant is not for a problem, or None. `facts` is what the build wrote into the manifest about the variant;
    a limit that it does not state does not bind."""
    precision = facts.get("precision", problem.precision)
    if precision != problem.precision:
        return f"for precision {precision}, asked for {problem.precision}"
    for name in ("hidden", "intermediate"):
        value, multiple = getattr(problem, name), facts.get(f"{name}_multiple", 1)
        if value % multiple:
            return f"{name}={value} is not a multiple of {multiple}"
    for name, limit in (("topk", "max_topk"), ("ep_size", "max_ranks"), ("num_experts", "max_experts")):
        value = getattr(problem, name)
        if value > facts.get(limit, value):
            return f"{name}={value}, at most {facts[limit]}"
    if problem.num_experts % problem.ep_size:
        return f"num_experts={problem.num_experts} is not a multiple of ep_size={problem.ep_size}"
    return None


def keys_for(kernel: str, facts: Mapping[str, Mapping[str, Any]], problem: Problem | None) -> list[Decision]:
    """Which keys of a kernel family serve a problem.

    Args:
        kernel: A family (fact "family", e.g. "mega_moe"), the first word of keys, a whole key, or "" for all.
        facts: Facts by key, in order of preference.
        problem: None accepts every key of the family.

    Returns:
        A decision per key of the family.
    """
    found: list[Decision] = []
    for key, predicate in facts.items():
        if kernel not in ("", key, key.split("|", 1)[0], predicate.get("family")):
            continue
        reason = serves_reason(predicate, problem) if problem is not None else None
        found.append(Accepted("variants", key) if reason is None else Rejected("variants", key, reason))
    return found


def _pack_reason(pack: PackHeader, key: str, driver: int, forced: str | None) -> str | None:
    """Why a pack for the right target does not give a kernel, or None."""
    if forced is not None and pack.set != forced:
        return f"PRIME_KERNELS_PACK={forced}"
    entry = pack.entries.get(key)
    if entry is None:
        return "not in this pack"
    needed = max(pack.min_driver, entry.min_driver)
    # Asked for by name: try it even on an older driver, which then says what it thinks of it.
    if driver < needed and forced is None:
        return f"driver is for CUDA {version_text(driver)}, needs {version_text(needed)}"
    return None


def choose(
    key: str, cc: tuple[int, int], driver: int, packs: Iterable[PackHeader], *, forced: str | None = None
) -> list[Decision]:
    """Look for a key in the packs.

    Args:
        key: Kernel key.
        cc: Compute capability of the device.
        driver: CUDA version of the driver, e.g. 13000.
        packs: Headers of the installed packs.
        forced: Value of PRIME_KERNELS_PACK.

    Returns:
        A decision per pack that is for the device, best first: by target in its order of preference, then by newest
        toolkit; then one for all packs of other GPUs. The first `Accepted` is the choice.
    """
    targets, packs = arch.targets_for(cc), list(packs)
    ours = [pack for pack in packs if pack.arch in targets]
    decisions: list[Decision] = []
    for pack in sorted(ours, key=lambda pack: (targets.index(pack.arch), -pack.min_driver)):
        where, reason = f"{pack.set}/{pack.arch}", _pack_reason(pack, key, driver, forced)
        accepted = Accepted(where, key, pack.entries.get(key))
        decisions.append(accepted if reason is None else Rejected(where, key, reason))
    others = sorted({str(pack.arch) for pack in packs if pack not in ours})
    if others:
        need = " or ".join(map(str, targets)) or f"a target of sm_{cc[0]}{cc[1]}"
        decisions.append(Rejected("other packs", key, f"for {', '.join(others)}, need {need}"))
    return decisions


def first_accepted(decisions: Sequence[Decision]) -> Accepted | None:
    """The choice of a trace, or None."""
    return next((decision for decision in decisions if isinstance(decision, Accepted)), None)


def trace_text(decisions: Sequence[Decision]) -> str:
    """One line per decision."""
    lines = []
    for number, decision in enumerate(decisions, 1):
        verdict = "accepted" if isinstance(decision, Accepted) else f"rejected: {decision.reason}"
        lines.append(f"{number:2} {decision.where:<14} {decision.key}  {verdict}")
    return "\n".join(lines)


def usable_sets(driver: int, packs: Iterable[PackHeader] = ()) -> tuple[str, ...]:
    """Pack sets that a driver can load, newest first; of the known ones if no packs are installed."""
    floors = {pack.set: pack.min_driver for pack in packs} or SETS_MIN_DRIVER
    return tuple(sorted((name for name, floor in floors.items() if driver >= floor), reverse=True))


def driver_problem(
    driver: int, target: Target, packs: Sequence[PackHeader], forced: str | None
) -> BackendUnavailable | None:
    """The error for a driver that is older than every pack of its target (E02), or None."""
    floors = {pack.set: pack.min_driver for pack in packs if pack.arch == target}
    if not floors or forced is not None or any(driver >= floor for floor in floors.values()):
        return None
    needs = " or ".join(f">= {version_text(floor)} (pack {name})" for name, floor in sorted(floors.items()))
    oldest = min(floors, key=lambda name: floors[name])
    return BackendUnavailable(
        f"the driver is for CUDA {version_text(driver)}; {target} needs {needs}.",
        code="E02",
        facts={"driver": driver, "target": str(target), "needed": floors},
        remedy=f"Update the NVIDIA driver, or set PRIME_KERNELS_PACK={oldest} to try anyway (may fail with error 200).",
    )


def not_covered(cc: tuple[int, int], device: str, shipped: Iterable[str]) -> BackendUnavailable | None:
    """The error for a GPU that no target covers (E03), or None. `device`: e.g. "cuda:0 is NVIDIA L4"."""
    names = tuple(sorted(set(shipped)))
    reason = arch.not_covered_reason(cc, device, names)
    if reason is None:
        return None
    return BackendUnavailable(
        reason,
        code="E03",
        facts={"cc": f"{cc[0]}.{cc[1]}", "device": device, "shipped": names},
        remedy='Use backend="grouped" or "reference", or a GPU that is listed.',
    )
