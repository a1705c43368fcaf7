# SPDX-License-Identifier: Apache-2.0
"""Prepared launches: addresses go where they belong, mistakes are named, and no old address survives one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from prime_kernels.errors import BackendUnavailable, LaunchError
from prime_kernels.loader import fork
from prime_kernels.loader.abi import PkLaunch
from prime_kernels.loader.arch import Target
from prime_kernels.loader.args import RECORD, tensor_map
from prime_kernels.loader.launch import Kernel
from prime_kernels.loader.manifest import ArgField
from prime_kernels.loader.meta import LaunchMeta, Spec
from prime_kernels.loader.prepared import Address, Prepared, Step

FIELDS = (ArgField("a", "ptr", 1, 0), ArgField("n", "u32", 1, 8), ArgField("b", "ptr", 1, 16))
MAPS = (ArgField("m", "map", 2, 64),)
ROWS = tensor_map((64, 8), (128,), (64, 8))
SLOTS = ("first", "second")


class Driver:
    """Keeps what every launch holds; `status` and `failed_map` are what it answers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes, bytes]] = []
        self.status, self.failed_map = 0, -1

    def launch(self, address: int) -> int:
        request = PkLaunch.from_address(address)
        request.failed_map = self.failed_map
        data = (ctypes.string_at(request.args, request.args_bytes), ctypes.string_at(request.maps, 2 * RECORD.size))
        self.seen.append((request.stream, *data))
        return self.status

    def pointers(self) -> list[tuple[int, ...]]:
        """a, b and both maps' addresses, of every launch."""
        return [
            tuple(int.from_bytes(data[at : at + 8], "little") for data, at in
                  ((args, 0), (args, 16), (maps, 0), (maps, RECORD.size)))
            for _, args, maps in self.seen
        ]  # fmt: skip


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def kernel(driver: Driver) -> Kernel:
    host: Any = SimpleNamespace(
        lib=SimpleNamespace(pk_host_launch=driver.launch), error_name=lambda status: "CUDA_ERROR_MADE_UP"
    )
    meta = LaunchMeta(128, 0, 1, 1, 0, 320, 0)
    spec = Spec("made|t128", "pk_made", Target(9, 0, "a"), meta, FIELDS + MAPS, 32, 0, "test")
    return Kernel(host, spec, 1, 0, 132)


def step(kernel: Kernel, **changes: Any) -> Step:
    args = {"a": Address("first"), "n": 7, "b": Address("second", 32)}
    maps = {"m[0]": (ROWS, Address("second")), "m[1]": (ROWS, 0x5000)}
    return Step(kernel, 4, {**args, **changes}, maps)


def test_an_address_is_a_number_that_keeps_its_slot_in_sums() -> None:
    address = Address("first", 16)
    for moved in (address + 8, 8 + address):
        assert isinstance(moved, Address)
        assert (moved.slot, int(moved)) == ("first", 24)
    assert repr(address) == "Address('first', 16)"


def test_addresses_are_written_wherever_their_slot_stands_and_nowhere_else(driver: Driver, kernel: Kernel) -> None:
    prepared = Prepared([step(kernel), step(kernel, n=9)], SLOTS)
    prepared.launch(7, (0x1000, 0x2000))
    prepared.launch(8, (0x1000, 0x3000))
    prepared.launch(8, (0x4000, 0x3000))
    first, second = (0x1000, 0x2020, 0x2000, 0x5000), (0x1000, 0x3020, 0x3000, 0x5000)
    third = (0x4000, 0x3020, 0x3000, 0x5000)
    assert driver.pointers() == [first, first, second, second, third, third]
    assert [stream for stream, *_ in driver.seen] == [7, 7, 8, 8, 8, 8]
    kernel.launch(
        grid=4, stream=8, args={"a": 0x4000, "n": 9, "b": 0x3020}, maps={"m[0]": (ROWS, 0x3000), "m[1]": (ROWS, 0x5000)}
    )
    assert driver.seen[-1] == driver.seen[-2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": Address("first")}, "n holds no pointer"),
        ({"a": Address("third")}, "none of the slots first, second"),
        ({"a": "x"}, "arguments of made"),
        ({"more": 1}, r"unknown \['more'\]"),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_name(kernel: Kernel, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        Prepared([step(kernel, **changes)], SLOTS)
    assert caught.value.code == "E43"
    assert "made|t128" in str(caught.value)


@pytest.mark.parametrize("wrong", [(0x6000,), (0x6000, 1, 2), (0x6000, -64), (0x6000, None), (0x6000, 1 << 64)])
def test_after_wrong_addresses_none_of_them_is_launched_with(driver: Driver, kernel: Kernel, wrong: Any) -> None:
    prepared = Prepared([step(kernel)], SLOTS)
    prepared.launch(0, (0x1000, 0x2000))
    with pytest.raises(LaunchError, match=r"made\|t128"):
        prepared.launch(0, wrong)
    prepared.launch(0, (0x1000, 0x2000))
    assert driver.pointers() == [(0x1000, 0x2020, 0x2000, 0x5000)] * 2


def test_a_refused_tensor_map_is_named_with_the_address_of_this_launch(driver: Driver, kernel: Kernel) -> None:
    prepared = Prepared([step(kernel)], SLOTS)
    prepared.launch(0, (0x1000, 0x2000))
    driver.status, driver.failed_map = 1, 0
    with pytest.raises(LaunchError, match=r"tensor map m\[0\] of made\|t128: CUDA_ERROR_MADE_UP \(1\); address 0x2008"):
        prepared.launch(0, (0x1000, 0x2008))


@pytest.mark.parametrize(("status", "kind", "code"), [(701, BackendUnavailable, "E40"), (700, LaunchError, "E43")])
def test_a_refused_launch_ends_the_sequence_with_the_error_of_its_kernel(
    driver: Driver, kernel: Kernel, status: int, kind: type[Exception], code: str
) -> None:
    prepared = Prepared([step(kernel), step(kernel)], SLOTS)
    driver.status = status
    with pytest.raises(kind, match=r"made\|t128") as caught:
        prepared.launch(0, (0x1000, 0x2000))
    assert getattr(caught.value, "code", None) == code
    assert len(driver.seen) == 1


def test_a_forked_process_launches_nothing(driver: Driver, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared([step(kernel)], SLOTS)
    monkeypatch.setattr(fork, "forked", True)
    with pytest.raises(BackendUnavailable) as caught:
        prepared.launch(0, (0x1000, 0x2000))
    assert caught.value.code == "E60"
    assert not driver.seen
