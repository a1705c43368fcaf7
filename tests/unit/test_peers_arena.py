# SPDX-License-Identifier: Apache-2.0
"""The arena: regions that do not overlap, and a header that is `struct Peers` of the kernels, word for word."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from build_tools import structs
from prime_kernels import MegaMoEConfig, plan_memory
from prime_kernels.errors import BackendUnavailable, UnsupportedConfig
from prime_kernels.moe.cuda_variants import arena_layout, pool_rows
from prime_kernels.peers import arena
from prime_kernels.peers.arena import ArenaLayout
from prime_kernels.peers.loopback import create_peers, create_runtimes

SOURCE = (Path(__file__).resolve().parents[2] / "kernels_src" / "comm" / "peers.cuh").read_text()
PEERS = structs.find(SOURCE, "Peers")
REGIONS = ("flags", "counts", "rows", "tokens", "grads", "results", "dscore")


def constant(name: str) -> int:
    found = re.search(rf"{name} = (\d+);", SOURCE)
    assert found is not None
    return int(found.group(1))


def config_of(**fields: Any) -> MegaMoEConfig:
    sizes = {"num_experts": 8, "topk": 3, "hidden": 192, "intermediate": 320, "max_tokens_per_rank": 65}
    return MegaMoEConfig(**{**sizes, "backend": "cuda", **fields})


@given(experts=st.integers(1, 4096), tokens=st.integers(1, 20000), topk=st.integers(1, 32), hidden=st.integers(1, 100))
def test_regions_are_large_enough_aligned_and_apart(experts: int, tokens: int, topk: int, hidden: int) -> None:
    hidden, pool = 64 * hidden, 64 * ((8 * tokens * topk) // 64 + experts)
    layout = ArenaLayout.of(num_experts=experts, tokens=tokens, topk=topk, hidden=hidden, pool_rows=pool)
    slots = tokens * topk
    sizes = (4 * 8 * 128, 8 * experts * 4, pool * 16, tokens * hidden * 2, tokens * hidden * 2, slots * hidden * 2)
    places = [getattr(layout, name) for name in REGIONS]
    assert places[0] == arena.HEADER_BYTES
    for (begin, end), size in zip(itertools.pairwise([*places, layout.end]), (*sizes, slots * 4), strict=True):
        assert begin % 256 == 0
        assert size <= end - begin < size + 256


def test_the_header_is_the_struct_of_the_kernels() -> None:
    assert PEERS is not None
    layout = arena_layout(config_of(), 4)
    addresses = [0x7000_0000_0000 + (1 << 33) * rank for rank in range(4)]
    header = layout.header(2, addresses, timeout_s=1.5, bytes_per_us=165_000)
    assert len(header) == PEERS.size <= arena.STATE_OFFSET
    found: dict[str, Any] = {}
    for field in PEERS.fields:
        assert field.word == "u64"
        words = struct.unpack_from(f"<{field.count}Q", header, field.offset)
        found[field.name] = list(words) if field.count > 1 else words[0]
    assert found.pop("arena") == [*addresses, 0, 0, 0, 0]
    expected = {"rank": 2, "size": 4, "timeout_ns": 1_500_000_000, "bytes_per_us": 165_000}
    assert found == expected | {name: getattr(layout, name) for name in REGIONS}


def test_constants_are_those_of_the_kernels() -> None:
    assert constant("kMaxPeers") == arena.MAX_PEERS
    assert constant("kStateOffset") == arena.STATE_OFFSET
    assert constant("kFlagBytes") == arena._FLAG_BYTES
    entry, state = structs.find(SOURCE, "RowEntry"), structs.find(SOURCE, "PeerState")
    assert entry is not None
    assert state is not None
    assert entry.size == arena.ROW_BYTES
    assert arena.STATE_OFFSET + state.size <= arena.HEADER_BYTES
    kinds = re.search(r"enum class Flag : u32 \{(.*?)\}", SOURCE, re.S)
    assert kinds is not None
    assert len(re.findall(r"= \d", kinds.group(1))) == arena._FLAG_KINDS


def test_a_wait_without_an_end_fits_the_word() -> None:
    header = arena_layout(config_of(), 1).header(0, [1 << 40], timeout_s=1e300)
    assert struct.unpack_from("<Q", header, 8 * (arena.MAX_PEERS + arena.WORDS.index("timeout_ns")))[0] == 2**63 - 1


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_virtual_rank_owns_a_zeroed_arena_that_all_of_them_know(ranks: int) -> None:
    layout = arena_layout(config_of(), ranks)
    made = create_peers(layout, ranks=ranks, device=torch.device("cpu"), timeout_s=2.0, pacing_gb_s=165.0)
    assert [(p.rank, p.size) for p in made] == [(rank, ranks) for rank in range(ranks)]
    addresses = [p.arena.data_ptr() for p in made]
    assert [p.address for p in made] == addresses
    for peers in made:
        assert peers.arena.numel() == layout.end
        header = layout.header(peers.rank, addresses, timeout_s=2.0, bytes_per_us=165_000)
        assert bytes(peers.arena[: len(header)].tolist()) == header
        assert not peers.arena[len(header) :].any()


@pytest.mark.parametrize(("pace", "words"), [(None, 0), (0, 0), (1e-9, 1), (41.25, 41_250)])
def test_a_pace_is_bytes_per_microsecond_and_none_is_none(pace: float | None, words: int) -> None:
    layout = arena_layout(config_of(), 1)
    (peers,) = create_peers(layout, ranks=1, device=torch.device("cpu"), timeout_s=1.0, pacing_gb_s=pace)
    at = 8 * (arena.MAX_PEERS + arena.WORDS.index("bytes_per_us"))
    assert int(peers.arena[at : at + 8].view(torch.int64)) == words


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_memory_plan_is_the_arena_to_the_byte(ranks: int) -> None:
    config = config_of()
    layout = arena_layout(config, ranks)
    (peers, *_) = create_peers(layout, ranks=ranks, device=torch.device("cpu"), timeout_s=1.0)
    plan = plan_memory(config, ep_size=ranks)
    assert plan.symmetric_bytes == peers.arena.numel()
    assert plan.pool_rows == pool_rows(config, 0, ranks)
    assert layout.tokens - layout.rows >= 16 * plan.pool_rows
    assert plan.pool_rows >= plan.max_recv_rows + 63 * (8 // ranks)


def test_virtual_ranks_need_a_cuda_device_and_the_fused_kernels() -> None:
    with pytest.raises(BackendUnavailable, match="got device cpu; need a CUDA device"):
        create_runtimes(config_of(), ranks=2, device="cpu")
    for fields, ranks, pace, words in (
        ({}, 9, None, "ranks is 9; need an integer in 1..8"),
        ({}, 0, None, "ranks is 0"),
        ({}, 2, -1.0, "pacing_gb_s is -1.0"),
        ({"backend": "grouped"}, 2, None, 'backend is "grouped"'),
        ({}, 3, None, "num_experts=8 is not divisible by ep_size=3"),
    ):
        with pytest.raises(UnsupportedConfig, match=re.escape(words)):
            create_runtimes(config_of(**fields), ranks=ranks, device="cuda:0", pacing_gb_s=pace)
    assert not torch.cuda.is_initialized()
