# SPDX-License-Identifier: Apache-2.0
"""What a traced pass launches, without a GPU: the backend's launches, in both builds, each with a buffer of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from prime_kernels import MegaMoEConfig, cli
from prime_kernels.errors import LaunchError, UnsupportedConfig
from prime_kernels.moe import cuda_launch
from prime_kernels.timeline import capture, summary
from prime_kernels.timeline import records as rec
from tests.helpers.fake_capture import Recorder
from tests.helpers.fake_loader import Seen

CONFIG = MegaMoEConfig(num_experts=4, topk=2, hidden=128, intermediate=64, max_tokens_per_rank=96)
FORWARD = ["plan", "gate_up", "down", "combine"]
BACKWARD = ["prepare", "down_grad", "gate_up_grad", "wgrad", "combine"]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    made.trace_with(monkeypatch)
    return made


def capturing() -> capture.Capture:
    # An index, as a CUDA device has one; tensors stay on the CPU.
    made = capture.Capture(CONFIG, 96, torch.device("cpu", 0))
    made._tensors.plan[:4] = torch.tensor([50, 50, 50, 42], dtype=torch.int32)
    return made


def names(seen: list[Seen]) -> list[str]:
    return [it.name.removeprefix("pk_") for it in seen]


def test_a_forward_is_launched_in_both_builds_in_turns(loader: Recorder) -> None:
    call = capturing().trace("forward", 3)
    assert names(loader.seen) == FORWARD * 8  # two passes that are not timed, three of each build
    keys = [seen.kernel.spec.key for seen in loader.seen]
    for first in range(0, len(keys), 8):
        assert [key.endswith("|profile") for key in keys[first : first + 8]] == [False] * 4 + [False, True, True, False]
        plain = [key.removesuffix("|profile") for key in keys[first + 4 : first + 8]]
        assert plain == keys[first : first + 4]
    assert [launch.name for launch in call.launches] == FORWARD
    assert [(it.ms, it.normal_ms, it.profile_ms) for it in call.launches] == [(2.0, 2.0, 2.0)] * 4
    assert [launch.raw is None for launch in call.launches] == [True, False, False, True]
    assert (call.device, call.sms, call.counts, call.tokens) == ("NVIDIA H200", 132, (50, 50, 50, 42), 96)
    found = summary.summarise(call)
    assert found.ms == 8.0
    assert found.accounted == pytest.approx(1.0)


def test_a_backward_runs_a_forward_first_and_hands_on_its_plan(loader: Recorder) -> None:
    call = capturing().trace("backward", 1)
    assert names(loader.seen) == FORWARD * 4 + BACKWARD * 4
    assert [launch.name for launch in call.launches if launch.raw is not None] == ["down_grad", "gate_up_grad", "wgrad"]
    plans = {seen.values()["counts"] for seen in loader.seen if "counts" in seen.values()}
    assert len(plans) == 1


def test_every_recording_launch_has_a_buffer_and_a_fault_record_of_its_own(loader: Recorder) -> None:
    capturing().trace("forward", 2)
    assert len({(key, at) for key, at, _, _ in loader.rooms}) == len({at for _, at, _, _ in loader.rooms}) == 2
    assert {ctas for _, _, _, ctas in loader.rooms} == {132}
    faults = [(seen.kernel.spec.key, seen.values()["fault"]) for seen in loader.seen if "fault" in seen.values()]
    assert len(set(faults)) == len({fault for _, fault in faults}) == 6


def test_a_launch_that_gave_up_is_named(loader: Recorder) -> None:
    loader.gives_up = "down|"
    with pytest.raises(LaunchError, match="down gave up after 20 s") as caught:
        capturing().trace("forward", 1)
    assert caught.value.code == "E44"


def test_a_lane_has_room_for_a_wait_at_every_step() -> None:
    config = MegaMoEConfig(num_experts=128, topk=8, hidden=4096, intermediate=1536, max_tokens_per_rank=16384)
    steps = 128 * 8 * 12 / 132 * 64  # blocks x tiles of 128 columns a CTA, of 64 steps each
    room = capture.capacity("gate_up", config, (1024,) * 128, 132)
    assert 2 * steps < room < 3 * steps
    assert rec.buffer_bytes(132, room) < 400 << 20


def test_no_token_is_nothing_to_trace() -> None:
    with pytest.raises(UnsupportedConfig, match="tokens=0"):
        capture.Capture(CONFIG, 0, torch.device("cpu", 0))


def test_the_verb_traces_both_directions(
    loader: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from prime_kernels import trace

    looks_like_cuda = type("Device", (), {"type": "cuda", "index": 0})
    monkeypatch.setattr(trace, "choose_device", lambda name: looks_like_cuda)
    made = capturing()
    monkeypatch.setattr(capture, "Capture", lambda config, tokens, device: made)
    arguments = ["trace", "--shape", "128x64x4x2", "--tokens", "96", "--rounds", "1", "--out", str(tmp_path), "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["passes"]
    assert [it["direction"] for it in found] == ["forward", "backward"]
    assert {path.name for path in tmp_path.iterdir()} >= {
        "forward.json",
        "backward.json",
        "forward.txt",
        "backward.txt",
    }


def test_the_launches_are_those_of_the_backend(loader: Recorder) -> None:
    steps, work_bytes = capture._steps("backward", CONFIG, 96, 0)
    assert [capture.launch_name(step) for step in steps] == BACKWARD
    assert work_bytes > 0
    assert cuda_launch.sm_count(0) == 132
