# SPDX-License-Identifier: Apache-2.0
"""The demo passes for the layer as it is, and fails for a layer that is subtly wrong."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import prime_kernels
from prime_kernels import demo
from prime_kernels.demo_report import AGREEMENT, WINDOW, Report, largest_difference
from prime_kernels.errors import UnsupportedConfig

CPU = torch.device("cpu")


def arguments(folder: Path, *, steps: int, as_json: bool = True) -> argparse.Namespace:
    return argparse.Namespace(steps=steps, device="cpu", out=str(folder), json=as_json)


def test_the_layer_learns_agrees_with_plain_torch_and_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(arguments(tmp_path, steps=120)) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["result"], report["backend"], report["dtype"]) == ("ok", "reference", "float32")
    assert report["final_loss"] < 0.5 * report["first_loss"]
    assert 0 < report["max_relative_difference"] <= report["allowed_difference"] == 1e-4
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert captured.err.splitlines()[-1].startswith(f"[{'#' * 30}] step 120/120")


def wrong_scores(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """No gradient to the router."""
    return demo.dense_experts(x, ids, weights.detach(), w_gate_up, w_down)


def wrong_halves(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Gate and up swapped."""
    return demo.dense_experts(x, ids, weights, w_gate_up.roll(demo.INTERMEDIATE, 1), w_down)


def wrong_token(x: Tensor, ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """One token of 64 loses its second expert."""
    mask = torch.ones_like(weights)
    mask[::64, 1] = 0
    return demo.dense_experts(x, ids, weights * mask, w_gate_up, w_down)


@pytest.mark.parametrize("wrong", [wrong_scores, wrong_halves, wrong_token], ids=lambda f: f.__doc__ or "")
def test_a_wrong_layer_does_not_agree(wrong: Callable[..., Tensor]) -> None:
    ours, plain, _ = demo.train(12, CPU, wrong, io.StringIO())
    assert largest_difference(ours, plain) > AGREEMENT[torch.float32]


def test_the_difference_is_that_of_running_means() -> None:
    plain = [2.0] * 60
    ours = [2.0] * 30 + [2.5] + [2.0] * 29
    assert largest_difference(plain, plain) == 0
    assert largest_difference(ours, plain) == pytest.approx(0.5 / 2 / WINDOW)
    assert largest_difference([2.5, 2.0], [2.0, 2.0]) == pytest.approx(0.25)
    assert math.isnan(largest_difference([*plain[1:], math.nan], plain))


def test_too_few_steps_to_learn_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(arguments(tmp_path, steps=2, as_json=False)) == 1
    out = capsys.readouterr().out
    assert "learned       NO" in out
    assert "curves agree  yes" in out


def test_a_wrong_call_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*tensors: Tensor, runtime: object) -> Tensor:
        return wrong_halves(*tensors)

    monkeypatch.setattr(prime_kernels, "mega_moe", call)
    assert demo.run(arguments(tmp_path, steps=3)) == 1
    assert json.loads(capsys.readouterr().out)["result"] == "mismatch"


def test_a_loss_that_is_not_a_number_never_agrees() -> None:
    report = Report("b", "d", "float32", 3, 1.0, 0.1, 0.1, math.nan, 1e-3, 1.0, 1.0, None)
    assert report.learned
    assert not report.agrees


def test_without_matplotlib_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    demo.run(arguments(tmp_path, steps=2, as_json=False))
    assert "not drawn: matplotlib is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_one_step_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match="--steps is 1; need at least 2"):
        demo.demo(1, CPU, tmp_path, io.StringIO())


def test_the_bar_is_redrawn_on_a_terminal_and_short_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    for step in range(1, 201):
        demo._progress(terminal, step, 200, 0.5)
        demo._progress(log, step, 200, 0.5)
    assert terminal.getvalue().count("\r") == 200
    assert terminal.getvalue().count("\n") == 1
    assert log.getvalue().count("\n") == 10
