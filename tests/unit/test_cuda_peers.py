# SPDX-License-Identifier: Apache-2.0
"""What the cuda backend launches among peers, without a GPU, and what it says when a peer does not come."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_kernels import MegaMoEConfig, SwiGLU, plan_memory
from prime_kernels.errors import LaunchError, PeerTimeout, ShapeError
from prime_kernels.moe import cuda_calls, cuda_faults, cuda_peer_launch
from prime_kernels.moe.backend import Needs
from prime_kernels.moe.cuda import CudaBackend
from prime_kernels.moe.cuda_variants import arena_layout, peer_kernel_keys, pool_rows
from prime_kernels.peers.loopback import create_peers
from tests.helpers.fake_loader import VARIANTS, FakeLoader, Seen

BF16 = torch.bfloat16


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    made = FakeLoader()
    made.stand_in(monkeypatch)
    return made


def config_of(**fields: Any) -> MegaMoEConfig:
    sizes = {"num_experts": 8, "topk": 3, "hidden": 192, "intermediate": 320, "max_tokens_per_rank": 64}
    return MegaMoEConfig(**{**sizes, "backend": "cuda", "reserve_sms": 0, **fields})


class Rank:
    """One of `ranks` virtual ranks, on the CPU."""

    def __init__(self, rank: int, ranks: int, **fields: Any) -> None:
        self.config = config_of(**fields)
        arenas = create_peers(arena_layout(self.config, ranks), ranks=ranks, device=torch.device("cpu"), timeout_s=2.5)
        self.peers = arenas[rank]
        self.local = self.config.num_experts // ranks
        self.runtime: Any = SimpleNamespaceKey(
            config=self.config,
            device=torch.device("cpu"),
            peers=self.peers,
            ep_rank=rank,
            ep_size=ranks,
            num_local_experts=self.local,
        )
        self.backend = CudaBackend()
        self.backend._faults[self.runtime] = torch.zeros(8, dtype=torch.int32)

    def forward(self, tokens: int, *, save: str = "preact", pair: bool = False, ids: Any = torch.int64) -> Any:
        e, h, i = self.local, self.config.hidden, self.config.intermediate
        packed, down = torch.zeros(e, 2 * i, h, dtype=BF16), torch.zeros(e, h, i, dtype=BF16)
        gate_up: Any = tuple(t.contiguous() for t in packed.chunk(2, 1)) if pair else packed
        x, topk = torch.zeros(tokens, h, dtype=BF16), (tokens, self.config.topk)
        routes, scores = torch.zeros(topk, dtype=ids), torch.zeros(topk)
        result = self.backend.forward(self.runtime, x, routes, scores, gate_up, down, save=save)
        return SimpleNamespace(x=x, ids=routes, scores=scores, gate_up=packed, down=down, **result._asdict())


class SimpleNamespaceKey(SimpleNamespace):
    """A namespace that can be a key, as a runtime is."""

    __hash__ = object.__hash__


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both GEMMs of a forward in one launch."""
    monkeypatch.setattr(cuda_peer_launch.PeerRecorder, "chained", True)


def by_name(loader: FakeLoader) -> dict[str, Seen]:
    """Launches of a chained forward."""
    assert [seen.name for seen in loader.seen] == ["pk_plan_peers", "pk_forward", "pk_combine"]
    return {seen.name: seen for seen in loader.seen}


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 64])
@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
@pytest.mark.parametrize("pair", [False, True])
def test_three_launches_pack_against_the_kernels_own_structs(
    loader: FakeLoader, ranks: int, tokens: int, save: str, pair: bool
) -> None:
    rank = Rank(ranks - 1, ranks)
    call = rank.forward(tokens, save=save, pair=pair)
    seen = by_name(loader)
    assert call.y.shape == (tokens, 192)
    assert call.tokens_per_expert.shape == (8,)
    assert call.recv_per_local_expert.shape == (8 // ranks,)
    assert (call.preact is None) == (save == "inputs")
    assert seen["pk_forward"].values()["keep_z"] == (save != "inputs")
    forward = seen["pk_forward"].values()
    assert (forward["num_experts"], forward["hidden"], forward["intermediate"]) == (8 // ranks, 192, 320)


@pytest.mark.usefixtures("chained")
def test_every_launch_gets_the_addresses_of_its_call_and_of_its_ranks_arena(loader: FakeLoader) -> None:
    rank = Rank(1, 2)
    call = rank.forward(50, save="full")
    seen, arena = by_name(loader), rank.peers.address
    plan, forward, combine = (seen[name].values() for name in ("pk_plan_peers", "pk_forward", "pk_combine"))
    base = call.plan.data_ptr()
    head = -(-(2 * 4 + 1 + 150) // 4) * 4  # counts, starts, slots, to whole entries
    assert call.plan.numel() == head + 4 * pool_rows(rank.config, 50, 2)
    for args, prefix in ((plan, "plan."), (forward, "")):
        assert args[f"{prefix}counts"] == base
        assert args[f"{prefix}starts"] == base + 4 * 4
        assert args["list"] == base + 4 * head
        assert args["list"] % 16 == 0
        assert args["peers"] == arena
    assert plan["plan.slot_row"] == combine["slot_row"] == base + 4 * 9
    assert (plan["plan.ids"], plan["plan.weights"]) == (call.ids.data_ptr(), call.scores.data_ptr())
    assert plan["plan.tokens_per_expert"] == call.tokens_per_expert.data_ptr()
    assert plan["plan.recv_per_expert"] == call.recv_per_local_expert.data_ptr()
    assert (plan["tokens"], plan["row_bytes"]) == (call.x.data_ptr(), 384)
    assert (plan["plan.tokens"], plan["plan.topk"], plan["plan.num_experts"]) == (50, 3, 8)
    assert plan["plan.fault"] == forward["fault"] == rank.backend._faults[rank.runtime].data_ptr()
    blocks = pool_rows(rank.config, 50, 2) // 64
    counters = plan["plan.counters"]
    assert plan["plan.num_counters"] == 3 * blocks + 1
    fields = ("arrivals", "h_done", "y_done", "finished")
    assert [forward[name] - counters for name in fields] == [4 * blocks * i for i in range(4)]
    assert plan["plan.row_score"] == forward["row_score"]
    maps = seen["pk_forward"].map_addresses()
    assert maps["z"] == call.preact.data_ptr()
    assert maps["x"] == forward["pool"] == call.preact.data_ptr() + 64 * blocks * 640 * 2
    assert (maps["gate"], maps["up"]) == (call.gate_up.data_ptr(), call.gate_up.data_ptr() + 320 * 192 * 2)
    assert maps["down"] == call.down.data_ptr()
    assert maps["y"] == forward["y_rows"] == combine["pool"]
    assert (combine["results"], combine["rank"]) == (arena + rank.peers.layout.results, 1)
    assert (combine["y"], combine["tokens"], combine["topk"]) == (call.y.data_ptr(), 50, 3)


def test_ids_of_four_bytes_are_told_apart(loader: FakeLoader) -> None:
    rank = Rank(0, 2)
    rank.forward(8, ids=torch.int32)
    rank.forward(8)
    assert [s.values()["plan.wide_ids"] for s in loader.seen if s.name == "pk_plan_peers"] == [0, 1]


@pytest.mark.usefixtures("chained")
@pytest.mark.parametrize(
    ("num_sms", "plan", "forward"), [(66, 64, 66), (33, 32, 32), (16, 16, 16), (9, 8, 8), (2, 8, 2)]
)
def test_grids_fill_a_ranks_share_in_whole_clusters(loader: FakeLoader, num_sms: int, plan: int, forward: int) -> None:
    Rank(0, 2, num_sms=num_sms).forward(8)
    seen = by_name(loader)
    assert (seen["pk_plan_peers"].grid, seen["pk_forward"].grid) == (plan, forward)


@pytest.mark.usefixtures("chained")
def test_a_group_leaves_eight_sms_to_others_unless_told(loader: FakeLoader) -> None:
    Rank(0, 2, reserve_sms=None).forward(8)
    assert by_name(loader)["pk_forward"].grid == 124


@pytest.mark.parametrize(
    ("fields", "clusters", "expected"),
    [
        ({"max_tokens_per_rank": 16384, "topk": 8, "num_experts": 128, "intermediate": 768}, 66, 1),  # 8 x 6 tiles
        ({"max_tokens_per_rank": 8192, "topk": 8, "num_experts": 128, "intermediate": 1536}, 33, 1),
        ({"max_tokens_per_rank": 8192, "topk": 8, "num_experts": 128, "intermediate": 768}, 66, 2),
        ({"max_tokens_per_rank": 1}, 66, 4),  # of 4 experts
        ({"max_tokens_per_rank": 2**20}, 8, 1),
    ],
)
def test_the_second_gemm_stays_most_of_a_round_behind(fields: dict[str, Any], clusters: int, expected: int) -> None:
    assert cuda_peer_launch.lag(config_of(**fields), 2, clusters) == expected


@pytest.mark.usefixtures("chained")
def test_the_activation_chooses_the_kernel(loader: FakeLoader) -> None:
    clamped = {"activation": SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)}
    Rank(0, 2, **clamped).forward(8)
    args = by_name(loader)["pk_forward"].values()
    assert (args["clamp"], args["alpha"], args["up_offset"]) == (7.0, pytest.approx(1.702), 1.0)
    for fields in ({}, clamped):
        assert set(peer_kernel_keys(config_of(**fields))) <= set(VARIANTS)
    assert peer_kernel_keys(config_of()) != peer_kernel_keys(config_of(**clamped))


def test_a_forward_allocates_what_the_memory_plan_says(loader: FakeLoader) -> None:
    for save in ("preact", "inputs", "full"):
        rank = Rank(0, 4, save=save, max_tokens_per_rank=512)
        call = rank.forward(512, save=save)
        kept = [call.plan] + ([] if call.preact is None else [call.preact])
        inputs = 512 * 192 * 2 + 512 * 3 * (8 + 4)
        plan = plan_memory(rank.config, ep_size=4)
        assert plan.saved_bytes_per_layer == inputs + sum(t.numel() * t.element_size() for t in kept)
        assert list(call.plan.shape) == [rank.backend.plan_numel(rank.config, num_tokens=512, ep_size=4)]
        shape = rank.backend.preact_shape(rank.config, num_tokens=512, ep_size=4, save=save)
        assert call.preact is None or call.preact.shape == shape
        (calls,) = rank.backend._calls.values()
        work = calls.of(cuda_calls.ForwardShape(512, save, False, True)).work_bytes
        assert work <= plan.workspace_bytes
        loader.seen.clear()


def test_a_forward_pulls_in_its_first_gemm_and_sends_in_its_second(loader: FakeLoader) -> None:
    rank = Rank(1, 2)
    call = rank.forward(50, save="preact")
    assert [seen.name for seen in loader.seen] == ["pk_plan_peers", "pk_gate_up_peers", "pk_down_peers", "pk_combine"]
    plan, gate_up, down, combine = (seen.values() for seen in loader.seen)
    maps = {
        seen.name: seen.map_addresses() for seen in loader.seen if seen.name in ("pk_gate_up_peers", "pk_down_peers")
    }
    assert gate_up["arrivals"] == gate_up["copied"] == plan["plan.counters"]
    assert gate_up["pull_dst"] == maps["pk_gate_up_peers"]["a"]
    assert maps["pk_gate_up_peers"]["out0"] == maps["pk_down_peers"]["a"]
    assert maps["pk_gate_up_peers"]["out1"] == call.preact.data_ptr()
    assert maps["pk_down_peers"]["out0"] == down["out_rows"] == combine["pool"]
    assert (down["pull_dst"], down["arrivals"], down["score_parts"]) == (0, 0, 0)
    assert down["row_score"] == plan["plan.row_score"]
    end = plan["plan.counters"] + 4 * plan["plan.num_counters"]
    assert down["finished"] == end - 4
    assert plan["plan.counters"] < down["out_done"] < end - 4
    for args in (gate_up, down):
        assert (args["peers"], args["list"], args["num_experts"]) == (rank.peers.address, plan["list"], 4)


BACKWARD = ["pk_stage_peers", "pk_down_grad_peers", "pk_gate_up_grad_peers", "pk_wgrad", "pk_combine"]


def backward_of(rank: Rank, loader: FakeLoader, save: str, needs: Needs) -> tuple[Any, list[str], dict[str, Any]]:
    call = rank.forward(50, save=save)
    loader.seen.clear()
    operands = (call.x, call.x, call.ids, call.scores, call.gate_up, call.down, call.plan, call.preact)
    result = rank.backend.backward(rank.runtime, *operands, needs=needs, wgrad_dtype=None)
    return result, [seen.name for seen in loader.seen], {seen.name: seen for seen in loader.seen}


@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
def test_a_backward_among_peers_pulls_what_was_not_kept_and_sends_dx(loader: FakeLoader, save: str) -> None:
    rank = Rank(1, 2, save=save)
    result, names, seen = backward_of(rank, loader, save, Needs(True, True, True, True))
    again = ["pk_gate_up_peers"] if save == "inputs" else []
    assert names == [BACKWARD[0], *again, *BACKWARD[1:]]
    stage, down, gate_up, combine = (
        seen[name].values() for name in ("pk_stage_peers", "pk_down_grad_peers", "pk_gate_up_grad_peers", "pk_combine")
    )
    assert (stage["tokens"] == 0) == (save == "full")
    assert (down["pull_grads"], down["arrivals"] == down["copied"]) == (1, True)
    assert (gate_up["pull_dst"] != 0) == (save == "preact")
    assert (gate_up["arrivals"], gate_up["pull_grads"]) == (0, 0)
    assert gate_up["score_parts"] == down["score_parts"]
    assert gate_up["parts"] == 2  # tiles of 256 columns in 320
    assert seen["pk_gate_up_grad_peers"].map_addresses()["out0"] == gate_up["out_rows"] == combine["pool"]
    arena, layout = rank.peers.address, rank.peers.layout
    assert (combine["results"], combine["score_parts"]) == (arena + layout.results, arena + layout.dscore)
    assert (combine["parts"], combine["parts_by_slot"]) == (1, 1)
    assert combine["dscore"] == result.dtopk_weights.data_ptr()
    counters = {down["copied"], gate_up["copied"], gate_up["out_done"], gate_up["finished"]}
    assert len(counters) == 4
    assert all(stage["counters"] <= at < stage["counters"] + 4 * stage["num_counters"] for at in counters)
    for args in (stage, down, gate_up):
        assert args["peers"] == arena


def test_a_rank_that_needs_nothing_still_serves_its_peers(loader: FakeLoader) -> None:
    _, names, seen = backward_of(Rank(0, 2), loader, "preact", Needs(False, False, False, False))
    assert names == BACKWARD[:3]
    assert seen["pk_stage_peers"].values()["tokens"] != 0


def enum_words(name: str) -> set[int]:
    text = (Path(__file__).resolve().parents[2] / "kernels_src/common/fault.cuh").read_text()
    body = re.search(rf"enum class {name} : u32 \{{(.*?)\}};", text, re.S)
    assert body is not None
    return {int(value) for value in re.findall(r"= (\d+)", body.group(1))} - {0}


def test_every_role_and_wait_of_the_kernels_has_a_name() -> None:
    assert set(cuda_faults._ROLES) == enum_words("Role")
    assert set(cuda_faults._WAITS) == enum_words("Wait")


@pytest.mark.parametrize(
    ("role", "wait", "text"),
    [
        (5, 6, "in phase plan for ep_rank 3: for a peer's counts"),
        (5, 7, "in phase plan for ep_rank 3: for a peer's rows"),
        (4, 8, "in phase pull for ep_rank 3: for a peer's tokens"),
        (6, 9, "in phase end for ep_rank 3: for a peer's end"),
    ],
)
def test_a_wait_for_a_peer_names_rank_peer_phase_and_seconds(role: int, wait: int, text: str) -> None:
    rank = Rank(1, 4, peer_timeout_s=2.5)
    rank.backend._faults[rank.runtime][:] = torch.tensor([1, 17, role, wait, 0, 4, 0, 0])
    with pytest.raises(PeerTimeout, match=f"ep_rank 1 waited 2.5 s {text}") as info:
        rank.backend.check(rank.runtime)
    facts = {name: info.value.facts[name] for name in ("ep_rank", "peers", "seconds")}
    assert facts == {"ep_rank": 1, "peers": [3], "seconds": 2.5}
    assert info.value.code == "E52"
    assert "peer_timeout_s" in (info.value.remedy or "")
    rank.backend.check(rank.runtime)  # told once


def test_a_wait_inside_the_gpu_is_no_peers_fault(loader: FakeLoader) -> None:
    rank = Rank(0, 2)
    record = rank.backend._faults[rank.runtime]
    record[:4] = torch.tensor([1, 3, 4, 10])
    with pytest.raises(LaunchError, match="the pull role of CTA 3 waited for the first copy of a row") as info:
        rank.backend.check(rank.runtime)
    assert info.value.code == "E44"
    assert info.value.facts == {"cta": 3, "role": 4, "wait": 10}
    assert "doctor --json" in (info.value.remedy or "")
    assert "A rank that stopped between two launches" in str(info.value)
    record[4] = 2
    with pytest.raises(ShapeError, match=r"2 ids outside \[-1, 8\)"):
        rank.backend.check(rank.runtime)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("fields", [{}, {"activation": SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)}])
def test_a_warmup_loads_every_kernel_that_a_forward_needs(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], chained: bool
) -> None:
    monkeypatch.setattr(cuda_peer_launch.PeerRecorder, "chained", chained)
    rank = Rank(0, 2, **fields)
    for save in ("preact", "inputs", "full"):
        rank.forward(64, save=save)
    assert len(loader._keys) >= 3
    assert set(loader._keys) <= set(peer_kernel_keys(rank.config))
