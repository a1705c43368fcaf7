# SPDX-License-Identifier: Apache-2.0
"""`import prime_kernels` is free of side effects, and cheap."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 0.030

PROBE = """
import json, sys
opened = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        opened.append(str(args[0]))
    elif event in ("ctypes.dlopen", "os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        opened.append(f"{event} {args}")
sys.addaudithook(watch)
before = set(sys.modules)
import prime_kernels
%s
maps = open("/proc/self/maps").read()
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "effects": opened,
    "cuda": sorted({line.split("/")[-1] for line in maps.splitlines() if "libcuda" in line or "libnv" in line}),
}))
"""


def probe(extra: str = "") -> dict[str, list[str]]:
    # -B: writing bytecode is Python's doing, not the package's.
    command = [sys.executable, "-B", "-c", PROBE % extra]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    result: dict[str, list[str]] = json.loads(run.stdout)
    return result


def test_import_loads_only_the_package_itself() -> None:
    assert set(probe()["new"]) - {"__future__"} == {"prime_kernels"}


def test_import_writes_nothing_and_opens_no_library() -> None:
    found = probe()
    assert found["effects"] == []
    assert found["cuda"] == []


def test_the_probe_sees_what_it_looks_for(tmp_path: Path) -> None:
    target = tmp_path / "written"
    found = probe(f"import ctypes; ctypes.CDLL('libc.so.6'); open({str(target)!r}, 'w').close()")
    assert any("ctypes.dlopen" in effect for effect in found["effects"])
    assert str(target) in found["effects"]


@pytest.mark.parametrize(
    "use",
    [
        "prime_kernels.errors.ShapeError",
        "prime_kernels.MegaMoEConfig",
        "prime_kernels.SwiGLU",
        "prime_kernels.is_available('mega_moe')",
        "prime_kernels.status()",
        "import prime_kernels.cli",
        "import prime_kernels.deep_gemm",
        "import prime_kernels.settings",
    ],
)
def test_names_that_need_no_tensor_load_no_torch(use: str) -> None:
    new = probe(use)["new"]
    assert not {"torch", "numpy"} & set(new)


def test_every_public_name_resolves_and_is_listed() -> None:
    import prime_kernels

    for name in prime_kernels.__all__:
        assert getattr(prime_kernels, name) is not None
    assert set(prime_kernels.__all__) <= set(dir(prime_kernels))


def test_the_call_is_not_shadowed_by_a_module_of_its_name() -> None:
    import prime_kernels

    op = import_module("prime_kernels.moe.op")
    assert callable(prime_kernels.mega_moe)
    assert prime_kernels.mega_moe is op.mega_moe


def test_an_unknown_name_is_an_attribute_error() -> None:
    import prime_kernels

    with pytest.raises(AttributeError, match="'prime_kernels' has no attribute 'mega_mo'"):
        prime_kernels.mega_mo  # noqa: B018


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return time.perf_counter() - start


def test_import_costs_at_most_30_ms_over_bare_python() -> None:
    # Other work on the machine only ever adds time, so the quickest of three rounds of interleaved medians counts.
    seconds("import prime_kernels")
    rounds = []
    for _ in range(3):
        pairs = [(seconds("pass"), seconds("import prime_kernels")) for _ in range(7)]
        rounds.append(statistics.median(b for _, b in pairs) - statistics.median(a for a, _ in pairs))
        if rounds[-1] <= BUDGET_S:
            return
    pytest.fail(f"import prime_kernels takes {min(rounds) * 1e3:.1f} ms over bare python, at most {BUDGET_S * 1e3:.0f}")
