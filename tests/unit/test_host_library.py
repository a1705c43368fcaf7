# SPDX-License-Identifier: Apache-2.0
"""The host library: as a file, without a driver, and against the driver stub (each in a process of its own)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import elf_shared, host_shim, structs
from prime_kernels.loader import abi
from tests.stub_cuda import run_with_stub

ROOT = Path(__file__).resolve().parents[2]

# Names for the code that runs in the child process: the library, a loaded kernel and a request for it.
PRELUDE = """
import ctypes, json, struct
from ctypes import byref, c_int32, c_uint64, sizeof
from build_tools import host_shim
from prime_kernels.loader import abi
from tests.helpers.fake_cubin import fake_cubin, launch_meta
lib = ctypes.CDLL(str(host_shim.build()))
lib.pk_host_error_name.restype = lib.pk_host_error_text.restype = ctypes.c_char_p
lib.pk_host_layout.restype = c_uint64

def load(cubin, expect=0):
    out = c_uint64()
    status = lib.pk_host_load(cubin, c_uint64(len(cubin)), byref(out))
    assert status == expect, status
    return out

def kernel(smem=0):
    out = c_uint64()
    assert lib.pk_host_kernel(load(fake_cubin()), b"pk_fake", byref(out)) == 0
    if smem:
        assert lib.pk_host_set_kernel_attribute(out, 8, 0, smem) == 0
    return out

def request(data=b"", records=(), **values):
    keep = ctypes.create_string_buffer(data, max(len(data), 1)), (abi.PkTensorMap * max(len(records), 1))(*records)
    made = abi.PkLaunch(args=ctypes.addressof(keep[0]), args_bytes=len(data), maps=ctypes.addressof(keep[1]),
                        num_maps=len(records), grid=(1, 1, 1), block=(128, 1, 1), failed_map=77)
    for name, value in values.items():
        setattr(made, name, value)
    made.keep = keep
    return made

def a_map(offset, address=0x7000, **values):
    made = abi.PkTensorMap(address=address, dims=(2048, 100), strides=(4096,), box=(64, 128), elem_strides=(1, 1),
                           dtype=9, rank=2, swizzle=3, l2_promotion=2, args_offset=offset)
    for name, value in values.items():
        setattr(made, name, value)
    return made
"""


def child(code: str, **settings: str) -> str:
    return run_with_stub(PRELUDE + code, **settings)


def test_the_file_needs_nothing_and_exports_only_its_interface() -> None:
    library = elf_shared.read(host_shim.build().read_bytes())
    assert (library.needed, library.search_paths, library.version_needs) == ((), (), False)
    assert library.undefined == ("dlerror", "dlopen", "dlsym")
    header = host_shim.HEADER.read_text()
    assert len(library.exported) == 21
    assert all(f" {name}(" in header or f"*{name}(" in header for name in library.exported)


def test_the_ctypes_structs_have_the_header_s_layout() -> None:
    assert abi.layout() == structs.layout_hash(structs.parse(host_shim.HEADER.read_text()).values())


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = host_shim.build(tmp_path / "a" / "x.so"), host_shim.build(tmp_path / "b" / "x.so")
    assert one.read_bytes() == two.read_bytes()
    assert str(ROOT).encode() not in one.read_bytes()


def test_a_missing_or_failing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(host_shim.ShimError, match="false exited 1"):
        host_shim.build(tmp_path / "x.so", compiler="false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(host_shim.ShimError, match="no C compiler found"):
        host_shim.build(tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


def test_without_a_driver_every_call_answers_with_a_code(tmp_path: Path) -> None:
    # A folder with an empty libcuda.so.1 first on the path stands for a machine without a driver, wherever this runs.
    code = """
message = ctypes.create_string_buffer(256)
number, handle = c_int32(5), c_uint64(5)
results = [lib.pk_host_open(message, 256), lib.pk_host_driver_version(byref(number)),
           lib.pk_host_device_count(byref(number)), lib.pk_host_use_device(0),
           lib.pk_host_launch(byref(request(kernel=1)))]
cubin = fake_cubin()
results.append(lib.pk_host_load(cubin, c_uint64(len(cubin)), byref(handle)))
print(json.dumps([results, message.value.decode(), number.value, handle.value, lib.pk_host_error_name(-1).decode(),
                  lib.pk_host_error_name(200).decode(), lib.pk_host_error_text(-5).decode()]))
"""
    (tmp_path / "libcuda.so.1").write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    results, message, number, handle, own, foreign, text = json.loads(done.stdout)
    assert results == [abi.E_NO_DRIVER] * 6
    assert "libcuda.so.1" in message
    assert (number, handle) == (5, 5)
    assert (own, foreign) == ("PK_E_NO_DRIVER", "CUDA_ERROR_UNRECOGNIZED")
    assert "cut short" in text


def test_an_old_driver_is_named_by_its_missing_function() -> None:
    code = """
message = ctypes.create_string_buffer(256)
print(lib.pk_host_open(message, 256), message.value.decode())
"""
    assert run_with_stub(PRELUDE + code, old=True) == f"{abi.E_NO_SYMBOL} cuLibraryLoadData\n"


def test_device_facts_come_from_the_driver() -> None:
    code = """
version, count, facts = c_int32(), c_int32(), abi.PkDevice()
assert lib.pk_host_driver_version(byref(version)) == 0
assert lib.pk_host_device_count(byref(count)) == 0
assert lib.pk_host_device(1, byref(facts)) == 0
assert lib.pk_host_device(2, byref(facts)) == 101
print(json.dumps([version.value, count.value, facts.name.decode(), facts.ordinal, facts.cc_major, facts.cc_minor,
                  facts.sm_count, facts.smem_optin_bytes, facts.cluster_launch, facts.pci_bus,
                  bytes(facts.uuid).hex()]))
"""
    settings = {"PK_STUB_DRIVER": "12090", "PK_STUB_DEVICES": "2", "PK_STUB_CC": "10.3", "PK_STUB_SMS": "148"}
    got = json.loads(child(code, PK_STUB_NAME="NVIDIA B300", **settings))
    uuid = bytes(range(16, 32)).hex()
    assert got == [12090, 2, "NVIDIA B300", 1, 10, 3, 148, 232448, 1, 17, uuid]


def test_a_failing_driver_call_returns_its_own_code_and_writes_nothing() -> None:
    code = """
facts, count = abi.PkDevice(ordinal=9), c_int32(7)
print(lib.pk_host_device(0, byref(facts)), facts.ordinal, lib.pk_host_device_count(byref(count)), count.value,
      lib.pk_host_error_name(100).decode(), lib.pk_host_error_text(100).decode())
"""
    got = child(code, PK_STUB_FAIL="cuDeviceGetUuid=999,cuDeviceGetCount=100")
    assert got == "999 9 100 7 CUDA_ERROR_NO_DEVICE no CUDA-capable device is detected\n"


def test_the_current_context_is_told_and_only_use_device_makes_one() -> None:
    code = """
context, ordinal = c_uint64(1), c_int32(5)
assert lib.pk_host_current(byref(context), byref(ordinal)) == 0
assert (context.value, ordinal.value) == (0, -1)
assert not stub.calls("cuDevicePrimaryCtxRetain")
assert lib.pk_host_use_device(0) == 0
assert len(stub.calls("cuDevicePrimaryCtxRetain")) == 1
"""
    child(code, PK_STUB_CONTEXT="0")


def test_images_are_refused_before_the_driver_could_read_past_their_end() -> None:
    code = f"""
whole = fake_cubin()
load(whole)
before = len(stub.calls("cuLibraryLoadData"))
for bad in (b"", b"x" * 100, whole[:63], whole[:-1], whole[:200]):
    load(bad, expect={abi.E_BAD_IMAGE})
assert len(stub.calls("cuLibraryLoadData")) == before
"""
    child(code)


@pytest.mark.parametrize(
    ("cubin", "driver", "device", "result"),
    [
        ("sm=90, toolkit='13.0.88'", "13000", "9.0", 0),
        ("sm=90, toolkit='13.0.88'", "12090", "9.0", 200),
        ("sm=90, toolkit='12.9.86'", "12090", "9.0", 0),
        ("sm=90, toolkit='12.9.86'", "13000", "9.0", 0),
        ("sm=90, toolkit='13.0.88'", "13000", "10.0", 209),
        ("sm=103, toolkit='12.9.86'", "12090", "10.3", 0),
        ("sm=100, toolkit='13.0.88'", "13000", "10.3", 209),
    ],
)
def test_load_errors_are_those_of_the_driver(cubin: str, driver: str, device: str, result: int) -> None:
    child(f"load(fake_cubin({cubin}), expect={result})", PK_STUB_DRIVER=driver, PK_STUB_CC=device)


def test_kernels_globals_and_attributes_of_a_library() -> None:
    code = f"""
library, k, other = load(fake_cubin(meta=launch_meta(threads=384))), c_uint64(), c_uint64(3)
assert lib.pk_host_kernel(library, b"pk_fake", byref(k)) == 0
assert lib.pk_host_kernel(library, b"pk_absent", byref(other)) == 500 and other.value == 3
meta, size = ctypes.create_string_buffer(72), c_uint64()
assert lib.pk_host_read_global(library, b"pk_launch_meta", meta, c_uint64(72), byref(size)) == 0
assert meta.raw == launch_meta(threads=384)
assert lib.pk_host_read_global(library, b"pk_launch_meta", meta, c_uint64(64), byref(size)) == {abi.E_BAD_SIZE}
assert size.value == 72
value = c_int32()
assert lib.pk_host_kernel_attribute(k, 4, 0, byref(value)) == 0 and value.value == 168
assert lib.pk_host_set_kernel_attribute(k, 8, 0, 232449) == 1
assert lib.pk_host_set_kernel_attribute(k, 8, 0, 232448) == 0
assert lib.pk_host_max_active_blocks(k, 256, 100000, byref(value)) == 0 and value.value == 2
assert lib.pk_host_unload(library) == 0
assert lib.pk_host_unload(library) == 400
"""
    child(code)


def test_a_launch_passes_shape_cluster_flags_and_stream() -> None:
    code = """
k = kernel(smem=225280)
r = request(b"abcd" * 8, kernel=k.value, stream=0x1234, grid=(132, 2, 1), block=(384, 1, 1), cluster=(2, 1, 1),
            smem_bytes=225280, flags=3)
assert lib.pk_host_launch(byref(r)) == 0 and r.failed_map == -1
print(json.dumps(stub.calls("cuLaunchKernelEx")[-1]))
"""
    call = json.loads(child(code, PK_STUB_ARGS_BYTES="32"))
    assert call["kernel"] == "pk_fake"
    assert (call["grid"], call["block"], call["smem"], call["stream"]) == ([132, 2, 1], [384, 1, 1], 225280, 0x1234)
    assert call["attrs"] == [[4, 2, 1, 1], [2, 1, 0, 0], [6, 1, 0, 0]]
    assert bytes.fromhex(call["args"]) == b"abcd" * 8
    assert call["args_aligned"]


def test_a_plain_launch_has_no_attribute() -> None:
    code = """
r = request(b"x" * 8, kernel=kernel().value, cluster=(1, 1, 1))
assert lib.pk_host_launch(byref(r)) == 0
print(json.dumps(stub.calls("cuLaunchKernelEx")[-1]["attrs"]))
"""
    assert json.loads(child(code)) == []


def test_tensor_maps_are_encoded_into_a_copy_of_the_arguments() -> None:
    code = """
args = bytes(range(64)) + b"\\xee" * 256
r = request(args, [a_map(64, 0x7000), a_map(192, 0x9000, swizzle=2, box=(32, 8))], kernel=kernel().value)
assert lib.pk_host_launch(byref(r)) == 0
assert r.keep[0].raw == args, "the caller's arguments are only read"
print(stub.calls("cuLaunchKernelEx")[-1]["args"])
"""
    raw = bytes.fromhex(child(code, PK_STUB_ARGS_BYTES="320").strip())
    assert raw[:64] == bytes(range(64))
    for at, address, box, swizzle in ((64, 0x7000, (64, 128), 3), (192, 0x9000, (32, 8), 2)):
        one = raw[at : at + 128]
        assert one[:8] == b"STUBMAP\0"
        assert int.from_bytes(one[8:16], "little") == address
        assert [int.from_bytes(one[16 + 8 * i : 24 + 8 * i], "little") for i in range(2)] == [2048, 100]
        assert int.from_bytes(one[56:60], "little") == 4096
        assert tuple(int.from_bytes(one[72 + 2 * i : 74 + 2 * i], "little") for i in range(2)) == box
        assert one[87:90] == bytes([9, 2, swizzle])


def test_a_refused_tensor_map_is_named_and_nothing_is_launched() -> None:
    code = """
bad = [a_map(0), a_map(128, 0x7008)]
r = request(b"z" * 256, bad, kernel=kernel().value)
assert lib.pk_host_launch(byref(r)) == 1 and r.failed_map == 1
r = request(b"z" * 256, [a_map(0, box=(128, 128))], kernel=kernel().value)
assert lib.pk_host_launch(byref(r)) == 1 and r.failed_map == 0
assert not stub.calls("cuLaunchKernelEx")
"""
    child(code)


def test_requests_that_would_write_outside_the_arguments_are_refused() -> None:
    code = f"""
k = kernel().value
bad = [request(b"z" * 128, [a_map(64)], kernel=k), request(b"z" * 256, [a_map(32)], kernel=k),
       request(b"z" * 128, [a_map(0, rank=6)], kernel=k), request(b"z" * 128, [a_map(0, rank=0)], kernel=k),
       request(b"z" * 128, [a_map(0xFFFFFFC0)], kernel=k), request(b"z" * 16385, kernel=k), request(b"z", kernel=0),
       request(b"zz", kernel=k, args=0), request(b"z" * 128, [a_map(0)], kernel=k, maps=0),
       request(b"z" * 128, [a_map(0)], kernel=k, num_maps=65)]
print([lib.pk_host_launch(byref(r)) for r in bad])
assert lib.pk_host_launch(None) == {abi.E_BAD_ARGUMENT}
assert lib.pk_host_encode_tensor_map(byref(a_map(0)), ctypes.c_void_p(8)) == {abi.E_BAD_ARGUMENT}
assert not stub.calls("cuTensorMapEncodeTiled") and not stub.calls("cuLaunchKernelEx")
"""
    assert json.loads(child(code)) == [abi.E_BAD_ARGUMENT] * 10


def test_occupancy_counts_clusters_of_the_request() -> None:
    code = """
out, r = c_int32(), request(kernel=kernel().value, cluster=(2, 1, 1), grid=(132, 1, 1))
assert lib.pk_host_max_active_clusters(byref(r), byref(out)) == 0
print(out.value)
"""
    assert child(code) == "66\n"
    assert child(code, PK_STUB_SMS="60") == "30\n"


def test_threads_may_make_the_first_call_at_once() -> None:
    code = """
import threading
start, codes = threading.Barrier(8), []
def first():
    start.wait()
    r = request(b"q" * 64, kernel=1)
    v = c_int32()
    codes.append((lib.pk_host_driver_version(byref(v)), v.value, lib.pk_host_device_count(byref(v))))
threads = [threading.Thread(target=first) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert codes == [(0, 13000, 0)] * 8, codes
"""
    child(code)
