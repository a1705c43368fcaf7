# SPDX-License-Identifier: Apache-2.0
"""The flags among peers, as a model that spin checks in every order of steps; see peers.pml."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from prime_kernels.moe import cuda_peers

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER / "peers.pml"
KERNELS = FOLDER.parents[1] / "kernels_src"
COMPILER = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
DEPTH = 100_000  # steps of one run; the longest have hundreds
FAULTS = (
    "MISSING_RELEASE=kCounts",
    "MISSING_RELEASE=kPlaced",
    "MISSING_RELEASE=kReady",
    "MISSING_RELEASE=kDone",
    "EARLY_REUSE",
    "SKIPPED_DONE",
    "UNAWAITED_READY",
    "STALE_READY",
)

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or COMPILER is None, reason="needs spin and a C compiler (apt-get install spin gcc)"
)


def check(folder: Path, ranks: int, *switches: str) -> tuple[str, int]:
    """What spin finds first, empty if nothing, and how many states it saw; all of them where it finds nothing."""
    defines = [f"-D{switch}" for switch in (f"R={ranks}", *switches)]
    shutil.copy(MODEL, folder)
    # Two ranks take less time to check than a compiler takes to optimise.
    flags = ["-O1" if ranks > 2 else "-O0", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2048"]
    for command in (
        ["spin", f"-P{COMPILER} -E -x c", "-a", *defines, MODEL.name],
        [str(COMPILER), *flags, "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    run = [str(folder / "pan"), f"-m{DEPTH}", "-w22"]
    said = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True, timeout=250).stdout
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"(\d+) states, stored", said)
    assert errors is not None, said
    assert states is not None, said
    found = re.search(r"^pan:1: (.*)", said, re.M)
    assert (found is not None) == (int(errors[1]) > 0), said
    cut_short = re.search(r"max search depth too small|out of memory|memory limit|Search not completed", said)
    assert found is not None or cut_short is None, said
    return found[1] if found else "", int(states[1])


@needs_spin
@pytest.mark.parametrize("switch", ["", "CHAINED", "RECOMPUTE"], ids=["two launches", "chained", "z again"])
def test_two_ranks_neither_read_wrong_nor_wait_for_ever(tmp_path: Path, switch: str) -> None:
    found, states = check(tmp_path, 2, *filter(None, [switch]))
    assert not found
    assert states > 100_000


@needs_spin
@pytest.mark.slow
def test_three_ranks_neither_read_wrong_nor_wait_for_ever(tmp_path: Path) -> None:
    found, states = check(tmp_path, 3)
    assert not found
    assert states > 1_000_000


@needs_spin
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_protocol_is_found(tmp_path: Path, fault: str) -> None:
    found, _ = check(tmp_path, 2, fault)
    assert ("invalid end state" if fault == "SKIPPED_DONE" else "assertion violated") in found


@needs_spin
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a rank that gave up waiting for done overwrites tokens that a peer still pulls",
)
def test_a_rank_that_gave_up_spoils_no_call_that_ends_well(tmp_path: Path) -> None:
    assert not check(tmp_path, 2, "GIVE_UP")[0]


@needs_spin
def test_it_would_not_if_a_rank_with_a_fault_wrote_to_no_arena(tmp_path: Path) -> None:
    found, states = check(tmp_path, 2, "GIVE_UP", "FAULTY_STOPS")
    assert not found
    assert states > 100_000


def test_names_of_the_model_are_those_of_the_kernels() -> None:
    model = MODEL.read_text(encoding="utf-8")
    flags = dict(re.findall(r"^#define (k[A-Z]\w+) (\d+)$", model, re.M))
    regions = set(re.findall(r"^#define ([a-z]\w+)\(", model, re.M))
    steps = set(re.findall(r"^inline ([a-z]\w+)\(", model, re.M))
    peers = (KERNELS / "comm" / "peers.cuh").read_text(encoding="utf-8")
    declared = re.search(r"enum class Flag : u32 \{(.*?)\};", peers, re.S)
    assert declared is not None
    assert flags == dict(re.findall(r"(k\w+) = (\d+)", declared[1]))
    assert regions == {"counts", "rows", "results", "tokens", "grads"}
    assert all(re.search(rf"^    u64 {region};", peers, re.M) for region in regions)
    assert {"tell", "finish", "plan_peers", "stage_peers", "push_to_peers"} <= steps
    sources = "\n".join(path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.cuh"))
    functions, entries = set(re.findall(r"\b(\w+)\(", sources)), set(re.findall(r"\bpk_(\w+)", sources))
    assert not {step.removeprefix("pk_") for step in steps} - functions - entries


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_the_model_launches_in_the_order_of_the_calls(call: str) -> None:
    """The order of steps in the model's Rank against that of the launches in cuda_peers.py."""
    body = MODEL.read_text(encoding="utf-8").split("proctype Rank")[1].split("\n}")[0]
    branch = body.split(":: epoch + 1 ")[1 if call == "forward" else 2]
    modelled = [step.removeprefix("pk_") for step in re.findall(r"\b(\w+)\(\);?", branch)]
    source = Path(cuda_peers.__file__).read_text(encoding="utf-8")
    function = source.split(f"def record_{call}(")[1].split("\ndef ")[0].split('"""')[2]
    kernels = r'call\.(plan_peers|stage_peers|combine|forward)(?:_peers)?\(|"((?:gate_up|down)\w*_peers)"'
    launched = [first or second for first, second in re.findall(kernels, function)]
    assert len(launched) > 3
    assert modelled == launched
