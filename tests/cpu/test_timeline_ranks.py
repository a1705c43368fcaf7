# SPDX-License-Identifier: Apache-2.0
"""Traces of virtual ranks: what their SMs do for want of peers, what they launch, and what is shown of all of them."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_kernels import MegaMoEConfig, cli, trace
from prime_kernels.errors import LaunchError, UnsupportedConfig
from prime_kernels.moe.cuda_variants import arena_layout
from prime_kernels.peers.loopback import create_peers
from prime_kernels.timeline import call as calls
from prime_kernels.timeline import capture_ranks, floor, perfetto, picture, states, summary
from prime_kernels.timeline import records as rec
from tests.helpers.fake_capture import Recorder, Stream
from tests.helpers.timelines import LAYER, buffer, busy_ranks, lanes

CONFIG = MegaMoEConfig(num_experts=4, topk=2, hidden=128, intermediate=64, max_tokens_per_rank=96)
FORWARD = ["plan_peers", "gate_up_peers", "down_peers", "combine"]
BACKWARD = ["stage_peers", "down_grad_peers", "gate_up_grad_peers", "wgrad", "combine"]

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (the extra `plot`)"
)


def test_waits_for_peers_are_causes_of_their_own() -> None:
    cta, other = lanes(0, 1000), lanes(0, 600)
    load, schedule, copy, _, math, _ = cta
    # No tile until 200: 0-120 because a peer is not ready, and its rows are on their way from 120.
    copy.wait(0, 120, rec.PEER_READY).put(120, 180, rec.COPY, 0, remote=8)
    schedule.wait(0, 190, rec.INPUT)
    math.wait(0, 200, rec.TILE_FULL).tile(200, 500).wait(300, 400, rec.STAGE_FULL)
    # The loader's rows are late from 320: 20 ns of it for want of a peer.
    load.wait(320, 400, rec.INPUT)
    copy.wait(330, 350, rec.PEER_READY)
    # Done at 500, sends until 700, and hears the last peer at 950.
    copy.put(550, 700, rec.PUSH, 1, remote=3)
    load.wait(720, 950, rec.PEER_DONE)
    found = rec.parse(rec.used(buffer([cta, other])))
    assert found.remote[found.event == rec.COPY].tolist() == [8]
    assert found.remote[found.event == rec.PUSH].tolist() == [3]
    swept = states.sweep(found)
    own = [int(swept.binned(swept.state, i, torch.tensor([0, 1000]))[0, 0]) for i in range(len(states.STATES))]
    assert {name: ns for name, ns in zip(states.STATES, own, strict=True) if ns} == {
        "peers": 120 + 20,
        "rows": (190 - 120) + (80 - 20),
        "start": 200 - 190,
        "multiply": 300 - 100,
        "operands": 100 - 80,
        "sending": 150,
        "last peer": 230,
        "tail": 500 - 150 - 230,
    }
    # The CTA without work waits for the launch's last peer, too.
    last = states.STATES.index("last peer")
    assert swept.binned(swept.state, last, torch.tensor([0, 1000])).sum(1).tolist() == [230, 230]
    helper = states.HELPERS.index
    assert int(swept.binned(swept.helper, helper("sends"), torch.tensor([0, 1000]))[0, 0]) == 150
    assert int(swept.binned(swept.helper, helper("waits for a peer"), torch.tensor([0, 1000]))[0, 0]) == 370


def test_what_ranks_send_one_another_is_told_from_what_stays() -> None:
    cta = lanes(0, 1000)
    cta[2].put(0, 100, rec.COPY, 0, remote=8).put(100, 200, rec.COPY, 1).put(400, 600, rec.PUSH, 0, remote=5)
    timeline = rec.parse(rec.used(buffer([cta])))
    edges = torch.tensor([0, 50, 200, 500, 1000])
    assert states.remote_bytes(timeline, rec.COPY, 1000, edges).tolist() == pytest.approx([4000, 4000, 0, 0])
    assert states.remote_bytes(timeline, rec.PUSH, 1000, edges).tolist() == pytest.approx([0, 0, 2500, 2500])
    assert states.copied_bytes(timeline, 1000, edges).tolist() == pytest.approx([8000, 24000, 0, 0])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_causes_of_all_ranks_add_up_to_the_distance(direction: str) -> None:
    call = busy_ranks(direction, pacing_gb_s=None)
    found = summary.summarise(call)
    assert found.ms == call.ms > max(sum(it.ms for it in call.launches if it.rank == rank) for rank in (0, 1))
    assert sum(cause.ms for cause in found.causes) == pytest.approx(found.gap_ms, rel=1e-9)
    causes = {cause.name: cause.ms for cause in found.causes}
    assert causes["launches without products: plan_peers"] == pytest.approx(0.01)  # a mean, not a sum
    assert causes["tensor cores idle: a peer is not ready"] > 0
    assert causes["end of launches: results on their way to peers"] > 0
    assert causes["end of launches: a peer is not done"] > 0
    assert causes["a rank is done before the last one, or begins later"] > 0
    waits = {(wait.role, wait.what): wait for wait in found.waits}
    assert waits["math", "the next tile"].times == 2 * 2 * 3 * 2


def test_paced_ranks_have_a_floor_of_their_link() -> None:
    call = busy_ranks(pacing_gb_s=50.0)
    assert call.floor.transport_ms == pytest.approx(0.2)
    found = summary.summarise(call)
    assert (found.bound, found.floor_ms) == ("transport", pytest.approx(0.2))
    assert sum(cause.ms for cause in found.causes) == pytest.approx(found.gap_ms, rel=1e-9)
    # The chip's floor is that of the tokens of all ranks.
    alone = floor.floor_of("forward", LAYER, 1024, call.counts, ["gate_up", "down"])
    assert call.floor.arithmetic_ms == alone.arithmetic_ms > 0
    assert call.floor.memory_ms == alone.memory_ms
    text = summary.text(call, found)
    assert "forward of 512 tokens on each of 2 virtual ranks at 50 GB/s, 4 experts" in text
    assert "10 MB over the busiest link" in text
    assert text.count("gate_up_peers") == 1


def test_the_busiest_link_by_hand() -> None:
    # Tokens 0 and 1 are of rank 0, tokens 2 and 3 of rank 1; holders of their two slots.
    owners = torch.tensor([0, 0, 1, 1])
    holders = torch.tensor([[1, 1], [0, 1], [0, -1], [1, 1]])
    # Rank 0 gives two tokens and takes one; rank 1 gives three results and one token, rank 0 one result.
    assert floor.link_bytes(owners, holders, 2, 10, pulls=1) == 10 * max(2 + 1, 1 + 3)
    assert floor.link_bytes(owners, holders, 2, 10, pulls=2) == 10 * max(4 + 1, 2 + 3)


def test_a_pass_of_ranks_comes_back_from_its_file(tmp_path: Path) -> None:
    call = busy_ranks()
    calls.save(tmp_path / "x", call)
    again = calls.load(tmp_path / "x")
    assert summary.summarise(again) == summary.summarise(call)
    for name in ("ranks", "pacing_gb_s", "link_bytes", "whole_ms"):
        assert getattr(again, name) == getattr(call, name)
    assert [it.rank for it in again.launches] == [0] * 4 + [1] * 4


def test_every_rank_has_processes_and_curves_of_its_own() -> None:
    events = [json.loads(line) for line in perfetto.events(busy_ranks())]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", perfetto.FIRST_SM_PID + 2, 0] == "rank 0: SM 002"
    assert names["process_name", perfetto.FIRST_SM_PID + perfetto.RANK_PIDS + 3, 0] == "rank 1: SM 003"
    slices = [event for event in events if event["ph"] == "X"]
    for event in slices:
        assert ("thread_name", event["pid"], event["tid"]) in names
    launches = defaultdict(list)
    for event in slices:
        if event["pid"] == perfetto.CALL_PID:
            launches[names["thread_name", event["pid"], event["tid"]]].append(event["name"])
    assert launches == {f"rank {rank}: launches": ["gate_up_peers", "down_peers"] for rank in (0, 1)}
    sends = [event for event in slices if event["name"] == "send rows"]
    assert len(sends) == 2 * 2 * 3
    assert {tuple(event["args"].items()) for event in sends} == {(("row", 16), ("remote", 5))}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    curves = ("tensor cores busy %", "rows copied GB/s", "from peers GB/s", "to peers GB/s")
    assert counters == {f"rank {rank}: {name}" for rank in (0, 1) for name in curves}
    assert any(event["name"].startswith("wait: a peer to be done") for event in slices)


def test_the_picture_has_the_sms_of_all_ranks() -> None:
    call = busy_ranks()
    edges = torch.linspace(0, picture._span(call), 401, dtype=torch.float64).to(torch.int64)
    image = picture.raster(call, edges, 4)
    assert image.shape == (6 * 4, 400, 3)
    blue = (image == torch.tensor(picture._rgb(picture.COLOURS["multiply"]), dtype=torch.uint8)).all(-1)
    assert all(int(blue[4 * sm : 4 * sm + 4].sum()) > 0 for sm in range(6))
    pulled, pushed = picture.transport(call, edges)
    widths = (edges[1:] - edges[:-1]).double()
    assert float((pulled * widths).sum()) == pytest.approx(2 * 2 * 3 * 6 * 2 * LAYER.hidden)
    assert float((pushed * widths).sum()) == pytest.approx(2 * 2 * 3 * 5 * 2 * LAYER.hidden)


@needs_matplotlib
def test_the_picture_of_ranks_is_legible_at_1200_pixels(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = picture.draw(tmp_path / "forward.png", busy_ranks(), "one pass\nand its time")
    assert path is not None
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1200, 1000)
    pixels = (torch.from_numpy(imread(path).copy())[..., :3] * 255).round().to(torch.uint8)
    for name in ("multiply", "peers", "sending"):
        colour = torch.tensor(picture._rgb(picture.COLOURS[name]), dtype=torch.uint8)
        assert int((pixels == colour).all(-1).sum()) > 50, name
    dark = (pixels < 80).all(-1)
    assert int(dark[60:180].sum()) > 1000, "no legend"
    assert int(dark[945:].sum()) > 100, "no time axis"


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    made.trace_with(monkeypatch)
    monkeypatch.setattr(capture_ranks, "create_runtimes", runtimes)
    return made


def runtimes(config: MegaMoEConfig, *, ranks: int, device: torch.device, pacing_gb_s: float | None) -> list[Any]:
    """What `create_runtimes` gives, without its launches."""
    config = config.replace(num_sms=132 // ranks, reserve_sms=0)
    place = torch.device("cpu")
    arenas = create_peers(arena_layout(config, ranks), ranks=ranks, device=place, timeout_s=1, pacing_gb_s=pacing_gb_s)
    for peers in arenas:
        peers.stream = Stream(10 + peers.rank)  # type: ignore[assignment]
    return [SimpleNamespace(config=config, peers=peers) for peers in arenas]


def capturing(pacing_gb_s: float | None = 165.0) -> capture_ranks.RanksCapture:
    # An index, as a CUDA device has one; tensors stay on the CPU.
    device = torch.device("cpu", 0)
    made = capture_ranks.RanksCapture(CONFIG, 96, device, ranks=2, pacing_gb_s=pacing_gb_s)
    for rank, member in enumerate(made._members):
        member.tensors.plan[:2] = torch.tensor([90 + rank, 101], dtype=torch.int32)
    return made


def launched(loader: Recorder) -> list[tuple[int, str, bool]]:
    """Stream, name and whether it records, of every launch."""
    return [(it.stream, it.name.removeprefix("pk_"), it.kernel.spec.key.endswith("|profile")) for it in loader.seen]


def test_ranks_launch_both_builds_in_turns_each_on_its_stream(loader: Recorder) -> None:
    made = capturing()
    call = made.trace("forward", 3)
    seen = launched(loader)
    # First every recording kernel alone, on the current stream.
    assert seen[:4] == [(7, name, name in FORWARD[1:3]) for name in FORWARD]
    one_pass = [[(10 + rank, name, record and name in FORWARD[1:3]) for rank in (0, 1) for name in FORWARD]
                for record in (False, True)]  # fmt: skip
    assert seen[4:] == (one_pass[0] + one_pass[1]) * 4
    assert [(it.rank, it.name) for it in call.launches] == [(rank, name) for rank in (0, 1) for name in FORWARD]
    assert [it.raw is not None for it in call.launches] == [False, True, True, False] * 2
    assert (call.ranks, call.pacing_gb_s, call.sms, call.tokens) == (2, 165.0, 132, 96)
    assert call.counts == (90, 101, 91, 101)
    assert call.whole_ms is not None
    assert call.whole_ms[0] >= max(sum(it.ms for it in call.launches if it.rank == rank) for rank in (0, 1))
    assert call.link_bytes % (2 * CONFIG.hidden) == 0 < call.link_bytes
    assert summary.summarise(call).accounted == pytest.approx(1.0)


def test_no_rank_begins_before_all_are_launched_behind_one_event(loader: Recorder) -> None:
    made = capturing()
    made.trace("forward", 1)
    streams: list[Any] = [member.peers.stream for member in made._members]
    assert [len(stream.waited) for stream in streams] == [4, 4]
    assert streams[0].waited == streams[1].waited


def test_every_launch_of_every_rank_has_a_buffer_and_a_fault_record_of_its_own(loader: Recorder) -> None:
    made = capturing()
    made.trace("forward", 1)
    plans = {it.values()["plan.fault"] for it in loader.seen if it.stream != 7 and "plan.fault" in it.values()}
    assert 0 not in plans
    assert len(plans) == 4
    loader.rooms.clear()
    loader.seen.clear()
    made.trace("backward", 1)
    rooms = {(key, at) for key, at, _, _ in loader.rooms}
    assert len(rooms) == len({at for _, at, _, _ in loader.rooms}) == 2 * 3
    assert {ctas for _, _, _, ctas in loader.rooms} == {66}
    of_ranks = [it for it in loader.seen if it.stream != 7]
    faults = {(it.stream, it.kernel.spec.key, it.values()["fault"]) for it in of_ranks if "fault" in it.values()}
    assert len(faults) == len({fault for *_, fault in faults}) == 2 * 2 * 3
    assert [it.name.removeprefix("pk_") for it in of_ranks] == BACKWARD * 8


def test_a_rank_that_gave_up_is_an_error(loader: Recorder) -> None:
    loader.gives_up = "down_peers|"
    with pytest.raises(LaunchError, match="down_peers gave up"):
        capturing().trace("forward", 1)


def test_no_token_is_nothing_to_trace() -> None:
    with pytest.raises(UnsupportedConfig, match="tokens=0"):
        capture_ranks.RanksCapture(CONFIG, 0, torch.device("cpu", 0), ranks=2, pacing_gb_s=None)


def test_the_verb_traces_ranks(
    loader: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []
    made = capturing()

    def make(config: MegaMoEConfig, tokens: int, device: Any, **options: Any) -> capture_ranks.RanksCapture:
        asked.append(options)
        return made

    monkeypatch.setattr(trace, "choose_device", lambda name: SimpleNamespace(type="cuda", index=0))
    monkeypatch.setattr(capture_ranks, "RanksCapture", make)
    arguments = ["trace", "--shape", "128x64x4x2", "--tokens", "96", "--rounds", "1", "--virtual-ranks", "2"]
    assert cli.main([*arguments, "--pacing", "165", "--out", str(tmp_path), "--json"]) == 0
    assert asked == [{"ranks": 2, "pacing_gb_s": 165.0}]
    found = json.loads(capsys.readouterr().out)["passes"]
    assert [(it["direction"], it["virtual_ranks"], it["pacing_gb_s"]) for it in found] == [
        ("forward", 2, 165.0),
        ("backward", 2, 165.0),
    ]
    assert set(found[0]["launches"]) == {f"rank {rank}: {name}" for rank in (0, 1) for name in FORWARD}
