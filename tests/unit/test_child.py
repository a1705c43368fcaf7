# SPDX-License-Identifier: Apache-2.0
"""A test in a process of its own passes, fails and is stopped as it should be."""

from __future__ import annotations

import os
import time

import pytest

from tests.helpers.child import own_process


@own_process(60, PRIME_TEST_MARK="here")
def checks(value: int, *, name: str) -> None:
    assert os.environ["PRIME_TEST_MARK"] == "here"
    assert (value, name) == (3, "three"), f"got {value} {name}"


@own_process(2)
def hangs() -> None:
    time.sleep(60)


def test_arguments_and_environment_arrive_and_a_failure_is_told() -> None:
    checks(3, name="three")
    with pytest.raises(AssertionError, match=r"(?s)exit 1.*got 4 three"):
        checks(4, name="three")


def test_a_test_that_hangs_is_stopped_and_shows_where() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)stopped after.*in hangs"):
        hangs()
    assert time.monotonic() - began < 20
