# SPDX-License-Identifier: Apache-2.0
"""Launching: what reaches the driver is what was asked for, over both bindings, and quickly."""

from __future__ import annotations

import json
import struct
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_kernels.errors import LaunchError, UnsupportedConfig
from prime_kernels.loader.args import DTYPES, RECORD, ArgsPacker, tensor_map
from prime_kernels.loader.manifest import WORD_BYTES, ArgField
from tests.helpers import installation as made
from tests.stub_cuda import run_with_stub

BINDINGS = ["shim", "twin"]
PRELUDE = """
import json, os, time
from pathlib import Path
from build_tools import host_shim
from prime_kernels.errors import PrimeKernelsError
from prime_kernels.loader import hostlib, kernels, resolve, tensor_map, twin
from tests.helpers import installation as made
hostlib._host = (hostlib.load_library(host_shim.build()) if os.environ["PK_TEST_BINDING"] == "shim"
                 else hostlib.Host(twin.TwinLibrary(), "ctypes"))
folder = Path(os.environ["PK_TEST_FOLDER"])
facts = json.loads(os.environ.get("PK_TEST_FACTS", "{}"))
pair = (made.pack_entry("cu130", "sm_90a", **facts), made.cubin_for("cu130", "sm_90a", **facts))
made.write_packs(folder / "packs", {"cu130/sm_90a": made.pack_bytes("cu130", "sm_90a", [pair])})
at = made.installation(folder, packs=False, sources=False)
resolve.installation = lambda: at
kernel = kernels.load_kernel(made.KEY, device=0)
rows = tensor_map(dims=(2048, 100), strides=(4096,), box=(64, 128))
args = {"x": 0x1234567890, "rows": 7, "scales": (1.0, 2.0, 0.5)}
def launch(**changes):
    kernel.launch(**({"grid": 132, "stream": 77, "args": args, "maps": {"map_x": (rows, 0x7000)}} | changes))
def failure(**changes):
    try:
        launch(**changes)
    except PrimeKernelsError as error:
        return {"kind": type(error).__name__, "code": error.code, "text": str(error), "facts": error.facts,
                "remedy": error.remedy}
    return None
def out(**values):
    print(json.dumps(values, default=str))
def last():
    return stub.calls("cuLaunchKernelEx")[-1]
"""


def child(code: str, folder: Path, binding: str = "shim", facts: dict[str, int] | None = None, **env: str) -> Any:
    settings = {"PK_TEST_FOLDER": str(folder), "PK_TEST_BINDING": binding, "PK_TEST_FACTS": json.dumps(facts or {})}
    text = run_with_stub(PRELUDE + textwrap.dedent(code), **(settings | env))
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("binding", BINDINGS)
def test_arguments_map_grid_and_stream_arrive_as_they_were_given(binding: str, tmp_path: Path) -> None:
    found = child("launch()\nout(call=last())", tmp_path, binding, PK_STUB_ARGS_BYTES=str(made.ARGS_BYTES))["call"]
    assert (found["kernel"], found["grid"], found["block"]) == ("pk_fake", [132, 1, 1], [256, 1, 1])
    assert (found["stream"], found["args_aligned"], found["attrs"]) == (77, True, [])
    data = bytes.fromhex(found["args"])
    assert struct.unpack_from("<QI3f", data) == (0x1234567890, 7, 1.0, 2.0, 0.5)
    assert data[24:64] == bytes(40)
    assert data[64:71] == b"STUBMAP"
    assert 0x7000.to_bytes(8, "little") in data[64:]


@pytest.mark.parametrize("binding", BINDINGS)
def test_cluster_shared_memory_and_early_start_become_attributes(binding: str, tmp_path: Path) -> None:
    found = child(
        "launch(grid=(4, 2), pdl=True)\nout(call=last(), attribute=stub.calls('cuKernelSetAttribute'))",
        tmp_path,
        binding,
        {"threads": 384, "smem_bytes": 200000, "cluster": 2},
    )
    call = found["call"]
    assert (call["grid"], call["block"], call["smem"]) == ([4, 2, 1], [384, 1, 1], 200000)
    assert call["attrs"] == [[4, 2, 1, 1], [6, 1, 0, 0]]


def test_both_bindings_make_the_same_driver_calls(tmp_path: Path) -> None:
    code = "launch()\nlaunch(grid=(4, 2, 2), pdl=True)\nout(calls=stub.calls('cuLaunchKernelEx'))"
    facts = {"cluster": 2, "smem_bytes": 100000}
    size = str(made.ARGS_BYTES)
    shim, twin = (child(code, tmp_path, binding, facts, PK_STUB_ARGS_BYTES=size) for binding in BINDINGS)
    assert shim == twin
    assert len(shim["calls"]) == 2


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_prepared_launch_reaches_the_driver_as_a_packed_one_does(binding: str, tmp_path: Path) -> None:
    found = child(
        """
        from prime_kernels.loader.prepared import Address, Prepared, Step
        step = Step(kernel, 132, args | {"x": Address("x", 16)}, {"map_x": (rows, Address("m"))})
        prepared = Prepared([step], ("x", "m"))
        for x, m in ((0x1234567880, 0x7000), (0x1000, 0x8000)):
            launch(args=args | {"x": x + 16}, maps={"map_x": (rows, m)})
            for _ in range(3):
                prepared.launch(77, (x, m))
        encoded = len(stub.calls("cuTensorMapEncodeTiled"))
        prepared.launch(77, (x + 16, m))
        out(calls=stub.calls("cuLaunchKernelEx"), more=len(stub.calls("cuTensorMapEncodeTiled")) - encoded)
        """,
        tmp_path,
        binding,
        PK_STUB_ARGS_BYTES=str(made.ARGS_BYTES),
    )
    first, second, last = (found["calls"][at : at + 4] for at in (0, 4, 8))
    assert first == first[:1] * 4
    assert second == second[:1] * 4
    assert first != second
    assert len(last) == 1
    assert found["more"] == 0
    assert bytes.fromhex(last[0]["args"])[64:] == bytes.fromhex(second[0]["args"])[64:]


@pytest.mark.parametrize("path", ["launch()", "prepared.launch(77, (0x1000, 0x7000))"])
@pytest.mark.parametrize("binding", BINDINGS)
def test_a_thread_without_a_current_context_gets_its_device_s_and_launches(
    binding: str, path: str, tmp_path: Path
) -> None:
    found = child(
        f"""
        import threading
        from prime_kernels.loader.prepared import Address, Prepared, Step
        step = Step(kernel, 132, args | {{"x": Address("x", 16)}}, {{"map_x": (rows, Address("m"))}})
        prepared = Prepared([step], ("x", "m"))
        before = len(stub.calls("cuLaunchKernelEx"))
        def body():
            {path}
            {path}
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        out(launches=len(stub.calls("cuLaunchKernelEx")) - before, made=stub.calls("cuDevicePrimaryCtxRetain"))
        """,
        tmp_path,
        binding,
        PK_STUB_CONTEXT="0",
        PK_STUB_ARGS_BYTES=str(made.ARGS_BYTES),
    )
    assert found["launches"] == 2
    assert [call["device"] for call in found["made"]] == [0]


def test_a_larger_cluster_than_is_portable_is_allowed_for_on_the_device(tmp_path: Path) -> None:
    found = child("out(value=kernel.host.kernel_attribute(kernel.handle, 14, 0))", tmp_path, facts={"cluster": 16})
    assert found["value"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("args={}", ["missing ['x', 'rows', 'scales']"]),
        ("args=args | {'y': 1}", ["unknown ['y']"]),
        ("args=args | {'rows': -1}", ["rows"]),
        ("args=args | {'rows': 1 << 40}", ["rows"]),
        ("args=args | {'rows': 'many'}", ["rows"]),
        ("args=args | {'scales': (1.0, 2.0)}", ["scales"]),
        ("args=args | {'scales': 1.0}", ["scales"]),
        ("maps={}", ["map_x"]),
        ("maps=None", ["map_x"]),
        ("maps={'map_x': 3}", ["map_x"]),
        ("maps={'map_x': (b'', 16)}", ["map_x"]),
        ("maps={'map_x': (rows, 16), 'map_y': (rows, 16)}", ["map_y"]),
    ],
)
def test_a_wrong_argument_is_refused_before_the_driver_sees_it(changes: str, words: list[str], tmp_path: Path) -> None:
    found = child(f"out(error=failure({changes}), calls=len(stub.calls('cuLaunchKernelEx')))", tmp_path)
    error = found["error"]
    assert (error["kind"], error["code"], found["calls"]) == ("LaunchError", "E43", 0)
    assert all(word in error["text"] for word in words), error["text"]
    assert made.KEY in error["text"]
    assert error["facts"]
    assert error["remedy"]


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_tensor_map_that_the_driver_refuses_is_named_with_its_address(binding: str, tmp_path: Path) -> None:
    error = child("out(error=failure(maps={'map_x': (rows, 0x7004)}))", tmp_path, binding)["error"]
    assert (error["kind"], error["code"]) == ("LaunchError", "E43")
    assert error["facts"]["tensor_map"] == "map_x"
    assert "0x7004" in error["text"]
    assert "multiple of 16" in error["remedy"]


@pytest.mark.parametrize("status", [701, 720, 912])
def test_a_launch_that_does_not_fit_is_e40_with_what_was_needed(status: int, tmp_path: Path) -> None:
    error = child("out(error=failure())", tmp_path, PK_STUB_FAIL=f"cuLaunchKernelEx={status}")["error"]
    assert (error["kind"], error["code"]) == ("BackendUnavailable", "E40")
    assert error["facts"]["needed"] == 132
    assert "132 SMs" in error["text"]
    assert error["remedy"]


@pytest.mark.parametrize("status", [700, 201, 1])
def test_another_refused_launch_is_e43_with_the_driver_s_name_for_it(status: int, tmp_path: Path) -> None:
    error = child("out(error=failure())", tmp_path, PK_STUB_FAIL=f"cuLaunchKernelEx={status}")["error"]
    assert (error["kind"], error["code"]) == ("LaunchError", "E43")
    assert error["facts"]["cuda_result"] == status
    assert "CUDA_LAUNCH_BLOCKING=1" in error["remedy"]


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_grid_whose_ctas_wait_for_each_other_must_be_resident(binding: str, tmp_path: Path) -> None:
    found = child(
        """
        launch(co_resident=True, grid=56)
        launch(co_resident=True, grid=56)
        asked = len(stub.calls("cuOccupancyMaxActiveClusters"))
        out(asked=asked, free=failure(grid=132), error=failure(grid=132, co_resident=True))
        """,
        tmp_path,
        binding,
        {"cluster": 2},
        PK_STUB_CLUSTERS="28",
        PK_STUB_SMS="60",
        PK_STUB_NAME="NVIDIA H200 MIG 3g.71gb",
    )
    assert found["free"] is None
    assert found["asked"] <= 1
    error = found["error"]
    assert (error["kind"], error["code"]) == ("BackendUnavailable", "E40")
    assert "needs 132 CTAs in clusters of 2 resident" in error["text"]
    assert "this context fits 56" in error["text"]
    assert (error["facts"]["needed"], error["facts"]["fits"]) == (132, 56)


def test_threads_launch_at_once_without_mixing_their_requests(tmp_path: Path) -> None:
    found = child(
        """
        import threading
        def many(mark):
            for _ in range(200):
                launch(grid=mark, stream=mark)
        threads = [threading.Thread(target=many, args=(mark,)) for mark in range(1, 7)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        calls = stub.calls("cuLaunchKernelEx")
        out(count=len(calls), mixed=sum(c["stream"] != c["grid"][0] for c in calls),
            each=sorted({c["stream"] for c in calls}))
        """,
        tmp_path,
    )
    assert found == {"count": 1200, "mixed": 0, "each": [1, 2, 3, 4, 5, 6]}


def test_a_launch_with_five_tensor_maps_takes_at_most_ten_microseconds_of_host_time(tmp_path: Path) -> None:
    found = child(
        """
        maps = [[f"m{i}", "map", 1, 64 + 128 * i] for i in range(5)]
        fields = [["x", "ptr", 1, 0], *[[f"n{i}", "u32", 1, 8 + 4 * i] for i in range(6)], *maps]
        entry = made.pack_entry("cu130", "sm_90a", args=fields, args_bytes=704)
        cubin = made.fake_cubin(meta=made.launch_meta(args_bytes=704, args_hash=made.ARGS_HASH))
        made.write_packs(folder / "packs", {"cu130/sm_90a": made.pack_bytes("cu130", "sm_90a", [(entry, cubin)])})
        again = made.installation(folder, packs=False, sources=False)
        resolve.installation = lambda: again
        kernels._kernels.clear(), kernels._libraries.clear()
        kernel = kernels.load_kernel(made.KEY, device=0)
        # The stub writes a log line for every call, which is not host time of ours: measure all but the C call.
        kernel.entry = lambda _: 0
        values = {"x": 16, **{f"n{i}": i for i in range(6)}}
        def once(t):
            row = tensor_map(dims=(2048, t), strides=(4096,), box=(64, 128))
            kernel.launch(grid=132, stream=0, args=values, maps={f"m{i}": (row, 0x7000) for i in range(5)})
        once(100)
        best = []
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(500):
                once(100)
            best.append((time.perf_counter() - begin) / 500)
        out(us=min(best) * 1e6)
        """,
        tmp_path,
    )
    # The C call adds about 1.6 us on a driver that does nothing.
    assert found["us"] <= 8.0


# --- packing


@given(
    st.lists(
        st.tuples(st.sampled_from([w for w in WORD_BYTES if w not in ("map", "char")]), st.integers(1, 4)),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_any_struct_packs_every_field_at_its_offset(kinds: list[tuple[str, int]], data: st.DataObject) -> None:
    fields, at = [], 0
    for index, (word, count) in enumerate(kinds):
        size = WORD_BYTES[word]
        at = -(-at // size) * size
        fields.append(ArgField(f"f{index}", word, count, at))
        at += size * count
    size = -(-at // 8) * 8
    values = {}
    for field in fields:
        exact = st.integers(0, 100) if field.word[0] != "f" else st.sampled_from([0.0, 0.5, -2.0, 3.25])
        many = data.draw(st.lists(exact, min_size=field.count, max_size=field.count))
        values[field.name] = many if field.count > 1 else many[0]
    buffer = bytearray(b"\xff" * size)
    ArgsPacker(fields, size).pack_into(buffer, values, "k")
    letters = {"ptr": "Q", "f32": "f", "f64": "d", "u8": "B", "i8": "b", "u16": "H", "i16": "h"}
    letters |= {"u32": "I", "i32": "i", "u64": "Q", "i64": "q"}
    for field in fields:
        got = struct.unpack_from(f"<{field.count}{letters[field.word]}", buffer, field.offset)
        want = values[field.name]
        assert list(got) == (list(want) if field.count > 1 else [want])
    covered = {i for f in fields for i in range(f.offset, f.offset + f.bytes)}
    assert all(buffer[i] == 0 for i in range(size) if i not in covered)


def test_several_tensor_maps_in_an_array_are_named_one_by_one() -> None:
    packer = ArgsPacker([ArgField("m", "map", 2, 64), ArgField("n", "u32", 1, 0)], 320)
    assert packer.map_offsets == {"m[0]": 64, "m[1]": 192}
    record = tensor_map((64, 8), (128,), (64, 8))
    records = bytearray(2 * RECORD.size)
    packer.pack_maps_into(records, {"m[0]": (record, 16), "m[1]": (record, 32)}, "k")
    first, second = (RECORD.unpack_from(records, at) for at in (0, RECORD.size))
    assert (first[0], first[-2], second[0], second[-2]) == (16, 64, 32, 192)


def test_a_tensor_map_s_record_holds_what_the_driver_wants() -> None:
    record = tensor_map((2048, 100, 4), (4096, 409600), (64, 128, 1), dtype="bf16", swizzle=128, fill_nan=True)
    values = RECORD.unpack(record)
    assert values[:6] == (0, 2048, 100, 4, 1, 1)
    assert values[6:10] == (4096, 409600, 0, 0)
    assert values[10:15] == (64, 128, 1, 1, 1)
    assert values[15:20] == (1, 1, 1, 1, 1)
    assert values[20:] == (DTYPES["bf16"][0], 3, 3, 0, 3, 1, 0, 0)
    assert tensor_map((2048, 100, 4), (4096, 409600), (64, 128, 1), dtype="bf16", swizzle=128, fill_nan=True) is record


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dims": ()}, "0 dims"),
        ({"dims": (1,) * 6, "strides": (16,) * 5, "box": (8,) * 6}, "6 dims"),
        ({"strides": ()}, "0 strides"),
        ({"dims": (0, 8)}, "need 1 to"),
        ({"strides": (100,)}, "multiples of 16"),
        ({"box": (64, 257)}, "need 1 to 256"),
        ({"box": (4, 8)}, "multiple of 16"),
        ({"box": (128, 8)}, "at most the swizzle of 128"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
        ({"swizzle": 256}, "swizzle=256"),
        ({"l2_promotion": 1}, "l2_promotion=1"),
    ],
    ids=str,
)
def test_a_tensor_map_that_no_driver_takes_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedConfig) as caught:
        tensor_map(**({"dims": (64, 8), "strides": (128,), "box": (64, 8)} | changes))
    assert caught.value.code == "E41"
    assert word in str(caught.value)
    assert caught.value.remedy


def test_a_value_that_does_not_fit_its_field_names_the_kernel() -> None:
    packer = ArgsPacker([ArgField("n", "u8", 1, 0)], 8)
    with pytest.raises(LaunchError, match="arguments of some\\|kernel"):
        packer.pack_into(bytearray(8), {"n": 256}, "some|kernel")
