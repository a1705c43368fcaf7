# SPDX-License-Identifier: Apache-2.0
"""Pictures of made-up records: which of them there are, what they show, and that they are legible at 1200 pixels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, render
from tests.unit.test_bench_parts import make_record

pytest.importorskip("matplotlib", reason='needs the extra "plot"')

BOTH = [make_record(), make_record(op="backward", ms=4.6, baseline_ms=9.1, tflops=520.0)]
MORE_TOKENS = [make_record(tokens=tokens, ms=tokens / 7000, baseline_ms=tokens / 2200) for tokens in (2048, 4096)]
RANKS = [
    make_record(virtual_ranks=ranks, pacing_GBs=pace, ms=2.4 * ranks * (1.1 if pace else 1), one_rank_ms=2.3 * ranks)
    for ranks in (2, 4)
    for pace in (0, 330 / ranks)
]


def names(found: list[dict[str, Any]], folder: Path) -> list[str]:
    return [path.name for path in plots.write(render.newest(found), folder)]


def labels(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.get_legend().get_texts()]


def test_only_what_has_records_is_drawn(tmp_path: Path) -> None:
    assert names([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    assert names(BOTH, tmp_path) == ["tflops.png", "speedup.png"]
    assert names(BOTH + MORE_TOKENS, tmp_path) == ["time-tokens.png", "tflops.png", "speedup.png"]
    assert names(BOTH + RANKS, tmp_path) == ["tflops.png", "time-ranks.png", "speedup.png"]
    hidden = {"backend": "grouped"}, {"routing": "zipf"}, {"ablation": "chained"}, {"num_sms": 100}, {"op": "step"}
    assert names([make_record(**other) for other in hidden], tmp_path / "none") == []


def test_every_picture_is_legible_at_1200_pixels(tmp_path: Path) -> None:
    from matplotlib.image import imread

    for path in plots.write(render.newest(BOTH + MORE_TOKENS + RANKS), tmp_path):
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert width == 1200
        assert height >= 400
        pixels = imread(path)[..., :3]
        assert (pixels < 0.35).all(-1).sum() > 2000, f"no text in {path.name}"
        assert (pixels.max(-1) - pixels.min(-1) > 0.3).sum() > 500, f"no colour in {path.name}"
    assert len(list(tmp_path.iterdir())) == 4


def test_the_same_records_give_the_same_file(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in plots.write(BOTH, tmp_path)]
    assert [path.read_bytes() for path in plots.write(BOTH[::-1], tmp_path)] == first


def test_time_against_tokens_has_the_floor_and_the_baseline() -> None:
    figure = plots.time_against_tokens(BOTH + MORE_TOKENS)
    [axes] = figure.axes  # the backward has one T only
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["this package"] == [[2048, 2048 / 7000], [4096, 4096 / 7000], [16384, 2.31]]
    assert lines["unfused recipe"][-1] == [16384, 7.4]
    # 16384 x 8 rows of 128 experts: nothing is padded.
    assert lines["floor"][-1][1] == pytest.approx(6 * 16384 * 8 * 2048 * 768 / 700e12 * 1e3)
    assert plots.floor_ms(make_record(gpu="NVIDIA B200")) is None


def test_virtual_ranks_are_marked_as_such() -> None:
    figure = plots.time_against_ranks(BOTH + RANKS)
    found = labels(figure)
    paces = ["no pace", "330 / R GB/s each"]
    assert found == [f"virtual ranks of one GPU, {pace}" for pace in paces] + ["one rank with all their tokens"]
    assert "GPUs" in labels(plots.time_against_ranks([*BOTH, make_record(ep=2, ms=2.5)]))
    assert plots.time_against_ranks(BOTH) is None


def test_records_of_different_paces_stand_beside_one_another() -> None:
    assert len(render.newest(RANKS)) == 4


def test_the_speed_up_is_the_time_of_the_other_over_ours() -> None:
    rows = {(system.split()[0], layer, op): factor for system, layer, op, factor in plots.speedups(BOTH)}
    assert rows["SonicMoE", "qwen3-30b-a3b, 1 GPU", "backward"] == pytest.approx(4.403 / 4.6)
    assert rows["LigerCute", "qwen3-30b-a3b, 1 GPU", "forward"] == pytest.approx(2.981 / 2.31)
    assert {layer for _, layer, _ in rows} == {"qwen3-30b-a3b, 1 GPU"}
    two = [make_record(ep=2, ms=2.5), make_record(ep=2, ms=5, op="backward")]
    rows = {(system.split()[0], layer, op): factor for system, layer, op, factor in plots.speedups(two)}
    assert rows["DeepGEMM", "qwen3-30b-a3b, 2 GPUs", "forward"] == pytest.approx(3.086 / 2.5)
    assert ("DeepGEMM", "qwen3-30b-a3b, 2 GPUs", "backward") not in rows
    for other in ({"gpu": "NVIDIA H100"}, {"tokens": 8192}, {"virtual_ranks": 2}):
        assert plots.speedups([make_record(**other)]) == []


def test_the_verb_writes_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        render.main(
            ["--check", "--plots", str(tmp_path / "images"), "--results", str(render.ROOT / "benchmarks" / "results")]
        )
        == 0
    )
    assert "written" in capsys.readouterr().out
    assert (tmp_path / "images" / "tflops.png").read_bytes().startswith(b"\x89PNG")
