# SPDX-License-Identifier: Apache-2.0
"""The console script: exit codes, JSON, and what `env` may not show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prime_kernels
from prime_kernels import cli, errors
from prime_kernels.cli_info import redact
from prime_kernels.loader import packs
from prime_kernels.settings import settings

ROOT = Path(__file__).resolve().parents[2]
LAYER = ["--hidden", "2048", "--intermediate", "768", "--num-experts", "128", "--topk", "8"]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prime_kernels", *args]
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent/home", **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables, timeout=120)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["frobnicate"],
        ["version", "--frobnicate"],
        ["check"],
        ["check", "--arch"],
        ["cache"],
        ["cache", "frobnicate"],
        ["explain"],
        ["demo", "--steps", "0"],
        ["demo", "--steps", "many"],
        ["bench", "--hidden", "2048"],
        ["check", "--arch", "sm_90a", "--precision", "int4", *LAYER],
    ],
    ids=lambda args: " ".join(args) or "nothing",
)
def test_bad_usage_exits_with_3_and_prints_the_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == cli.BAD_USAGE == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: prime-kernels")


def test_an_unknown_verb_names_the_known_ones() -> None:
    found = run("frobnicate")
    assert found.returncode == 3
    assert all(f"'{verb}'" in found.stderr for verb in cli.VERBS)


def test_help_lists_every_verb_and_exits_with_0() -> None:
    found = run("--help")
    assert found.returncode == 0
    assert all(re.search(rf"^    {verb}\s", found.stdout, re.MULTILINE) for verb in cli.VERBS)


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_takes_json_and_has_code(verb: str) -> None:
    assert "--json" in run(verb, "--help").stdout
    assert callable(cli._resolve(verb))


def test_json_is_accepted_before_and_after_a_cache_action() -> None:
    parser = cli.build_parser()
    assert parser.parse_args(["cache", "--json", "info"]).json
    assert parser.parse_args(["cache", "info", "--json"]).json
    assert not parser.parse_args(["cache", "info"]).json


def test_layer_options_have_the_names_of_the_call() -> None:
    args = cli.build_parser().parse_args(["bench", *LAYER, "--ep-size", "2", "--precision", "fp8"])
    layer = (args.hidden, args.intermediate, args.num_experts, args.topk, args.ep_size, args.precision)
    assert layer == (2048, 768, 128, 8, 2, "fp8")


def test_version_prints_the_single_version() -> None:
    assert run("version").stdout.split()[:2] == ["prime-kernels", prime_kernels.__version__]
    assert json.loads(run("version", "--json").stdout)["version"] == prime_kernels.__version__
    assert run("--version").stdout == f"prime-kernels {prime_kernels.__version__}\n"


def test_version_shows_the_packs_and_a_damaged_list_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_manifest = packs.read_manifest
    monkeypatch.setattr(packs, "read_manifest", lambda: read_manifest(tmp_path))
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"prime-kernels {prime_kernels.__version__}  (packs none)\n"
    record = {"sha256": "0" * 64, "bytes": 1, "min_driver": 13000}
    rows = [{**record, "path": f"{name}/sm_90a.pkpack"} for name in ("cu130", "cu129")]
    (tmp_path / "MANIFEST.json").write_text(
        json.dumps({"schema": 1, "version": "1", "commit": "abcdef0123", "packs": rows})
    )
    assert cli.main(["version"]) == 0
    assert "(commit abcdef0, packs cu129+cu130)" in capsys.readouterr().out
    (tmp_path / "MANIFEST.json").write_text("{")
    assert cli.main(["version", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["codes"] == ["E10"]


def test_env_shows_what_is_set_and_redacts_home() -> None:
    found = run("env", "--json", PRIME_KERNELS_CACHE_DIR="/nonexistent/home/c", PRIME_KERNELS_JITT="never")
    shown = json.loads(found.stdout)
    assert found.returncode == 0
    assert shown["environment"] == {"PRIME_KERNELS_CACHE_DIR": "~/c", "PRIME_KERNELS_JITT": "never"}
    assert shown["unknown_variables"] == ["PRIME_KERNELS_JITT"]
    assert shown["version"] == prime_kernels.__version__
    assert "torch" in shown["distributions"]
    assert "PRIME_KERNELS_CACHE_DIR" in run("env", PRIME_KERNELS_CACHE_DIR="/c").stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/x", "~/x"),
        ("/home/ann", "~"),
        ("/home/anna/x", "/home/anna/x"),
        ("/scratch/ann/x", "/scratch/<user>/x"),
        ("https://ann:pw@host/simple", "https://<redacted>@host/simple"),
        ("a?token=abc&b=1", "a?token=<redacted>&b=1"),
        ("hf_abcdefghijklmnopqrst", "<redacted>"),
        ("cu129", "cu129"),
    ],
)
def test_redact_hides_home_user_and_credentials(text: str, shown: str) -> None:
    assert redact(text, "/home/ann", "ann") == shown


def test_a_bad_variable_is_reported_in_both_forms() -> None:
    plain = run("env", PRIME_KERNELS_JIT="sometimes")
    assert (plain.returncode, plain.stdout) == (3, "")
    assert "PRIME_KERNELS_JIT is 'sometimes'; need one of auto, warn, never" in plain.stderr
    parsed = json.loads(run("env", "--json", PRIME_KERNELS_JIT="sometimes").stdout)
    assert (parsed["result"], parsed["codes"]) == ("bad usage", ["E70"])


def test_trace_says_that_a_cpu_records_nothing_and_exits_with_2() -> None:
    found = run("trace", "--shape", "128x64x8x2", "--device", "cpu", "--json")
    assert found.returncode == 2
    assert json.loads(found.stdout)["codes"] == ["E07"]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UnsupportedConfig, 3),
        (errors.BackendUnavailable, 2),
        (errors.ArtifactError, 2),
        (errors.CompileError, 1),
        (errors.PeerTimeout, 1),
    ],
)
def test_an_error_ends_the_verb_with_its_exit_code(
    kind: type[errors.PrimeKernelsError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: object) -> int:
        raise kind("m.", facts={"path": Path("/p")}, remedy="Do r.")

    monkeypatch.setattr(cli, "_resolve", lambda verb: fail)
    assert cli.main(["version"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"prime-kernels: m. Do r. [{kind.default_code}]\n")
    assert cli.main(["version", "--json"]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["facts"] == {"path": "/p"}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.VERBS, "version", "package_that_is_not_there:run")
    assert cli.main(["version"]) == 2
    assert "needs the package package_that_is_not_there" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m prime_kernels env | true; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (found.stdout, found.stderr) == ("0\n", "")


@pytest.fixture(autouse=True)
def _fresh_settings() -> None:
    settings.cache_clear()
