# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of virtual ranks compute without a GPU: shares of a batch, bytes over links, records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import bench, records, render, run_virtual, timing
from benchmarks.numerics import Batch, Verdict
from benchmarks.place import Place
from benchmarks.virtual import VirtualRanks, ablated
from prime_kernels.moe.cuda_peer_launch import PeerRecorder
from tests.unit.test_bench_parts import make_record


def world(ranks: int, experts: int, hidden: int = 64) -> VirtualRanks:
    made = VirtualRanks.__new__(VirtualRanks)
    made.runtimes = [SimpleNamespace(num_local_experts=experts // ranks)] * ranks  # type: ignore[list-item]
    made.hidden, made._weights = hidden, []
    return made


def batch(ids: list[list[int]], experts: int = 4, hidden: int = 64) -> Batch:
    tokens, topk = len(ids), len(ids[0])
    x, dy = (torch.randn(tokens, hidden) for _ in range(2))
    weights = torch.randn(experts, 128, hidden), torch.randn(experts, hidden, 64)
    return Batch(x, torch.tensor(ids), torch.rand(tokens, topk), dy, *weights)


def test_a_token_crosses_a_link_once_and_its_results_each() -> None:
    # Rank 0 owns the first two tokens and experts 0 and 1.
    ids = [[2, 3], [0, 2], [0, 1], [3, 3]]
    moved = world(2, 4).remote_bytes(batch(ids))
    out_of_0 = 2 + 2  # tokens 0 and 1 to rank 1; results of token 2 back
    out_of_1 = 1 + 3  # token 2; results of token 0 (two) and of token 1
    assert moved == max(out_of_0, out_of_1) * 128


def test_slots_without_an_expert_and_one_rank_move_nothing() -> None:
    assert world(2, 4).remote_bytes(batch([[-1, -1], [0, -1], [2, -1], [3, 2]])) == 0
    assert world(1, 4).remote_bytes(batch([[0, 3], [1, 2]])) == 0


def test_shares_are_the_batch_in_rank_order_with_leaves_of_their_own() -> None:
    whole = batch([[0, 1], [1, 2], [2, 3], [3, 0]])
    shares = world(2, 4).shares(whole)
    assert torch.equal(torch.cat([own.x for own in shares]), whole.x)
    assert torch.equal(torch.cat([own.w_down for own in shares]), whole.w_down)
    assert all(leaf.requires_grad and leaf.is_leaf for own in shares for leaf in own.leaves)


def test_fields_of_virtual_runs_are_known_to_the_schema() -> None:
    assert {"virtual_ranks", "pacing_GBs", "one_rank_ms", "remote_bytes"} <= set(records.OPTIONAL)


def test_an_ablation_is_over_when_its_run_is() -> None:
    with ablated("chained"):
        assert (PeerRecorder.chained, PeerRecorder.only_moves) == (True, False)
        with ablated("only-moves"):
            assert (PeerRecorder.chained, PeerRecorder.only_moves) == (True, True)
        assert (PeerRecorder.chained, PeerRecorder.only_moves) == (True, False)
    with pytest.raises(KeyError), ablated("only-moves"):
        raise KeyError
    assert (PeerRecorder.chained, PeerRecorder.only_moves) == (False, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["forward", "--ablation", "chained"],
        ["forward", "backward", "--virtual-ranks", "2", "--ablation", "only-moves"],
        ["forward", "--virtual-ranks", "2", "--ablation", "compute"],
    ],
)
def test_an_ablation_that_cannot_be_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.parse(arguments)
    assert caught.value.code == 2
    assert "ablation" in capsys.readouterr().err


class World:
    """Virtual ranks that do nothing, and say with which flags they were asked to."""

    flags: tuple[bool, bool]
    checked = 0

    def __init__(self, config: Any, **options: Any) -> None:
        World.flags, World.checked = (PeerRecorder.chained, PeerRecorder.only_moves), 0

    def check(self, batch: Batch) -> Verdict:
        World.checked += 1
        return Verdict({"y": 1e-3})

    def pace_problem(self, batch: Batch) -> None:
        return None

    def remote_bytes(self, batch: Batch) -> int:
        return 1000

    def variant(self, name: str, op: str, batches: list[Batch]) -> timing.Variant:
        return timing.Variant(name, lambda index: index, lambda index: index)

    def settle(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("ablation", "flags", "checked"),
    [(None, (False, False), 1), ("chained", (True, False), 1), ("only-moves", (True, True), 0)],
)
def test_an_ablation_is_recorded_as_such(
    monkeypatch: pytest.MonkeyPatch, ablation: str | None, flags: tuple[bool, bool], checked: int
) -> None:
    monkeypatch.setattr(run_virtual, "VirtualRanks", World)
    alone = SimpleNamespace(name="cuda", backend="cuda", engine=None, runtime=None, close=lambda: None)
    monkeypatch.setattr(run_virtual, "package_arm", lambda *_, **__: alone)
    monkeypatch.setattr(bench, "check_arm", lambda *_: Verdict())
    monkeypatch.setattr(bench, "make_variant", lambda arm, op, batches: timing.Variant(arm.name, print, print))
    took = timing.Timing(ms=2.0, p10=1.9, p90=2.1, n=30, host_us=50.0)
    monkeypatch.setattr(timing, "measure", lambda variants, **_: dict.fromkeys((it.name for it in variants), took))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "tflops", lambda *_: 500.0)
    more = [] if ablation is None else ["--ablation", ablation]
    args = bench.parse(["forward", "--virtual-ranks", "2", "--pacing", "165", "--shapes", "tiny", *more])
    place = Place(torch.device("cpu"), None, 0, 1)
    [found] = run_virtual.run_virtual(args, bench.read_shapes()["tiny"], 64, place)
    assert (World.flags, World.checked) == (flags, checked)
    assert (PeerRecorder.chained, PeerRecorder.only_moves) == (False, False)
    assert (found["ablation"], found["virtual_ranks"], found["pacing_GBs"]) == (ablation, 2, 165.0)
    assert (found["tflops"] > 0, bool(found["rel_err"])) == ((False, False) if not checked else (True, True))
    record = {**make_record(), **found}
    assert records.schema_problems(record) == []
    assert (ablation or "cuda-bf16") in render.results_table([{**record, "p10": 1.99, "p90": 2.01}])
