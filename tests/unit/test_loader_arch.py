# SPDX-License-Identifier: Apache-2.0
"""Targets: what they are called and what runs on what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_kernels.errors import UnsupportedConfig
from prime_kernels.loader import arch
from prime_kernels.loader.arch import Target

targets = st.builds(Target, st.integers(1, 99), st.integers(0, 9), st.sampled_from(["", "a", "f"]))


@given(targets)
def test_a_target_is_read_back_as_it_is_written(target: Target) -> None:
    assert arch.parse(str(target)) == target


@given(st.text(max_size=12))
def test_any_text_is_a_target_that_prints_the_same_or_an_error_that_quotes_it(text: str) -> None:
    try:
        printed, error = str(arch.parse(text)), None
    except UnsupportedConfig as err:
        printed, error = text, err
    assert printed == text
    assert error is None or (repr(text) in str(error) and error.code == "E41" and bool(error.remedy))


@given(targets, st.integers(1, 99), st.integers(0, 9))
def test_an_a_cubin_runs_on_its_own_device_only_and_no_cubin_on_another_major(
    target: Target, major: int, minor: int
) -> None:
    runs = target.runs_on((major, minor))
    assert not runs or major == target.major
    if target.flavour == "a":
        assert runs == ((major, minor) == (target.major, target.minor))
    else:
        assert runs == (major == target.major and minor >= target.minor)


@pytest.mark.parametrize(
    ("cc", "names"),
    [((9, 0), ["sm_90a"]), ((10, 0), ["sm_100a", "sm_100f"]), ((10, 3), ["sm_103a", "sm_100f"])],
    ids=["H200", "B200", "B300"],
)
def test_a_covered_device_gets_its_own_cubins_first(cc: tuple[int, int], names: list[str]) -> None:
    assert [str(target) for target in arch.targets_for(cc)] == names
    assert str(arch.default_target(cc)) == names[0]
    assert all(target.runs_on(cc) for target in arch.targets_for(cc))
    assert arch.not_covered_reason(cc, "cuda:0 is a GPU", ()) is None


@pytest.mark.parametrize("cc", [(8, 0), (8, 9), (11, 0), (12, 0), (12, 1)])
def test_another_device_is_refused_with_its_name_its_number_and_what_there_is(cc: tuple[int, int]) -> None:
    reason = arch.not_covered_reason(cc, "cuda:0 is NVIDIA RTX 5090", ("sm_90a",))
    assert reason is not None
    assert "cuda:0 is NVIDIA RTX 5090" in reason
    assert f"sm_{cc[0]}{cc[1]}" in reason
    assert "sm_90a" in reason
    assert arch.targets_for(cc) == ()
    assert arch.default_target(cc) is None


@pytest.mark.parametrize(
    ("text", "toolkit"), [("sm_90a", (12, 0)), ("sm_100a", (12, 8)), ("sm_100f", (12, 9)), ("sm_103a", (12, 9))]
)
def test_a_target_knows_the_oldest_compiler_that_knows_it(text: str, toolkit: tuple[int, int]) -> None:
    assert arch.parse(text).min_toolkit == toolkit
