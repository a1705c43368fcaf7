# SPDX-License-Identifier: Apache-2.0
"""wheels.yml: pinned, without standing permissions, and made of commands that also run outside of CI."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from build_tools import lint_workflow, plan
from build_tools.tomlfile import read_toml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
TEXT = WORKFLOW.read_text()


def test_the_file_at_the_top_is_the_workflow() -> None:
    assert (ROOT / "wheels.yml").is_symlink()
    assert (ROOT / "wheels.yml").resolve() == WORKFLOW


def test_every_action_and_image_is_pinned_by_digest() -> None:
    uses = re.findall(r"uses: (\S+)(.*)", TEXT)
    assert uses
    for action, rest in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", rest), rest
    assert all("@sha256:" in image for image in re.findall(r"container: (\S+)", TEXT))


def test_no_job_has_a_permission_that_it_does_not_name() -> None:
    assert "\npermissions: {}\n" in TEXT
    assert re.findall(r"^      ([\w-]+: write)$", TEXT, re.M) == ["id-token: write"]
    assert "persist-credentials: true" not in TEXT
    assert TEXT.count("persist-credentials: false") == TEXT.count("actions/checkout@")


def test_every_step_is_one_make_target_or_one_build_tools_command() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    runs = re.findall(r"run: (.+)", TEXT)
    assert len(runs) >= 10
    for run in runs:
        command = re.fullmatch(r"(?:make ([\w-]+)|\S*python3? -m (build_tools\.\w+))(?: .*)?", run)
        assert command, run
        if command[1]:
            assert command[1] in targets, run
        else:
            assert importlib.util.find_spec(command[2]), run


def test_no_expression_is_pasted_into_a_shell() -> None:
    assert not [run for run in re.findall(r"run: (.+)", TEXT) if "${{" in run]


def test_publishing_waits_for_the_gpu() -> None:
    publish = TEXT[TEXT.index("\n  publish:") :]
    needs = re.search(r"needs: \[(.*)\]", publish)
    assert needs
    wanted = {"plan", "test", "wheel", "index", "install-test", "install-test-oldest", "jit-cpu", "gpu"}
    assert wanted == set(needs[1].split(", "))
    assert "--require-gpu" in TEXT


def test_the_plan_lists_every_target_and_slim_wheel() -> None:
    lines = plan.plan()
    assert set(lines) == {"version", "archs", "keys", "slims"}
    assert len(plan.slims()) == 2 * lines["archs"].count("sm_")


CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2027-01-31\n\n- x\n"


@pytest.mark.parametrize(
    ("tag", "version", "problem"),
    [
        ("v1.2.0", "1.2.0", None),
        ("1.2.0", "1.2.0", "tag 1.2.0 is not v1.2.0"),
        ("v1.2.1", "1.2.0", "tag v1.2.1 is not v1.2.0"),
        ("v1.2.1", "1.2.1", "no section '## [1.2.1] - <date>'"),
        ("v1.3.0.dev0", "1.3.0.dev0", "no release version"),
    ],
)
def test_tag_version_and_changelog_must_agree(tag: str, version: str, problem: str | None) -> None:
    found = plan.release_problems(tag, version, CHANGELOG)
    assert (found == []) if problem is None else any(problem in p for p in found)


def test_the_command_fails_on_a_tag_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--tag", "v999.0.0"]) == 1
    assert "tag v999.0.0 is not" in capsys.readouterr().err
    assert plan.main([]) == 0
    assert "archs=[" in capsys.readouterr().out


def finding(kind: str, message: str) -> dict[str, object]:
    return {"file": "/x/wheels.yml", "line": 3, "column": 5, "kind": kind, "message": message}


def test_only_labels_that_we_know_are_taken_out_of_the_findings() -> None:
    known = [finding("runner-label", f'label "{name}" is unknown. available ...') for name in lint_workflow.LABELS]
    assert lint_workflow.problems(known) == []
    others = [
        finding("runner-label", 'label "ubuntu-99" is unknown'),
        finding("expression", 'label "h200" is unknown'),
    ]
    assert lint_workflow.problems([*known, *others]) == [
        'wheels.yml:3:5: label "ubuntu-99" is unknown [runner-label]',
        'wheels.yml:3:5: label "h200" is unknown [expression]',
    ]


def test_every_label_taken_out_is_used() -> None:
    assert all(re.search(rf"[\[ ,]{re.escape(name)}[\]\s,}}]", TEXT) for name in lint_workflow.LABELS)


def test_a_missing_linter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lint_workflow.main(["--actionlint", str(tmp_path)]) == 1


def test_cibuildwheel_s_list_is_one_build_for_each_python_and_machine() -> None:
    config = read_toml(ROOT / "pyproject.toml")
    patterns = config["tool"]["cibuildwheel"]["build"].split()
    assert patterns == [f"{python}-manylinux_*" for python in lint_workflow.PYTHONS]
    assert config["project"]["requires-python"] == ">=3.10"
    every = [f"{python}-manylinux_{machine}" for python in lint_workflow.PYTHONS for machine in lint_workflow.MACHINES]
    assert lint_workflow.identifier_problems(every[::-1]) == []
    assert "cp314-manylinux_aarch64" in lint_workflow.identifier_problems(every[:-1])[0]
    assert lint_workflow.identifier_problems([*every, "cp310-musllinux_x86_64"])
    tested = re.search(r"python: \[(.*)\]", TEXT)
    assert tested
    assert [f"cp{v.strip()[1:-1].replace('.', '')}" for v in tested[1].split(",")] == list(lint_workflow.PYTHONS)


@pytest.mark.skipif(importlib.util.find_spec("cibuildwheel") is None, reason="no cibuildwheel here")
def test_cibuildwheel_itself_says_so() -> None:
    assert lint_workflow.identifier_problems(lint_workflow.identifiers()) == []
