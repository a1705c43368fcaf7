# SPDX-License-Identifier: Apache-2.0
"""What a trace says in numbers: the floor, the causes of the distance to it, shares of roles, waits."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import pytest

from prime_kernels import trace
from prime_kernels.errors import UnsupportedConfig
from prime_kernels.timeline import call as calls
from prime_kernels.timeline import floor, summary
from prime_kernels.timeline import records as rec
from prime_kernels.timeline.call import Launch, Pass
from tests.helpers.timelines import LAYER, buffer, busy_pass, lanes

M = 16384 * 8
UNIFORM = (1024,) * 128


def qwen(name: str) -> floor.MegaMoEConfig:
    return trace.layer(name, 16384)


@pytest.mark.parametrize(
    ("shape", "forward_tflop", "forward_gb", "backward_gb"),
    # H, I and E as published; bytes by hand: rows x (8H + 8I) + 6EHI + 4TH, and rows x (12H + 20I) + 12EHI + 4TH.
    [("qwen3-30b-a3b", 1.237, 4.295, 7.785), ("qwen3-235b-a22b", 4.948, 11.006, 20.402)],
)
def test_the_floor_of_the_models(shape: str, forward_tflop: float, forward_gb: float, backward_gb: float) -> None:
    config = qwen(shape)
    forward = floor.floor_of("forward", config, 16384, UNIFORM, ["plan", "gate_up", "down", "combine"])
    assert forward.arithmetic_ms == pytest.approx(forward_tflop / 700 * 1e3, rel=1e-3)
    assert forward.memory_ms == pytest.approx(forward_gb / 4.0, rel=1e-3)
    backward = floor.floor_of("backward", config, 16384, UNIFORM, ["down_grad", "gate_up_grad", "wgrad"])
    assert backward.arithmetic_ms == pytest.approx(2 * forward.arithmetic_ms)
    assert backward.memory_ms == pytest.approx(backward_gb / 4.0, rel=1e-3)
    assert forward.ms == forward.arithmetic_ms > forward.memory_ms


def test_rows_are_padded_to_64_of_every_expert() -> None:
    assert floor.padded_rows([0, 1, 64, 65]) == 0 + 64 + 64 + 128
    one = floor.padded_flops("down", LAYER, [1, 0, 0, 0])
    assert one == 2 * 64 * 512 * 256
    assert floor.padded_flops("gate_up", LAYER, [64]) == 2 * one
    assert floor.padded_flops("combine", LAYER, [64]) == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_causes_add_up_to_the_distance(direction: str) -> None:
    call = busy_pass(direction)
    found = summary.summarise(call)
    assert found.gap_ms > 0
    assert sum(cause.ms for cause in found.causes) == pytest.approx(found.gap_ms, rel=1e-6)
    assert found.accounted == pytest.approx(1.0)
    assert found.accounted_normal == pytest.approx(found.gap_ms / (found.normal_ms - found.floor_ms))
    assert [cause.ms for cause in found.causes] == sorted((cause.ms for cause in found.causes), reverse=True)
    by_name = {cause.name: cause.ms for cause in found.causes}
    assert by_name["launches without products: plan"] == 0.01
    assert by_name["before and after launches: the device's own time for them"] == pytest.approx(0.004)
    assert (found.bound == "memory") == (direction == "backward" or call.floor.memory_ms > call.floor.arithmetic_ms)


def small(memory_bound: bool) -> Pass:
    """One launch of one CTA, 1 ms long, that multiplies for 600 us of it."""
    cta = lanes(0, 1_000_000)
    cta[4].wait(0, 100_000, rec.TILE_FULL).tile(100_000, 700_000).put(700_000, 800_000, rec.EPILOGUE)
    cta[4].end = 1_000_000
    launch = Launch("down", 1.25, 1.2, 1.26, rec.used(buffer([cta])))
    counts = (64, 0, 0, 0) if memory_bound else (64_000_00, 0, 0, 0)
    return Pass("forward", "a GPU", 1, LAYER, 64, counts, (launch,))


def test_the_distance_by_hand() -> None:
    call = small(memory_bound=True)
    found = summary.summarise(call)
    arithmetic = 2 * 64 * 512 * 256 / 700e12 * 1e3
    memory = (64 * (8 * 512 + 8 * 256) + 6 * 4 * 512 * 256 + 4 * 64 * 512) / 4e12 * 1e3
    assert found.floor_ms == pytest.approx(memory)
    assert found.bound == "memory"
    causes = {cause.name: cause.ms for cause in found.causes if cause.ms}
    assert causes == pytest.approx(
        {
            "tensor cores busy, but slower than the floor's 700 TFLOP/s": 0.6 - arithmetic,
            "before and after launches: the device's own time for them": 0.25,
            "end of launches: an SM is done before the last one": 0.2,
            "start of launches: before an SM's first tile": 0.1,
            "tensor cores idle: both warpgroups in the epilogue": 0.1,
            "memory floor above the arithmetic one": arithmetic - memory,
        }
    )
    assert found.slowdown == pytest.approx(0.05)
    shares = {share.role: share for share in found.roles}
    assert shares["math"].waiting == pytest.approx(0.05)
    assert shares["math"].working == pytest.approx(0.95)
    assert all(sum(share[1:]) == pytest.approx(1.0) for share in found.roles)
    [(role, what, ms, share, times)] = found.waits
    assert (role, what, times) == ("math", "the next tile", 1)
    assert (ms, share) == (pytest.approx(0.05), pytest.approx(0.05))


def test_at_most_five_waits_are_named_and_the_longest_first() -> None:
    found = summary.summarise(busy_pass()).waits
    assert len(found) == summary.TOP_WAITS == 5
    assert [wait.ms for wait in found] == sorted((wait.ms for wait in found), reverse=True)
    assert {(wait.role, wait.what) for wait in found} == {
        ("schedule", "room in the tile list"),
        ("load", "a free stage"),
        ("load", "rows being copied"),
        ("math", "operands"),
        ("math", "the next tile"),
    }


def test_the_text_says_what_the_numbers_say() -> None:
    call = busy_pass()
    found = summary.summarise(call)
    text = summary.text(call, found)
    assert f"{found.floor_ms:.3f} ms floor ({found.bound}" in text
    assert "explain 100.0%" in text
    assert "clock tick 32 ns" in text
    assert all(cause.name in text for cause in found.causes if cause.ms)
    assert all(f"{wait.role} waits for {wait.what} ({wait.times} times)" in text for wait in found.waits)
    assert "found no room" not in text
    assert "do not trust" not in text
    worse = dataclasses.replace(found, causes=found.causes[1:], lost=3)
    assert "do not trust them" in summary.text(call, worse)
    assert "3 records found no room" in summary.text(call, worse)


def test_a_pass_comes_back_from_its_file(tmp_path: Path) -> None:
    call = busy_pass()
    path = tmp_path / "forward.records"
    calls.save(path, call)
    again = calls.load(path)
    assert summary.summarise(again) == summary.summarise(call)
    assert (again.device, again.counts, again.tokens) == (call.device, call.counts, call.tokens)
    first = path.read_bytes()
    calls.save(path, again)
    assert path.read_bytes() == first


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"no records"), None])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnsupportedConfig, match="holds no traced pass"):
        calls.load(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SCHEMA", 7)
    calls.save(tmp_path / "x", busy_pass())
    monkeypatch.undo()
    with pytest.raises(UnsupportedConfig, match="schema 7, need 1 or 2"):
        calls.load(tmp_path / "x")
