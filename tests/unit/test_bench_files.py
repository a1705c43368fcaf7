# SPDX-License-Identifier: Apache-2.0
"""The source stamp of measurements, and the pages rendered from records."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import render, stamp
from tests.unit.test_bench_parts import make_record


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git repository with two files and one commit."""
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("b = 2\n")
    (tmp_path / ".gitignore").write_text("/build/\n")
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def write_stamp(tree: Path) -> dict[str, object]:
    made = stamp.make_stamp(tree)
    (tree / "build").mkdir(exist_ok=True)
    (tree / stamp.STAMP).write_text(json.dumps(made))
    return made


def test_a_stamp_fits_the_tree_it_was_made_of_without_git(tree: Path) -> None:
    made = write_stamp(tree)
    assert made["dirty"] is False
    assert made["files"] == [".gitignore", "a.py", "sub/b.py"]
    (tree / ".git").rename(tree.parent / f"{tree.name}-git")
    assert stamp.read_stamp(tree) == (made, None)


def test_a_changed_or_missing_file_makes_the_stamp_unfit(tree: Path) -> None:
    write_stamp(tree)
    (tree / "a.py").write_text("a = 2\n")
    found, why = stamp.read_stamp(tree)
    assert found is None
    assert why is not None
    assert "make stamp" in why
    (tree / "a.py").write_text("a = 1\n")
    assert stamp.read_stamp(tree)[0] is not None
    (tree / "a.py").unlink()
    assert stamp.read_stamp(tree)[0] is None


def test_uncommitted_and_untracked_sources_make_a_stamp_dirty(tree: Path) -> None:
    (tree / "new.py").write_text("")
    assert stamp.make_stamp(tree)["dirty"] is True
    (tree / "new.py").unlink()
    (tree / "a.py").write_text("a = 3\n")
    assert stamp.make_stamp(tree)["dirty"] is True


def test_without_a_stamp_the_reason_says_what_to_run(tmp_path: Path) -> None:
    assert stamp.read_stamp(tmp_path) == (None, "build/stamp.json is missing; run `make stamp` where the repository is")


def test_the_digest_depends_on_names_and_contents_and_not_on_order(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    (tmp_path / "y").write_text("2")
    digest = stamp.digest_files(tmp_path, ["x", "y"])
    assert stamp.digest_files(tmp_path, ["y", "x"]) == digest
    (tmp_path / "x").write_text("2")
    (tmp_path / "y").write_text("1")
    assert stamp.digest_files(tmp_path, ["x", "y"]) != digest


def test_the_newest_record_of_a_configuration_is_rendered() -> None:
    old, new = make_record(ms=3.0, ratio=2.5), make_record(time="2026-11-30T12:00:00+00:00")
    other = make_record(op="backward")
    assert render.newest([new, other, old]) == [new, other]
    page = render.results_page([new, other, old])
    assert "2.310 (2.300-2.330)" in page
    assert "3.000" not in page
    assert "530 (69%)" in page
    assert "| 7.40 |" in page
    assert "| 7.40 (5.60 local) |" in render.results_page([make_record(local_baseline_ms=5.6)])
    assert "Where these numbers stop meaning anything" in page


def test_wide_spread_is_no_ranking_and_missing_figures_are_dashes() -> None:
    table = render.results_table([make_record(p90=2.6, ratio=None, baseline_ms=None, baseline=None, power_w=None)])
    assert "not a ranking" in table
    assert "| - | - |" in table
    assert "1755, -" in table
    assert "not a ranking" not in render.results_table([make_record()])


def test_the_readme_shows_only_the_fused_backend_as_it_comes() -> None:
    shown = make_record()
    hidden = [
        make_record(backend="grouped", ms=1.01),
        make_record(routing="zipf", ms=1.02),
        make_record(tokens=128, ms=1.03),
        make_record(virtual_ranks=2, pacing_GBs=165, ms=1.04),
        make_record(ablation="no transport", ms=1.05),
    ]
    table = render.readme_table([shown, *hidden])
    assert "2.31" in table
    assert "1.0" not in table
    assert render.readme_table(hidden[:1]) == render.EMPTY


def test_text_between_markers_is_replaced_once() -> None:
    text = "a\n<!-- b -->\nold\n<!-- e -->\nz\n"
    assert render.replace_between(text, "<!-- b -->", "<!-- e -->", "new") == "a\n<!-- b -->\nnew\n<!-- e -->\nz\n"
    for broken in ("no markers", "<!-- e --><!-- b -->", text + text):
        with pytest.raises(ValueError, match="once each"):
            render.replace_between(broken, "<!-- b -->", "<!-- e -->", "new")


def test_the_pages_in_the_repository_are_what_the_records_say() -> None:
    assert render.main(["--check"]) == 0
