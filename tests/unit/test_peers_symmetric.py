# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of a real group, with torch's part replaced: who is refused, and that multicast stays off."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_kernels.errors import BackendUnavailable
from prime_kernels.peers import symmetric
from prime_kernels.peers.arena import ArenaLayout
from prime_kernels.peers.symmetric import Place
from prime_kernels.settings import without_multicast

SWITCH = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
LAYOUT = ArenaLayout.of(num_experts=4, tokens=2, topk=1, hidden=64, pool_rows=64)
DEVICE = torch.device("cpu")


class Torch:
    """Three ranks, of which this is rank 1; what torch would answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.switch: list[str | None] = []  # the variable whenever it may matter
        self.arena = torch.full((LAYOUT.end,), 7, dtype=torch.uint8)
        base = self.arena.data_ptr()
        self.handle: Any = SimpleNamespace(buffer_ptrs=[1 << 40, base, 1 << 41], multicast_ptr=0)
        self.gathered: list[Any] = []
        self.others: dict[int, Any] = {}  # by number of the exchange: what rank 2 says
        self.offers = False
        monkeypatch.setattr(symmetric, "_gather", self.gather)
        monkeypatch.setattr(symmetric, "_allocate", self.allocate)
        monkeypatch.setattr(symmetric, "_offers_multicast", self.offers_multicast)
        monkeypatch.setattr(symmetric, "place_of", lambda device: Place("host", 1, "gpu-1"))
        monkeypatch.setattr(symmetric, "_reaches", lambda device, uuid: True)
        monkeypatch.setattr(symmetric.dist, "get_rank", lambda group: 1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", SimpleNamespace(rendezvous=self.meet))

    def gather(self, group: Any, mine: Any) -> list[Any]:
        if isinstance(mine, Place):
            return [Place("host", 0, "gpu-0"), mine, Place("host", 2, "gpu-2")]
        self.gathered.append(mine)
        return [mine, mine, self.others.get(len(self.gathered), mine)]

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        self.switch.append(os.environ.get(SWITCH))
        assert size == LAYOUT.end
        return self.arena

    def offers_multicast(self, device: torch.device) -> bool:
        self.switch.append(os.environ.get(SWITCH))
        return self.offers

    def meet(self, arena: torch.Tensor, name: str) -> Any:
        self.switch.append(os.environ.get(SWITCH))
        return self.handle


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    monkeypatch.delenv(SWITCH, raising=False)
    return Torch(monkeypatch)


def create() -> symmetric.SymmetricPeers:
    group: Any = SimpleNamespace(group_name="made up")
    return symmetric.create_peers(LAYOUT, group, DEVICE, timeout_s=3.0)


def test_the_arena_is_zeroed_but_for_its_header_and_multicast_is_off_meanwhile(fake: Torch) -> None:
    peers = create()
    assert fake.switch == ["1"] * 3
    assert SWITCH not in os.environ
    assert (peers.rank, peers.size, peers.address) == (1, 3, fake.arena.data_ptr())
    header = LAYOUT.header(1, fake.handle.buffer_ptrs, timeout_s=3.0)
    assert bytes(fake.arena[: len(header)].tolist()) == header
    assert not fake.arena[len(header) :].any()
    assert fake.gathered[-1] is None, "ranks meet before any of them may write"
    peers.close()
    assert peers.arena.numel() == 0


@pytest.mark.parametrize("before", ["0", "1"])
def test_the_switch_is_left_as_it_was_found(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    monkeypatch.setenv(SWITCH, before)
    seen = []

    def fails() -> None:
        with without_multicast():
            seen.append(os.environ[SWITCH])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == ["1"]
    assert os.environ[SWITCH] == before


def test_a_torch_that_would_use_multicast_all_the_same_is_refused_before_it_allocates(fake: Torch) -> None:
    fake.offers = True
    with pytest.raises(
        BackendUnavailable, match="does not heed TORCH_SYMM_MEM_DISABLE_MULTICAST, on ep_rank 0"
    ) as info:
        create()
    assert info.value.code == "E51"
    assert fake.switch == ["1"]
    fake.offers = False
    fake.handle.multicast_ptr = 1 << 42
    with pytest.raises(BackendUnavailable, match="it made a multicast object"):
        create()


@pytest.mark.parametrize(("exchange", "what"), [(3, "allocating"), (4, "meeting")])
def test_an_error_of_one_rank_is_one_of_all(fake: Torch, exchange: int, what: str) -> None:
    fake.others[exchange] = f"out of memory {what}"
    with pytest.raises(BackendUnavailable, match=f"ep_rank 2: out of memory {what}") as info:
        create()
    assert info.value.facts["peer"] == 2
    assert SWITCH not in os.environ


def test_memory_that_is_elsewhere_than_the_handle_says_is_refused(fake: Torch) -> None:
    fake.handle.buffer_ptrs[1] += 512
    with pytest.raises(BackendUnavailable, match="not where the handle says"):
        create()


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([("a", 0, "x"), ("b", 1, "y")], "ep_rank 0 and ep_rank 1 are on different hosts"),
        ([("a", 0, "x"), ("a", 1, "y"), ("a", 1, "y")], "ep_rank 1 and ep_rank 2 are both on GPU y"),
        ([("a", 0, "x"), ("a", 0, "y")], "call different GPUs cuda:0"),
    ],
)
def test_ranks_whose_gpus_are_no_group_are_named(places: list[tuple[str, int, str]], words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words) as info:
        symmetric.refuse_places([Place(*place) for place in places])
    assert info.value.code == "E51"
    assert info.value.remedy


def test_pairs_without_access_are_all_named_once(fake: Torch) -> None:
    symmetric.refuse_pairs([])
    with pytest.raises(BackendUnavailable, match="by ep_rank: 0 and 3, 1 and 2") as info:
        symmetric.refuse_pairs([(2, 1), (0, 3), (1, 2), (3, 0)])
    assert info.value.facts["pairs"] == [(0, 3), (1, 2)]
    fake.others[1] = [0]  # rank 2 cannot read rank 0
    with pytest.raises(BackendUnavailable, match="by ep_rank: 0 and 2"):
        create()
