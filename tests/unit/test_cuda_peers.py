# SPDX-License-Identifier: Apache-2.0
"""What the cuda backend launches among peers, without a GPU, and what it says when a peer does not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prime_kernels import MegaMoEConfig
from prime_kernels.moe.cuda import CudaBackend
from prime_kernels.moe.cuda_variants import arena_layout
from prime_kernels.peers.loopback import create_peers
from tests.helpers.fake_loader import FakeLoader, Seen

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


def by_name(loader: FakeLoader) -> dict[str, Seen]:
    assert [seen.name for seen in loader.seen] == ["pk_plan_peers", "pk_forward", "pk_combine"]
    return {seen.name: seen for seen in loader.seen}


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
