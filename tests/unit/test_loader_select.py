# SPDX-License-Identifier: Apache-2.0
"""Selection: one decision per candidate, and the reasons are the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_kernels.errors import BackendUnavailable
from prime_kernels.loader import packs, select
from prime_kernels.loader.manifest import PackHeader
from prime_kernels.loader.select import Accepted, Problem, Rejected
from tests.helpers import installation as made

LAYER = Problem(hidden=2048, intermediate=768, num_experts=128, topk=8)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[PackHeader]:
    folder: Path = tmp_path_factory.mktemp("packs")
    return [pack.header for pack in packs.open_installed(made.usual_packs(folder))]


@pytest.mark.parametrize(
    ("cc", "driver", "where"),
    [
        ((9, 0), 13000, "cu130/sm_90a"),
        ((9, 0), 13010, "cu130/sm_90a"),
        ((9, 0), 12090, "cu129/sm_90a"),
        ((10, 0), 13000, "cu130/sm_100a"),
        ((10, 3), 12090, "cu129/sm_103a"),
        ((9, 0), 12080, None),
        ((12, 0), 13000, None),
        ((8, 9), 13000, None),
    ],
)
def test_the_newest_toolkit_that_the_driver_follows_is_chosen(
    headers: list[PackHeader], cc: tuple[int, int], driver: int, where: str | None
) -> None:
    decisions = select.choose(made.KEY, cc, driver, headers)
    chosen = select.first_accepted(decisions)
    assert (chosen.where if chosen else None) == where
    assert len(decisions) == 1 + sum(header.arch.runs_on(cc) for header in headers)
    assert all(isinstance(d, Accepted) or d.reason for d in decisions)


def test_the_order_of_the_packs_does_not_matter(headers: list[PackHeader]) -> None:
    there = select.choose(made.KEY, (9, 0), 13000, headers)
    assert there == select.choose(made.KEY, (9, 0), 13000, headers[::-1])


def test_a_pack_that_is_asked_for_by_name_is_tried_on_an_older_driver(headers: list[PackHeader]) -> None:
    decisions = select.choose(made.KEY, (9, 0), 12020, headers, forced="cu129")
    chosen = select.first_accepted(decisions)
    assert chosen is not None
    assert chosen.where == "cu129/sm_90a"
    assert any(isinstance(d, Rejected) and d.reason == "PRIME_KERNELS_PACK=cu129" for d in decisions)


def test_the_trace_names_every_candidate_with_its_reason(headers: list[PackHeader]) -> None:
    lines = select.trace_text(select.choose(made.KEY, (9, 0), 12020, headers)).splitlines()
    assert "cu130/sm_90a" in lines[0]
    assert "driver is for CUDA 12.2, needs 13.0" in lines[0]
    assert "cu129/sm_90a" in lines[1]
    assert "driver is for CUDA 12.2, needs 12.9" in lines[1]
    absent = select.trace_text(select.choose("other|key", (9, 0), 13000, headers)).splitlines()
    assert absent[0].endswith("other|key  rejected: not in this pack")
    assert lines[2].endswith("rejected: for sm_100a, sm_103a, need sm_90a")
    assert len(lines) == 3


def test_a_driver_that_is_too_old_for_all_packs_is_named_with_what_is_needed(headers: list[PackHeader]) -> None:
    target = headers[0].arch
    error = select.driver_problem(12020, target, headers, None)
    assert isinstance(error, BackendUnavailable)
    assert error.code == "E02"
    assert "CUDA 12.2" in str(error)
    assert ">= 12.9 (pack cu129)" in str(error)
    assert ">= 13.0 (pack cu130)" in str(error)
    assert error.facts["driver"] == 12020
    assert "PRIME_KERNELS_PACK=cu129" in (error.remedy or "")
    assert select.driver_problem(12090, target, headers, None) is None
    assert select.driver_problem(12020, target, headers, "cu129") is None


def test_a_gpu_that_nothing_covers_is_named_with_what_there_is(headers: list[PackHeader]) -> None:
    error = select.not_covered((12, 0), "cuda:0 is NVIDIA RTX 5090", (str(h.arch) for h in headers))
    assert error is not None
    assert error.code == "E03"
    assert error.remedy
    assert error.facts["shipped"] == ("sm_100a", "sm_103a", "sm_90a")
    assert "cuda:0 is NVIDIA RTX 5090 (sm_120)" in str(error)
    assert select.not_covered((9, 0), "cuda:0 is NVIDIA H200", ()) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, None),
        ({"precision": "bf16", "hidden_multiple": 64, "intermediate_multiple": 64, "max_topk": 16}, None),
        ({"precision": "fp8"}, "for precision fp8, asked for bf16"),
        ({"hidden_multiple": 4096}, "hidden=2048 is not a multiple of 4096"),
        ({"intermediate_multiple": 512}, "intermediate=768 is not a multiple of 512"),
        ({"max_topk": 4}, "topk=8, at most 4"),
        ({"max_ranks": 0}, "ep_size=1, at most 0"),
        ({"max_experts": 64}, "num_experts=128, at most 64"),
    ],
    ids=str,
)
def test_a_variant_that_does_not_serve_a_layer_says_which_size(facts: dict[str, object], reason: str | None) -> None:
    assert select.serves_reason(facts, LAYER) == reason


def test_kernels_are_asked_for_by_family_by_first_word_by_key_or_all() -> None:
    moe = {"family": "moe"}
    facts = {"up|a": moe, "up|b": moe | {"precision": "fp8"}, "down|a": moe, "other|a": {}}
    found = select.keys_for("moe", facts, LAYER)
    assert [(type(d).__name__, d.key) for d in found] == [
        ("Accepted", "up|a"),
        ("Rejected", "up|b"),
        ("Accepted", "down|a"),
    ]
    assert [d.key for d in select.keys_for("up", facts, None)] == ["up|a", "up|b"]
    assert [d.key for d in select.keys_for("down|a", facts, None)] == ["down|a"]
    assert len(select.keys_for("", facts, None)) == 4
    assert select.keys_for("mo", facts, None) == []


def test_the_sets_a_driver_can_load_are_listed_newest_first(headers: list[PackHeader]) -> None:
    assert select.usable_sets(13000, headers) == ("cu130", "cu129") == select.usable_sets(13000)
    assert select.usable_sets(12090, headers) == ("cu129",)
    assert select.usable_sets(12040, headers) == ()
