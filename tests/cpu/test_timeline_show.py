# SPDX-License-Identifier: Apache-2.0
"""What a trace shows: the JSON that Perfetto loads, the picture, and the verb that writes both."""

from __future__ import annotations

import gzip
import importlib.util
import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from build_tools.tomlfile import read_toml
from prime_kernels import cli, trace
from prime_kernels.timeline import call as calls
from prime_kernels.timeline import perfetto, picture
from prime_kernels.timeline.states import HELPERS, STATES
from tests.helpers.timelines import busy_pass

ROOT = Path(__file__).resolve().parents[2]
SHELLS = Path.home() / ".local" / "share" / "perfetto" / "prebuilts"

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (the extra `plot`)"
)


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    path = perfetto.write(tmp_path / "forward.json", busy_pass())
    assert path == tmp_path / "forward.json"
    found: list[dict[str, Any]] = load(path)["traceEvents"]
    return found


def test_slices_of_a_thread_lie_inside_or_behind_one_another(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == 1 + 6 * 5  # five of six lanes of every SM recorded something
    for slices in threads.values():
        open_until: list[int] = []
        last = 0
        for event in slices:
            since, until = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            assert since >= last
            assert until > since
            while open_until and open_until[-1] <= since:
                open_until.pop()
            assert not open_until or until <= open_until[-1], event
            open_until.append(until)
            last = since


def test_everything_has_a_name_and_a_place(events: list[dict[str, Any]]) -> None:
    names: dict[tuple[str, int, int], str] = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert slices
    for event in slices:
        assert ("process_name", event["pid"], 0) in names
        assert ("thread_name", event["pid"], event["tid"]) in names
    launches = [event for event in slices if event["pid"] == perfetto.CALL_PID]
    assert [event["name"] for event in launches] == ["gate_up", "down"]
    assert names["process_name", perfetto.FIRST_SM_PID + 2, 0] == "SM 002"
    assert names["thread_name", perfetto.FIRST_SM_PID + 2, 5] == "math 0"
    tiles = [event for event in slices if event["name"] == "multiply"]
    assert len(tiles) == 2 * 6 * 2 * 5
    assert {tuple(event["args"]) for event in tiles} == {("expert", "row", "column", "steps", "rows", "operands")}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"tensor cores busy %", "rows copied GB/s"}


def test_the_loaders_waits_are_joined_and_counted(events: list[dict[str, Any]]) -> None:
    free = [event for event in events if event["name"] == "wait: a free stage"]
    raw = [launch.timeline for launch in busy_pass().launches if launch.timeline is not None]
    recorded = sum(int(((it.event == 1) & (it.detail == 4)).sum()) for it in raw)
    assert len(free) == 12  # one stretch of every CTA
    assert sum(event["args"]["waits"] for event in free) == recorded


def test_a_long_trace_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = perfetto.write(tmp_path / "a.json", busy_pass())
    monkeypatch.setattr(perfetto, "PLAIN_BYTES", 1000)
    packed = perfetto.write(tmp_path / "b.json", busy_pass())
    assert packed.name == "b.json.gz"
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert not (tmp_path / "b.json").exists()


def test_the_shortest_waits_are_left_out_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lengths(name: str) -> tuple[list[float], int]:
        found = [e for e in load(perfetto.write(tmp_path / name, busy_pass()))["traceEvents"] if e["ph"] == "X"]
        waits = sorted(event["dur"] for event in found if event["name"].startswith("wait"))
        return waits, len(found) - len(waits)

    every, others = lengths("a.json")
    monkeypatch.setattr(perfetto, "MOST_SLICES", 200)
    some, same = lengths("b.json")
    assert same == others
    assert len(some) < len(every)
    assert some[0] > every[0]
    assert some == every[-len(some) :]


def shell() -> str | None:
    """Perfetto's own trace processor where an earlier use has downloaded it; the tests download nothing."""
    found = sorted(SHELLS.glob("trace_processor_shell-*")) if SHELLS.is_dir() else []
    return str(found[-1]) if found else None


@pytest.mark.skipif(
    importlib.util.find_spec("perfetto") is None or shell() is None,
    reason="Perfetto's trace processor is not here: pip install perfetto, and use it once where there is a network",
)
def test_perfetto_loads_the_trace(tmp_path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    path = perfetto.write(tmp_path / "forward.json", busy_pass())
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=shell())) as processor:
        [errors] = processor.query("select sum(value) as n from stats where severity = 'error'")
        assert not errors.n
        [tiles] = processor.query("select count(*) as n from slice where name = 'multiply'")
        assert tiles.n == 2 * 6 * 2 * 5


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


def test_every_state_has_a_colour_and_a_label_of_its_own() -> None:
    assert set(picture.COLOURS) == set(picture.LABELS) == set(STATES)
    assert set(picture.HELPER_COLOURS) == {*picture.HELPER_LABELS, "idle"} == set(HELPERS)
    assert len(set(picture.COLOURS.values())) == len(STATES)


def test_the_raster_shows_the_state_that_lasted_longest() -> None:
    call = busy_pass()
    edges = torch.linspace(0, picture._span(call), 401, dtype=torch.float64).to(torch.int64)
    image = picture.raster(call, edges, 4)
    assert image.shape == (call.sms * 4, 400, 3)
    colours, counts = image.view(-1, 3).unique(dim=0, return_counts=True)
    seen = {tuple(colour): int(count) for colour, count in zip(colours.tolist(), counts.tolist(), strict=True)}
    assert seen[rgb(picture.COLOURS["multiply"])] > seen[rgb(picture.COLOURS["epilogue"])] > 0
    assert rgb(picture.HELPER_COLOURS["copies"]) in seen
    busy, moved = picture.curves(call, edges)
    assert 50 < float(busy.max()) <= 100.001
    assert float(busy.min()) >= 0
    assert float(moved.max()) > 0
    bytes_moved = float((moved * (edges[1:] - edges[:-1])).sum())
    assert bytes_moved == pytest.approx(2 * 6 * 10 * 2 * 8 * 2 * call.config.hidden)


@needs_matplotlib
def test_the_picture_is_legible_at_1200_pixels(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = picture.draw(tmp_path / "forward.png", busy_pass(), "one pass\nand its time")
    assert path is not None
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (1200, 1000)
    pixels = (torch.from_numpy(imread(path).copy())[..., :3] * 255).round().to(torch.uint8)
    share = {
        name: float((pixels == torch.tensor(rgb(c))).all(-1).float().mean()) for name, c in picture.COLOURS.items()
    }
    assert share["multiply"] > 0.05
    assert share["epilogue"] > 0.005
    dark = (pixels < 80).all(-1)
    assert int(dark[:60].sum()) > 300, "no heading"
    assert int(dark[60:180].sum()) > 1000, "no legend"
    assert int(dark[945:].sum()) > 100, "no time axis"


def test_without_matplotlib_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    calls.save(tmp_path / "old.records", busy_pass())
    out = tmp_path / "out"
    assert cli.main(["trace", "--records", str(tmp_path / "old.records"), "--out", str(out)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["forward.json", "forward.txt"]


@needs_matplotlib
def test_the_verb_shows_what_was_recorded_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls.save(tmp_path / "old.records", busy_pass("backward"))
    out = tmp_path / "out"
    arguments = ["trace", "--records", str(tmp_path / "old.records"), "--out", str(out), "--keep-records"]
    assert cli.main([*arguments, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["passes"]
    names = ["backward.json", "backward.png", "backward.records"]
    assert [Path(name).name for name in found["files"]] == names
    assert sorted(path.name for path in out.iterdir()) == [*names, "backward.txt"]
    assert (out / "backward.records").read_bytes() == (tmp_path / "old.records").read_bytes()
    assert found["accounted"] == pytest.approx(1.0)
    assert len(found["waits"]) == 5
    assert load(out / "backward.json")["otherData"]["direction"] == "backward"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 3, "--shape is None; need a name"),
        (["--shape", "2048x768"], 3, "--shape is '2048x768'"),
        (["--shape", "100x64x8x2"], 3, "hidden"),
        (["--shape", "qwen3-30b-a3b", "--device", "cpu"], 2, "only the CUDA kernels record"),
        (["--shape", "qwen3-30b-a3b", "--virtual-ranks", "3"], 3, "a divisor of the 128 experts"),
        (["--shape", "qwen3-30b-a3b", "--virtual-ranks", "16"], 3, "--virtual-ranks is 16; need at most 8"),
        (["--shape", "qwen3-30b-a3b", "--virtual-ranks", "4", "--pacing", "40", "--device", "cpu"], 2, "only the CUDA"),
        (["--shape", "qwen3-30b-a3b", "--pacing", "40"], 3, "--pacing is 40 GB/s"),
        (["--records", "nowhere"], 3, "holds no traced pass"),
    ],
)
def test_what_cannot_be_traced_says_why(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", *arguments]) == status
    assert message in capsys.readouterr().err


def test_the_shapes_are_those_of_the_benchmarks() -> None:
    table = read_toml(ROOT / "benchmarks" / "shapes.toml")
    del table["tiny"]
    fields = ("hidden", "intermediate", "num_experts", "topk")
    assert {name: tuple(row[field] for field in fields) for name, row in table.items()} == trace.SHAPES
    config = trace.layer("128x64x8x2", 77)
    found = (config.hidden, config.intermediate, config.num_experts, config.topk, config.max_tokens_per_rank)
    assert found == (128, 64, 8, 2, 77)
