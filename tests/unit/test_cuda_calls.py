# SPDX-License-Identifier: Apache-2.0
"""Launches that are prepared once per shape: the same bytes as packing them anew, whatever came in between."""

from __future__ import annotations

import gc
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_kernels import MegaMoEConfig, SwiGLU
from prime_kernels.loader.prepared import Address, Prepared
from prime_kernels.moe import cuda_calls
from prime_kernels.moe.backend import Needs
from prime_kernels.moe.cuda import CudaBackend
from prime_kernels.moe.cuda_buffers import Workspace
from prime_kernels.moe.cuda_variants import kernel_keys
from tests.helpers.fake_loader import FakeLoader, Seen

BF16 = torch.bfloat16


class Twice(Prepared):
    """Launches what was prepared, and the same again through `Kernel.launch`, which packs every launch from scratch."""

    loader: FakeLoader
    again = 0  # how often the prepared launches are repeated in between

    def __init__(self, steps: Any, slots: Any) -> None:
        super().__init__(steps, slots)
        self.steps, self.slots = steps, slots

    def launch(self, stream: int, addresses: Any) -> None:
        begin, count = len(self.launched()), len(self.steps)
        for _ in range(1 + self.again):
            super().launch(stream, addresses)
        self.pack_anew(stream, dict(zip(self.slots, addresses, strict=True)))
        launched = [seen._replace(encoded=0) for seen in self.launched()[begin:]]
        assert len(launched) == (2 + self.again) * count > 0
        for at in range(0, len(launched), count):
            assert launched[at : at + count] == launched[-count:]

    def launched(self) -> list[Seen]:
        """By this thread."""
        return [seen for seen in self.loader.seen if seen.thread == threading.get_ident()]

    def pack_anew(self, stream: int, at: dict[str, int]) -> None:
        def known(value: Any) -> Any:
            return at[value.slot] + int(value) if isinstance(value, Address) else value

        for kernel, grid, args, maps in self.steps:
            maps = {name: (record, known(value)) for name, (record, value) in (maps or {}).items()}
            args = {name: known(value) for name, value in args.items()}
            kernel.launch(grid=grid, stream=stream, args=args, maps=maps)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    made = FakeLoader()
    made.stand_in(monkeypatch)
    return made


@pytest.fixture
def twice(loader: FakeLoader, monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    Twice.loader = loader
    monkeypatch.setattr(cuda_calls, "Prepared", Twice)
    return loader


class Layer:
    """Weights and a runtime; `run` makes new tokens every time."""

    def __init__(self, *, pair: bool = False, **fields: Any) -> None:
        sizes = {"num_experts": 5, "topk": 2, "hidden": 192, "intermediate": 320, "max_tokens_per_rank": 64}
        self.config = MegaMoEConfig(**{**sizes, "backend": "cuda", **fields})
        e, h, i = self.config.num_experts, self.config.hidden, self.config.intermediate
        packed = torch.zeros(e, 2 * i, h, dtype=BF16)
        self.gate_up: Any = tuple(t.contiguous() for t in packed.chunk(2, 1)) if pair else packed
        self.down = torch.zeros(e, h, i, dtype=BF16)
        fields = {"config": self.config, "device": torch.device("cpu"), "peers": None, "num_local_experts": e}
        self.runtime: Any = type("Runtime", (), fields)()
        self.backend = CudaBackend()
        self.backend._faults[self.runtime] = torch.zeros(8, dtype=torch.int32)

    def run(
        self, tokens: int, *, save: str = "preact", needs: Any = (True,) * 4, ids: Any = torch.int64, dtype: Any = None
    ) -> SimpleNamespace:
        x, dy = (torch.zeros(tokens, self.config.hidden, dtype=BF16) for _ in range(2))
        topk = (tokens, self.config.topk)
        routes, scores = torch.zeros(topk, dtype=ids), torch.zeros(topk)
        operands = (x, routes, scores, self.gate_up, self.down)
        forward = self.backend.forward(self.runtime, *operands, save=save)
        backward = self.backend.backward(
            self.runtime, dy, *operands, forward.plan, forward.preact, needs=Needs(*needs), wgrad_dtype=dtype
        )
        return SimpleNamespace(x=x, dy=dy, ids=routes, scores=scores, forward=forward, backward=backward)


@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("save", ["preact", "inputs", "full"])
@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_prepared_launches_are_byte_for_byte_what_packing_them_anew_gives(
    twice: FakeLoader, monkeypatch: pytest.MonkeyPatch, tokens: int, save: str, pair: bool, again: int
) -> None:
    monkeypatch.setattr(Twice, "again", again)
    layer = Layer(pair=pair)
    for needs in itertools.product((False, True), repeat=4):
        for ids, dtype in ((torch.int64, None), (torch.int32, torch.float32)):
            twice.seen.clear()
            layer.run(tokens, save=save, needs=needs, ids=ids, dtype=dtype)
            assert len(twice.seen) >= 2 * (4 + 2)


def test_tensor_maps_are_encoded_once_while_addresses_stay_and_anew_when_one_moves(loader: FakeLoader) -> None:
    layer = Layer()
    layer.run(8)
    (calls,) = layer.backend._calls.values()
    call = calls.of(cuda_calls.ForwardShape(8, "preact", False, True))
    fields = cuda_calls.ForwardAddresses._fields
    here = cuda_calls.ForwardAddresses(*[(i + 1) << 20 for i in range(len(fields))])

    def encoded(addresses: cuda_calls.ForwardAddresses) -> list[int]:
        """By plan, gate_up, down and combine themselves."""
        loader.seen.clear()
        call.launch(torch.device("cpu"), addresses)
        return [seen.encoded for seen in loader.seen]

    assert encoded(here) == [0, 6, 6, 0]
    assert encoded(here) == encoded(here) == [0, 0, 0, 0]
    assert encoded(here._replace(x=1 << 30)) == [0, 0, 0, 0]  # no tensor map's
    assert encoded(here._replace(w_down=1 << 30)) == [0, 0, 6, 0]
    assert loader.seen[2].map_addresses()["b0"] == 1 << 30
    assert encoded(here._replace(w_down=1 << 30, w_gate_up=1 << 31)) == [0, 6, 0, 0]
    assert loader.seen[2].map_addresses()["b0"] == 1 << 30
    assert encoded(here) == [0, 6, 6, 0]


def test_every_call_launches_with_the_addresses_of_its_own_tensors(loader: FakeLoader) -> None:
    layer = Layer()
    calls = []
    for _ in range(3):
        loader.seen.clear()
        call = layer.run(8)
        calls.append(call)  # kept, so that no address comes back
        seen = {name: [s for s in loader.seen if s.name == name] for name in {s.name for s in loader.seen}}
        (plan,), (gate_up,), (down,) = (seen[name] for name in ("pk_plan", "pk_gate_up", "pk_down"))
        forward, backward = call.forward, call.backward
        assert plan.values()["ids"] == call.ids.data_ptr()
        assert plan.values()["weights"] == call.scores.data_ptr()
        assert plan.values()["counts"] == forward.plan.data_ptr()
        assert plan.values()["recv_per_expert"] == forward.recv_per_local_expert.data_ptr()
        assert gate_up.values()["pull_src"] == call.x.data_ptr()
        assert gate_up.map_addresses()["b0"] == layer.gate_up.data_ptr()
        assert gate_up.map_addresses()["b1"] == layer.gate_up.data_ptr() + 320 * 192 * 2
        assert gate_up.map_addresses()["out1"] == forward.preact.data_ptr()
        assert down.map_addresses()["b0"] == layer.down.data_ptr()
        assert [c.values()["y"] for c in seen["pk_combine"]] == [forward.y.data_ptr(), backward.dx.data_ptr()]
        assert seen["pk_down_grad"][0].values()["pull_src"] == call.dy.data_ptr()
        assert seen["pk_wgrad"][0].map_addresses()["down"] == backward.dw_down.data_ptr()
    assert len({call.x.data_ptr() for call in calls}) == 3


def test_results_alias_neither_each_other_nor_the_temporaries(loader: FakeLoader) -> None:
    call = Layer(pair=True).run(8, save="full")
    forward, backward = call.forward, call.backward
    results = [*forward, backward.dx, backward.dtopk_weights, *backward.dw_gate_up, backward.dw_down]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in results)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)
    temporaries = [s.values()["pool"] for s in loader.seen if s.name == "pk_combine"]
    temporaries += [s.values()["row_score"] for s in loader.seen if s.name in ("pk_plan", "pk_prepare")]
    assert temporaries
    assert not any(begin <= address < end for address in temporaries for begin, end in spans)


def test_runtimes_shapes_and_threads_do_not_disturb_each_other(
    twice: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [Layer(), Layer(pair=True, hidden=256), Layer(num_sms=9)]
    twice.pause = 1e-4
    monkeypatch.setattr(Twice, "again", 1)
    own: dict[int, list[int]] = {}
    failures: list[Exception] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(args.exc_value))

    def work(seed: int) -> None:
        mine = own.setdefault(threading.get_ident(), [])
        for turn in range(12):
            call = layers[turn % 3].run((0, 3, 64)[turn * seed % 3], save=("full", "inputs")[turn % 2])
            mine += [call.ids.data_ptr()] * 3

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(own) == 4
    assert not failures
    for thread_id, ids in own.items():
        plans = [s for s in twice.seen if s.thread == thread_id and s.name == "pk_plan"]
        assert [s.values()["ids"] for s in plans] == ids


def test_what_is_prepared_goes_with_its_runtime_and_stays_bounded(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_calls, "_MOST_SHAPES", 4)
    layer = Layer()
    for tokens in range(6):
        layer.run(tokens)
    (calls,) = layer.backend._calls.values()
    assert len(calls._known) == 4
    loader.seen.clear()
    layer.run(0)  # prepared again after it had to go
    assert loader.seen[0].values()["tokens"] == 0
    backend = layer.backend
    del layer, calls
    gc.collect()
    assert len(backend._calls) == 0


def test_a_call_on_another_device_than_the_current_one_makes_it_current(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [1], []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, now[0] = now[0], self.index

        def __exit__(self, *_: object) -> None:
            now[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    layer = Layer()
    layer.run(8)
    monkeypatch.setattr(cuda_calls, "current_stream", lambda device: 100 + device.index)
    (calls,) = layer.backend._calls.values()
    call = calls.of(cuda_calls.ForwardShape(8, "preact", False, True))
    monkeypatch.setattr(call._prepared, "launch", lambda stream, addresses: seen.append((now[0], stream)))
    for index in (1, 0):
        call.launch(torch.device("cuda", index), cuda_calls.ForwardAddresses(*[0] * 12))
    assert seen == [(1, 101), (0, 100)]
    assert now == [1]


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4])), max_size=12))
def test_temporaries_are_aligned_and_do_not_overlap(sizes: list[tuple[int, int]]) -> None:
    work, end = Workspace("work"), 0
    for count, itemsize in sizes:
        buffer = work.take(count, itemsize=itemsize)
        at = buffer.data_ptr()
        assert isinstance(at, Address)
        assert at.slot == "work"
        assert at % 256 == 0
        assert at >= end
        end = int(at) + count * itemsize
    assert work.bytes >= end


@pytest.mark.parametrize("fields", [{}, {"activation": SwiGLU(clamp=7.0, alpha=1.702, up_offset=1.0)}])
def test_a_warmup_loads_every_kernel_that_a_call_needs(loader: FakeLoader, fields: dict[str, Any]) -> None:
    layer = Layer(**fields)
    for save in ("preact", "inputs", "full"):
        for dtype in (None, torch.float32):
            layer.run(64, save=save, dtype=dtype)
    assert len(loader._keys) >= 6
    assert set(loader._keys) <= set(kernel_keys(layer.config))
