# SPDX-License-Identifier: Apache-2.0
"""Prepared launches: addresses go where they belong, mistakes are named, and no old address survives one."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest

from prime_kernels.errors import BackendUnavailable, LaunchError
from prime_kernels.loader import fork
from prime_kernels.loader.abi import PkLaunch, PkTensorMap
from prime_kernels.loader.arch import Target
from prime_kernels.loader.args import RECORD, tensor_map
from prime_kernels.loader.launch import Kernel
from prime_kernels.loader.manifest import ArgField
from prime_kernels.loader.meta import LaunchMeta, Spec
from prime_kernels.loader.prepared import Address, Prepared, Step
from tests.helpers import fake_loader

FIELDS = (ArgField("a", "ptr", 1, 0), ArgField("n", "u32", 1, 8), ArgField("b", "ptr", 1, 16))
MAPS = (ArgField("m", "map", 2, 64),)
ROWS = tensor_map((64, 8), (128,), (64, 8))
SLOTS = ("first", "second")


class Driver:
    """Keeps what every launch holds; `status` and `failed_map` are what it answers.

    Attributes:
        seen: Stream and arguments of every launch, tensor maps in them.
        encoded: Addresses of tensor maps that a launch encoded itself, launch by launch.
        settled: Addresses of tensor maps that were encoded apart from a launch.
        refused: Address of a tensor map that it does not take.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[int, bytes]] = []
        self.encoded: list[list[int]] = []
        self.settled: list[int] = []
        self.status, self.failed_map, self.refused = 0, -1, -1

    def encode(self, record: int, out: int) -> int:
        address = PkTensorMap.from_address(record).address
        if address == self.refused:
            return 1
        self.settled.append(address)
        return fake_loader.encode(record, out)

    def launch(self, address: int) -> int:
        request = PkLaunch.from_address(address)
        request.failed_map = self.failed_map
        data = ctypes.string_at(request.maps, request.num_maps * RECORD.size)
        addresses = [RECORD.unpack_from(data, at)[0] for at in range(0, len(data), RECORD.size)]
        self.encoded.append(addresses)
        if self.refused in addresses:
            request.failed_map = addresses.index(self.refused)
            return 1
        self.seen.append((request.stream, fake_loader.arguments(request)))
        return self.status

    def pointers(self) -> list[tuple[int, ...]]:
        """a, b and both maps' addresses, of every launch."""
        return [tuple(int.from_bytes(args[at : at + 8], "little") for at in (0, 16, 64, 192)) for _, args in self.seen]


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def kernel(driver: Driver) -> Kernel:
    host: Any = SimpleNamespace(
        lib=SimpleNamespace(pk_host_launch=driver.launch, pk_host_encode_tensor_map=driver.encode),
        error_name=lambda status: "CUDA_ERROR_MADE_UP",
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


def packed_anew(kernel: Kernel, stream: int, first: int, second: int) -> None:
    maps = {"m[0]": (ROWS, second), "m[1]": (ROWS, 0x5000)}
    kernel.launch(grid=4, stream=stream, args={"a": first, "n": 7, "b": second + 32}, maps=maps)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_moves_or_stays_between_launches_the_driver_gets_what_packing_gives(
    driver: Driver, kernel: Kernel, seed: int
) -> None:
    draw = random.Random(seed)
    prepared, steps = Prepared([step(kernel), step(kernel)], SLOTS), []
    for _ in range(60):
        at = (draw.choice((0x1000, 0x2000)), draw.choice((0x3000, 0x4000, 0x6000)))
        stream = draw.choice((0, 7))
        steps += [at]
        begin = len(driver.seen)
        if draw.random() < 0.1:
            with pytest.raises(LaunchError):
                prepared.launch(stream, (draw.choice((0x1000, 0x7000)), draw.choice((-1, 1 << 64))))
        prepared.launch(stream, at)
        packed_anew(kernel, stream, *at)
        first, second, anew = driver.seen[begin:]
        assert first == second == anew
    assert driver.settled, "no launch was ever spared its tensor maps"


def test_tensor_maps_are_encoded_by_the_launch_after_a_move_then_once_and_then_no_more(
    driver: Driver, kernel: Kernel
) -> None:
    prepared = Prepared([step(kernel)], SLOTS)
    for _ in range(4):
        prepared.launch(0, (0x1000, 0x2000))
    assert driver.encoded == [[0x2000, 0x5000], [], [], []]
    assert driver.settled == [0x2000, 0x5000]
    driver.encoded.clear()
    prepared.launch(0, (0x9000, 0x2000))  # no tensor map's
    prepared.launch(0, (0x9000, 0x3000))
    prepared.launch(0, (0x9000, 0x4000))
    assert driver.encoded == [[], [0x3000, 0x5000], [0x4000, 0x5000]]
    assert len(driver.settled) == 2, "a tensor map was encoded whose address had just moved"
    assert driver.pointers()[-1] == (0x9000, 0x4020, 0x4000, 0x5000)


def test_a_tensor_map_that_is_refused_is_named_however_often_it_is_tried(driver: Driver, kernel: Kernel) -> None:
    prepared = Prepared([step(kernel)], SLOTS)
    for _ in range(2):
        prepared.launch(0, (0x1000, 0x2000))
    driver.refused = 0x2008
    for _ in range(3):
        with pytest.raises(LaunchError, match=r"tensor map m\[0\] of made\|t128: CUDA_ERROR_MADE_UP.* address 0x2008"):
            prepared.launch(0, (0x1000, 0x2008))
    prepared.launch(0, (0x1000, 0x3000))
    assert driver.pointers()[-1] == (0x1000, 0x3020, 0x3000, 0x5000)


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
