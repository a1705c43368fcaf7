# SPDX-License-Identifier: Apache-2.0
"""The console verbs about kernels: exit codes, JSON, text; and what `doctor` finds out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from prime_kernels import cli
from prime_kernels.errors import ArtifactError, BackendUnavailable, PrimeKernelsError, UnsupportedConfig
from prime_kernels.loader import commands, nvrtc, report, surroundings, upkeep, warmup
from prime_kernels.loader.arch import parse
from prime_kernels.loader.entry import CacheKey
from prime_kernels.loader.resolve import Installation
from tests.helpers import installation as made
from tests.stub_cuda import stub_environment

ROOT = Path(__file__).resolve().parents[2]
LAYER = ["--hidden", "2048", "--intermediate", "768", "--num-experts", "128", "--topk", "8"]
OLD_NVRTC = "/nonexistent/libnvrtc.so"
needs_nvrtc = pytest.mark.skipif(nvrtc.find(None)[0] is None, reason=f"no NVRTC here ({nvrtc.PIP_LINE})")


def parsed(*words: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(list(words))


def answer(capsys: pytest.CaptureFixture[str], at: Installation, *words: str) -> tuple[int, Any]:
    """Exit code and JSON of a verb on an installation."""
    args = parsed(*words, "--json")
    code = getattr(commands, {"list": "list_"}.get(args.verb, args.verb))(args, at)
    return code, json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str], at: Installation, *words: str) -> str:
    args = parsed(*words)
    getattr(commands, {"list": "list_"}.get(args.verb, args.verb))(args, at)
    return capsys.readouterr().out


def moe_packs(folder: Path, **facts: Any) -> Installation:
    """Packs for sm_90a whose one kernel belongs to the layer."""
    pair = (
        made.pack_entry("cu130", "sm_90a", facts={"family": "mega_moe", **facts}),
        made.cubin_for("cu130", "sm_90a"),
    )
    made.write_packs(folder / "packs", {"cu130/sm_90a": made.pack_bytes("cu130", "sm_90a", [pair])})
    return made.installation(folder, packs=False, sources=False, nvrtc=OLD_NVRTC)


# --- check


@pytest.mark.parametrize(
    ("words", "code", "where"),
    [
        (["--arch", "sm_90a"], 0, "cu130/sm_90a"),
        (["--arch", "sm_90a", "--driver", "13.0"], 0, "cu130/sm_90a"),
        (["--arch", "sm_103a", "--driver", "12.9"], 0, "cu129/sm_103a"),
    ],
)
def test_check_says_from_which_pack_each_kernel_comes(
    words: list[str], code: int, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = made.installation(tmp_path, sources=False)
    found = answer(capsys, at, "check", *words)
    row = {"key": made.KEY, "where": where, "ok": True, "reason": None}
    assert found == (code, {"result": "ok", "codes": [], "kernels": [row]})
    assert text(capsys, at, "check", *words).split() == [made.KEY, where, "OK"]


def test_check_of_a_driver_that_is_too_old_is_unusable_with_e02(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = made.installation(tmp_path, sources=False)
    code, found = answer(capsys, at, "check", "--arch", "sm_90a", "--driver", "12.2")
    assert (code, found["result"], found["codes"]) == (2, "unusable", ["E02"])
    assert "CUDA 12.2" in text(capsys, at, "check", "--arch", "sm_90a", "--driver", "12.2")


def test_check_of_a_gpu_that_is_not_covered_raises_e03(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        commands.check(parsed("check", "--arch", "sm_120a"), made.installation(tmp_path))
    assert caught.value.code == "E03"
    assert caught.value.remedy


@needs_nvrtc
def test_check_is_degraded_where_something_has_to_be_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capsys, made.installation(tmp_path), "check", "--arch", "sm_90a")
    assert (code, found["result"]) == (1, "degraded")
    assert [row["where"].split()[0] for row in found["kernels"]] == ["cu130/sm_90a", "nvrtc"]


def test_check_of_a_layer_asks_the_kernels_of_the_layer_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = moe_packs(tmp_path, max_topk=8)
    assert answer(capsys, at, "check", "--arch", "sm_90a", *LAYER)[0] == 0
    more = [*LAYER[:-1], "16"]
    code, found = answer(capsys, at, "check", "--arch", "sm_90a", *more)
    assert (code, found["kernels"][0]["reason"]) == (2, "topk=16, at most 8")


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--hidden", "2048"], "missing: intermediate, num_experts, topk"),
        ([*LAYER, "--hidden", "100"], "hidden"),
        ([*LAYER, "--ep-size", "3"], "num_experts=128 is not divisible by ep_size=3"),
        ([*LAYER, "--precision", "mxfp8"], "precision"),
        (["--driver", "thirteen"], "need MAJOR.MINOR"),
        (["--arch", "hopper"], "sm_<major><minor>"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_check_of_a_wrong_question_is_e41_with_the_size_named(words: list[str], word: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        commands.check(parsed("check", "--arch", "sm_90a", *words), moe_packs(tmp_path))
    assert caught.value.code == "E41"
    assert word in str(caught.value)
    assert caught.value.remedy


# --- list, explain


def test_list_shows_every_kernel_with_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = made.installation(tmp_path)
    code, found = answer(capsys, at, "list", "--arch", "sm_90a")
    rows = [(row["key"], row["pack"], row["status"]) for row in found["kernels"]]
    assert code == 0
    assert rows == [
        (made.KEY, "cu130", "compiled"),
        (made.KEY, "cu129", "compiled"),
        ("made|t128", "source", "compiled at first use"),
    ]
    assert len(answer(capsys, at, "list")[1]["kernels"]) == 9
    assert text(capsys, at, "list", "--arch", "sm_90a").splitlines()[0].split()[:2] == ["KEY", "ARCH"]


def test_explain_prints_every_candidate_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = made.installation(tmp_path, nvrtc=OLD_NVRTC)
    code, found = answer(capsys, at, "explain", "made", "--arch", "sm_90a")
    steps = [(row["where"], row["ok"]) for row in found["trace"]]
    assert code == 2
    assert steps[-2:] == [("cache", False), ("jit", False)]
    assert "no NVRTC was found" in found["trace"][-1]["reason"]
    lines = text(capsys, at, "explain", made.KEY, "--arch", "sm_90a", "--driver", "12.9").splitlines()
    assert "rejected: driver is for CUDA 12.9, needs 13.0" in lines[0]
    assert "cu129/sm_90a" in lines[1]
    assert lines[-1] == f"-> {made.KEY}: cu129/sm_90a"


def test_explain_of_an_unknown_kernel_is_e09(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        commands.explain(parsed("explain", "nothing", "--arch", "sm_90a"), made.installation(tmp_path))
    assert caught.value.code == "E09"


# --- verify


def test_verify_counts_what_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, made.installation(tmp_path), "verify")
    assert code == 0
    assert (found["packs"], found["cubins"], found["cache"], found["codes"]) == ([6, 6], [6, 6], [0, 0], [])


def test_verify_finds_a_flipped_byte_in_a_pack_and_in_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = made.installation(tmp_path)
    key = CacheKey(f"{'ab' * 8}-nvrtc13.0.88-{'cd' * 4}", parse("sm_90a"), "x")
    at.store.publish(key, made.cubin_for("cu130", "sm_90a"), "test")
    for path in (tmp_path / "packs" / "cu130" / "sm_90a.pkpack", tmp_path / "cache" / key.path):
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
    code, found = answer(capsys, at, "verify")
    assert (code, found["result"], found["codes"]) == (1, "degraded", ["E05", "E10"])
    assert (found["packs"], found["cache"]) == ([5, 6], [0, 1])
    assert any("sm_90a.pkpack" in line and "pip install --force-reinstall" in line for line in found["problems"])


def test_verify_finds_a_sound_cubin_under_a_wrong_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (made.pack_entry("cu130", "sm_90a", args_hash="f" * 16), made.cubin_for("cu130", "sm_90a"))
    made.write_packs(tmp_path / "packs", {"cu130/sm_90a": made.pack_bytes("cu130", "sm_90a", [wrong])})
    code, found = answer(capsys, made.installation(tmp_path, packs=False, sources=False), "verify")
    assert (code, found["packs"], found["cubins"], found["codes"]) == (1, [1, 1], [0, 1], ["E11"])


# --- cache


def test_the_cache_verbs_show_fill_empty_and_carry_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = made.installation(tmp_path)
    key = CacheKey(f"{'ab' * 8}-nvrtc13.0.88-{'cd' * 4}", parse("sm_90a"), "x")
    at.store.publish(key, made.cubin_for("cu130", "sm_90a"), "test")
    assert answer(capsys, at, "cache", "path") == (0, {"path": str(tmp_path / "cache")})
    info = answer(capsys, at, "cache", "info")[1]
    assert (info["entries"], info["source"], info["refused"]) == (1, "PRIME_KERNELS_CACHE_DIR", [])
    assert [row["path"] for row in answer(capsys, at, "cache", "list")[1]["entries"]] == [key.path]
    exported = answer(capsys, at, "cache", "export", str(tmp_path / "x.pkcache"))[1]
    assert exported["entries"] == 1
    assert answer(capsys, at, "cache", "prune", "--max-size", "1G")[1] == {"removed": 0, "bytes": 0}
    assert answer(capsys, at, "cache", "clear")[1]["removed"] == 1
    assert answer(capsys, at, "cache", "import", str(tmp_path / "x.pkcache"))[1] == {"entries": 1}
    assert f"PRIME_KERNELS_CACHE_DIGEST={exported['digest']}" in text(
        capsys, at, "cache", "export", str(tmp_path / "y.pkcache")
    )


def test_a_cache_without_a_directory_is_e20_with_every_candidate(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "x")
    at = made.installation(tmp_path, cache_dir=below, tmp_dir=below)
    with pytest.raises(ArtifactError) as caught:
        commands.cache(parsed("cache", "info"), at)
    assert caught.value.code == "E20"
    assert below in str(caught.value)


@pytest.mark.parametrize(
    ("size", "count"),
    [("0", 0), ("12", 12), ("3K", 3072), ("2m", 2 << 20), ("1GiB", 1 << 30), ("1 G", None), ("-1", None)],
)
def test_sizes_are_bytes_or_have_a_letter(size: str, count: int | None) -> None:
    if count is not None:
        assert upkeep.parse_size(size) == count
        return
    with pytest.raises(UnsupportedConfig):
        upkeep.parse_size(size)


# --- warmup


@needs_nvrtc
def test_warmup_compiles_what_is_not_shipped_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = made.installation(tmp_path)
    made.write_sources(tmp_path / "src", facts={"family": "mega_moe"})
    at = Installation.open(at.settings, packs_folder=at.packs_folder, sources_folder=at.sources_folder)
    code, found = answer(capsys, at, "warmup", "--arch", "sm_90a,sm_100a")
    assert (code, found["result"], found["cache"]) == (0, "ok", str(tmp_path / "cache"))
    assert [row["result"] for row in found["kernels"]] == ["built", "built"]
    assert [row["result"] for row in answer(capsys, at, "warmup", "--arch", "sm_90a")[1]["kernels"]] == ["cache"]
    assert answer(capsys, at, "check", "--arch", "sm_90a")[0] == 0


def test_warmup_without_a_compiler_is_degraded_with_e30(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capsys, made.installation(tmp_path, nvrtc=OLD_NVRTC), "warmup", "--arch", "sm_90a")
    assert (code, found["codes"]) == (1, ["E30"])


def test_warmup_reads_layers_from_toml() -> None:
    row = "hidden = 2048\nintermediate = 768\nnum_experts = 128\ntopk = 8\n"
    layers = warmup.parse_layers(f'[[layer]]\n{row}[[layer]]\n{row}ep_size = 8\nprecision = "fp8"\n', "m.toml")
    assert [(layer.ep_size, layer.precision, layer.topk) for layer in layers] == [(1, "bf16", 8), (8, "fp8", 8)]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "layer = []",
        "[[layer]]\nhidden = 1",
        "[[layer",
        "[[layer]]\nhidden=1\nintermediate=1\nnum_experts=1\ntopk='a'",
    ],
)
def test_a_model_file_without_usable_layers_is_e41(content: str) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        warmup.parse_layers(content, "m.toml")
    assert "m.toml" in str(caught.value)


# --- doctor


def doctor(folder: Path, **env: str) -> tuple[int, Any, float]:
    """Exit code, JSON and seconds of the doctor in a process of its own."""
    base = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "prime_kernels", "doctor", "--json"],
        cwd=ROOT,
        env=base | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout), time.monotonic() - begin


def test_doctor_without_a_driver_says_e01_only_in_half_a_second_and_writes_nothing(tmp_path: Path) -> None:
    runs = [doctor(tmp_path) for _ in range(3)]
    code, found, _ = runs[0]
    if found["result"] != "unusable":
        pytest.skip("this host has an NVIDIA driver")
    assert (code, found["codes"]) == (2, ["E01"])
    assert min(seconds for _, _, seconds in runs) <= 0.5
    assert list(tmp_path.iterdir()) == []


def test_doctor_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from prime_kernels import cli\n"
        "status = cli.main(['doctor', '--json'])\n"
        "assert 'numpy' not in sys.modules\n"
        "sys.exit(status)"
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, 1, 2)
    assert json.loads(done.stdout)["result"] in report.RESULTS


def with_stub(folder: Path, **settings: str) -> tuple[int, Any]:
    env = {k: v for k, v in stub_environment(**settings).items() if k in ("LD_LIBRARY_PATH", *settings)}
    code, found, _ = doctor(folder, **env)
    return code, found


def test_doctor_describes_driver_and_gpus(tmp_path: Path) -> None:
    _, found = with_stub(tmp_path, PK_STUB_DEVICES="2", PK_STUB_NAME="NVIDIA H200")
    assert found["driver"]["cuda"] == 13000
    assert (found["gpu 1"]["name"], found["gpu 1"]["cc"], found["gpu 1"]["sm_count"]) == ("NVIDIA H200", "9.0", 132)
    assert found["gpu 0"]["mig"] is False


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"PK_STUB_CC": "12.0"}, "E03"),
        ({"PK_STUB_DEVICES": "0"}, "E07"),
        ({"PK_STUB_FAIL": "cuInit=999"}, "E43"),
    ],
    ids=["another GPU", "no GPU", "broken driver"],
)
def test_doctor_is_unusable_with_the_code_of_the_reason(settings: dict[str, str], code: str, tmp_path: Path) -> None:
    status, found = with_stub(tmp_path, **settings)
    assert (status, found["result"]) == (2, "unusable")
    assert code in found["codes"]


def test_doctor_is_degraded_where_the_cache_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    _, found, _ = doctor(tmp_path, PRIME_KERNELS_CACHE_DIR=str(tmp_path / "open"))
    assert "E20" in found["codes"]
    assert "mode 0777" in found["cache"]["refused"][0]["reason"]
    assert found["env"] == {"PRIME_KERNELS_CACHE_DIR": str(tmp_path / "open")}


class Dist:
    """As much of importlib.metadata.Distribution as is asked for."""

    def __init__(self, name: str, version: str, record: str | None, where: str) -> None:
        self.metadata = Message()
        self.metadata["Name"] = name
        self.version, self.record, self.where = version, record, where

    def read_text(self, _: str) -> str | None:
        return self.record

    def locate_file(self, _: str) -> str:
        return self.where


def test_two_owners_of_the_module_are_named_with_their_places() -> None:
    ours = Dist("prime-kernels", "1.0", "prime_kernels/__init__.py,sha256=x,1\n", "/a")
    other = Dist("prime-kernels", "0.3", "x.py,,\nprime_kernels/__init__.py,,\n", "/b")
    unrelated = Dist("other", "1", "other/prime_kernels/__init__.py,,\nnot_prime_kernels/__init__.py,,\n", "/c")
    found: Any = [ours, unrelated, Dist("y", "1", None, "/d")]
    assert surroundings.conflict(surroundings.owners(found)) is None
    error = surroundings.conflict(surroundings.owners([*found, other]))
    assert error is not None
    assert error.code == "E12"
    assert "prime-kernels 1.0 in /a and prime-kernels 0.3 in /b" in str(error)
    assert len(error.facts["owners"]) == 2  # type: ignore[arg-type]
    assert error.remedy


def test_two_cuda_majors_in_one_process_are_noticed() -> None:
    names = ("x/libcudart.so.12", "y/libcudart.so.13.0.1", "y/libnvrtc.so.13", "y/libnvrtc-builtins.so.12.9")
    maps = "".join(f"r-xp /{name}\n" for name in names)
    assert surroundings.mixed_cuda(maps) == {"libcudart": ["12", "13"]}
    assert surroundings.mixed_cuda("") == {}


def test_a_damaged_installation_is_reported_not_raised(tmp_path: Path) -> None:
    error = ArtifactError("x.", facts={"a": 1}, remedy="Reinstall.")
    section = report.Section.failed("package", error)
    assert (section.level, section.codes, section.data["code"]) == (report.UNUSABLE, ["E10"], "E10")
    assert "Reinstall." in "\n".join(section.lines)


def test_every_error_of_the_commands_has_a_code_of_the_table() -> None:
    from prime_kernels.errors import CODES

    assert {kind.default_code for kind in PrimeKernelsError.__subclasses__()} <= set(CODES)
