# SPDX-License-Identifier: Apache-2.0
"""Driver, devices and loading, against the driver stub: each case in a process of its own, over both bindings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from build_tools import host_shim
from prime_kernels.errors import ArtifactError, BackendUnavailable
from prime_kernels.loader import group, hostlib
from tests.stub_cuda import run_with_stub

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = ["shim", "twin"]

# `host`: the binding under test; `at`: an installation of made-up kernels; `out(...)`: one JSON line for the test.
PRELUDE = """
import json, os, sys
from pathlib import Path
from build_tools import host_shim
from prime_kernels.errors import PrimeKernelsError
from prime_kernels.loader import device, group, hostlib, kernels, resolve, twin
from tests.helpers import installation as made
folder = Path(os.environ["PK_TEST_FOLDER"])
host = (hostlib.load_library(host_shim.build()) if os.environ["PK_TEST_BINDING"] == "shim"
        else hostlib.Host(twin.TwinLibrary(), "ctypes"))
hostlib._host = host
def out(**values):
    print(json.dumps(values, default=str))
def install(**settings):
    at = made.installation(folder, sources=False, **settings)
    resolve.installation = lambda: at
    return at
def failure(call, *args, **named):
    try:
        call(*args, **named)
    except PrimeKernelsError as error:
        return {"kind": type(error).__name__, "code": error.code, "text": str(error), "facts": error.facts,
                "remedy": error.remedy}
    return None
"""


def child(code: str, folder: Path, binding: str = "shim", *, old: bool = False, **settings: str) -> Any:
    settings |= {"PK_TEST_FOLDER": str(folder), "PK_TEST_BINDING": binding}
    text = run_with_stub(PRELUDE + textwrap.dedent(code), old=old, **settings)
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("binding", BINDINGS)
def test_driver_and_devices_are_described(binding: str, tmp_path: Path) -> None:
    found = child(
        """
        machine = device.machine(host)
        gpu = machine.devices[1]
        out(driver=machine.driver, count=len(machine.devices), cc=gpu.cc, sms=gpu.sm_count, name=gpu.name,
            uuid=gpu.uuid, mig=device.is_mig(gpu), smem=gpu.smem_optin_bytes, current=host.current_device(),
            contexts=len(stub.calls("cuDevicePrimaryCtxRetain")))
        """,
        tmp_path,
        binding,
        PK_STUB_DEVICES="2",
        PK_STUB_NAME="NVIDIA H200 MIG 3g.71gb",
        PK_STUB_SMS="60",
    )
    assert found["driver"] == 13000
    assert (found["count"], found["cc"], found["sms"]) == (2, [9, 0], 60)
    assert found["name"] == "NVIDIA H200 MIG 3g.71gb"
    assert found["mig"] is True
    assert found["uuid"].startswith("GPU-")
    assert len(found["uuid"]) == 40
    assert found["smem"] == 232448
    assert found["contexts"] == 0


def test_both_bindings_describe_a_device_alike(tmp_path: Path) -> None:
    code = "out(facts=str(host.device(0)), driver=host.driver_version(), count=host.device_count())"
    assert child(code, tmp_path, "shim") == child(code, tmp_path, "twin")


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_context_is_made_only_when_it_is_asked_for(binding: str, tmp_path: Path) -> None:
    found = child(
        """
        before = host.current_device()
        host.use_device(0)
        out(before=before, after=host.current_device(), contexts=len(stub.calls("cuDevicePrimaryCtxRetain")))
        """,
        tmp_path,
        binding,
    )
    assert found["contexts"] == 1
    assert found["after"] == 0


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_driver_without_the_library_calls_is_e02(binding: str, tmp_path: Path) -> None:
    found = child("out(error=failure(host.driver_version))", tmp_path, binding, old=True)["error"]
    assert (found["kind"], found["code"]) == ("BackendUnavailable", "E02")
    assert "cuLibrary" in found["facts"]["missing"]
    assert found["remedy"]


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_host_without_a_driver_is_e01_and_says_where_to_look(binding: str, tmp_path: Path) -> None:
    code = PRELUDE + "out(error=failure(host.driver_version), reason=device.unavailable_reason('fake'))"
    env = {"PATH": os.environ["PATH"], "PK_TEST_FOLDER": str(tmp_path), "PK_TEST_BINDING": binding}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    if found["error"] is None:
        pytest.skip("this host has an NVIDIA driver")
    assert (found["error"]["kind"], found["error"]["code"]) == ("BackendUnavailable", "E01")
    assert "libcuda.so.1" in found["error"]["text"]
    assert "/usr/lib/wsl/lib" in found["error"]["remedy"]
    assert found["error"]["facts"]["library"] == "libcuda.so.1"
    assert found["reason"] == found["error"]["text"]


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"PK_STUB_CC": "12.0", "PK_STUB_NAME": "NVIDIA RTX 5090"}, "E03", ["NVIDIA RTX 5090 (sm_120)", "sm_90a"]),
        ({"PK_STUB_DRIVER": "12020"}, "E02", ["CUDA 12.2", "cu129", "cu130"]),
        ({"PK_STUB_DEVICES": "0"}, "E07", ["no GPU"]),
        ({"PK_STUB_FAIL": "cuLibraryLoadData=209"}, "E04", ["sm_90", "cu130/sm_90a"]),
        ({"PK_STUB_FAIL": "cuLibraryLoadData=200"}, "E05", ["too new for this driver", "OS/ABI 65"]),
        ({"PK_STUB_FAIL": "cuLibraryLoadData=222"}, "E06", ["PTX", "cu130/sm_90a"]),
        ({"PK_STUB_FAIL": "cuLibraryLoadData=218"}, "E06", ["PTX"]),
        ({"PK_STUB_FAIL": "cuLibraryLoadData=2"}, "E43", ["cu130/sm_90a", "(2)"]),
        ({"PK_STUB_FAIL": "cuLibraryGetKernel=500"}, "E43", ["looking up kernel pk_fake", "(500)"]),
        ({"PK_STUB_FAIL": "cuInit=999"}, "E43", ["(999)"]),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_what_keeps_a_kernel_from_loading_has_code_facts_and_remedy(
    settings: dict[str, str], code: str, words: list[str], tmp_path: Path
) -> None:
    found = child("install()\nout(error=failure(kernels.load_kernel, made.KEY, device=0))", tmp_path, **settings)
    error = found["error"]
    assert error["code"] == code
    assert all(word in error["text"] for word in words), error["text"]
    assert error["facts"]
    assert error["remedy"]


def test_a_refused_load_names_what_was_asked_for_and_what_is_there(tmp_path: Path) -> None:
    code = "install()\nout(error=failure(kernels.load_kernel, made.KEY, device=0))"
    facts = child(code, tmp_path, PK_STUB_FAIL="cuLibraryLoadData=209")["error"]["facts"]
    assert {"cuda_result", "key", "target", "device", "driver", "origin", "elf"} <= set(facts)


@pytest.mark.parametrize(
    ("settings", "origin"),
    [
        ({}, "cu130/sm_90a"),
        ({"PK_STUB_DRIVER": "12090"}, "cu129/sm_90a"),
        ({"PK_STUB_CC": "10.0"}, "cu130/sm_100a"),
        ({"PK_STUB_CC": "10.3", "PK_STUB_DRIVER": "12090"}, "cu129/sm_103a"),
    ],
    ids=["H200", "H200 with an older driver", "B200", "B300 with an older driver"],
)
def test_a_device_gets_the_cubin_for_itself_and_its_driver(
    settings: dict[str, str], origin: str, tmp_path: Path
) -> None:
    found = child(
        """
        install()
        kernel = kernels.load_kernel(made.KEY, device=0)
        again = kernels.load_kernel(made.KEY, device=0)
        out(origin=kernel.spec.origin, same=kernel is again, loads=len(stub.calls("cuLibraryLoadData")),
            contexts=len(stub.calls("cuDevicePrimaryCtxRetain")), reason=device.unavailable_reason("fake"))
        """,
        tmp_path,
        **settings,
    )
    assert found == {"origin": origin, "same": True, "loads": 1, "contexts": 0, "reason": None}


def test_a_pack_forced_by_name_is_tried_on_an_older_driver_and_the_driver_has_the_last_word(tmp_path: Path) -> None:
    code = "install(pack='cu130')\nout(error=failure(kernels.load_kernel, made.KEY, device=0))"
    error = child(code, tmp_path, PK_STUB_DRIVER="12090")["error"]
    assert error["code"] == "E05"
    assert "unset PRIME_KERNELS_PACK" in error["remedy"]


def test_threads_that_load_at_once_load_once_and_all_devices_share_one_library(tmp_path: Path) -> None:
    found = child(
        """
        import threading
        install()
        got = []
        threads = [threading.Thread(target=lambda i=i: got.append(kernels.load_kernel(made.KEY, device=i % 2)))
                   for i in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        out(loads=len(stub.calls("cuLibraryLoadData")), kernels=len(set(map(id, got))),
            devices=sorted({k.ordinal for k in got}))
        """,
        tmp_path,
        PK_STUB_DEVICES="2",
    )
    assert found == {"loads": 1, "kernels": 2, "devices": [0, 1]}


def test_an_unknown_kernel_is_named_with_the_trace(tmp_path: Path) -> None:
    code = """
        install()
        out(error=failure(kernels.load_kernel, "no|such", device=0), reason=device.unavailable_reason("no"))
        """
    found = child(code, tmp_path)
    assert found["error"]["code"] == "E09"
    assert "cu130/sm_90a" in found["error"]["text"]
    assert "[E09]" in found["reason"]


def test_a_family_is_available_only_where_every_op_of_it_is(tmp_path: Path) -> None:
    found = child(
        """
        for arch, ops in {"sm_90a": ("up", "down"), "sm_100a": ("up",)}.items():
            pairs = [(made.pack_entry("cu130", arch, key=f"{op}|{n}", facts={"family": "moe", "op": op}),
                      made.cubin_for("cu130", arch)) for op in ops for n in "ab"]
            made.write_packs(folder / "packs", {f"cu130/{arch}": made.pack_bytes("cu130", arch, pairs)})
        at = made.installation(folder, packs=False, sources=False)
        resolve.installation = lambda: at
        hopper = device.unavailable_reason("moe")
        os.environ["PK_STUB_CC"] = "10.0"
        out(hopper=hopper, blackwell=device.unavailable_reason("moe"))
        """,
        tmp_path,
    )
    assert found["hopper"] is None
    assert "no kernel down for sm_100" in found["blackwell"]
    assert "down|a" in found["blackwell"]


def test_more_shared_memory_than_the_device_has_is_e40(tmp_path: Path) -> None:
    found = child(
        """
        large = {"smem_bytes": 400000}
        pairs = [(made.pack_entry("cu130", "sm_90a", **large), made.cubin_for("cu130", "sm_90a", **large))]
        made.write_packs(folder / "packs", {"cu130/sm_90a": made.pack_bytes("cu130", "sm_90a", pairs)})
        at = made.installation(folder, packs=False, sources=False)
        resolve.installation = lambda: at
        out(error=failure(kernels.load_kernel, made.KEY, device=0))
        """,
        tmp_path,
    )["error"]
    assert (found["kind"], found["code"]) == ("BackendUnavailable", "E40")
    assert found["facts"]["needed"] == 400000
    assert found["facts"]["fits"] == 232448


def test_a_child_forked_after_cuda_was_initialised_is_told_to_spawn(tmp_path: Path) -> None:
    found = child(
        """
        install()
        def in_child(work):
            pid = os.fork()
            if pid == 0:
                (folder / "said").write_text(json.dumps(work(), default=str))
                os._exit(0)
            os.waitpid(pid, 0)
            return json.loads((folder / "said").read_text())
        host.driver_version()
        early = in_child(lambda: failure(kernels.load_kernel, made.KEY, device=0))
        kernel = kernels.load_kernel(made.KEY, device=0)
        call = dict(grid=1, stream=0, args={}, maps={})
        late = in_child(lambda: [failure(kernels.load_kernel, "another", device=0), failure(kernel.launch, **call),
                                 failure(host.device_count)])
        out(early=early, late=late, reason=in_child(lambda: device.unavailable_reason("fake")))
        """,
        tmp_path,
    )
    assert found["early"] is None
    for error in found["late"]:
        assert (error["kind"], error["code"]) == ("BackendUnavailable", "E60")
        assert "spawn" in error["remedy"]
        assert error["facts"]["parent"] != error["facts"]["pid"]
    assert "[E60]" in found["reason"]


def test_a_driver_that_calls_itself_not_initialised_was_forked_by_somebody_else(tmp_path: Path) -> None:
    found = child("out(error=failure(host.device_count))", tmp_path, PK_STUB_FAIL="cuInit=3")["error"]
    assert (found["kind"], found["code"]) == ("BackendUnavailable", "E60")
    assert "counting devices failed with CUDA_ERROR_NOT_INITIALIZED" in found["text"]


def test_ranks_that_differ_are_named_by_field_and_value(tmp_path: Path) -> None:
    found = child(
        """
        install()
        mine = group.identity(0)
        ranks = [mine, mine, mine | {"version": "9.9"}, mine]
        group.compare_identities([mine] * 4)
        out(mine=mine, error=failure(group.compare_identities, ranks))
        """,
        tmp_path,
    )
    assert set(found["mine"]) == {"version", "compute capability", "host layout", "kernels"}
    error = found["error"]
    assert (error["kind"], error["code"]) == ("ConfigMismatch", "E50")
    assert "9.9 on rank 2" in error["text"]
    assert "on rank 0, 1, 3" in error["text"]
    assert error["facts"]["field"] == "version"
    assert error["remedy"]


def test_pairs_that_cannot_reach_each_other_are_named_with_the_matrix() -> None:
    group.check_reachable([[True, True], [True, True]], "torch symmetric memory")
    group.check_reachable([[False]], "torch symmetric memory")
    with pytest.raises(BackendUnavailable) as caught:
        group.check_reachable([[True, True, False], [True, True, True], [True, False, True]], "nvshmem4py")
    error = caught.value
    assert error.code == "E51"
    assert "2 pairs of ranks" in str(error)
    assert "0->2, 2->1" in str(error)
    assert "  0: . . x" in str(error)
    assert "nvshmem4py" in str(error)
    assert error.facts["pairs"] == [(0, 2), (2, 1)]
    assert error.remedy


def test_a_library_of_another_build_is_refused_with_both_places(tmp_path: Path) -> None:
    source = host_shim.SOURCE.read_text().replace("return PK_HOST_LAYOUT;", "return PK_HOST_LAYOUT + 1;")
    (tmp_path / "prime_host.c").write_text(source)
    compiler = host_shim.find_compiler()
    assert compiler is not None
    path = tmp_path / "libprime_host.so"
    command = [
        compiler,
        *host_shim.FLAGS,
        f"-I{host_shim.HEADER.parent}",
        "-o",
        str(path),
        str(tmp_path / "prime_host.c"),
    ]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(ArtifactError) as caught:
        hostlib.load_library(path)
    assert caught.value.code == "E11"
    assert {"library", "package", "found", "needed"} <= set(caught.value.facts)
    assert str(path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("content", [None, b"no library"], ids=["missing", "damaged"])
def test_a_library_that_cannot_load_is_replaced_by_the_twin(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "libprime_host.so"
    if content is not None:
        path.write_bytes(content)
    host = hostlib.load_library(path)
    assert host.name.startswith("ctypes")
    assert host.error_name(0) == "CUDA_SUCCESS"
