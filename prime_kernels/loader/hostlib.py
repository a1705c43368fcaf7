# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver as Python calls: over the shipped host library, or over its pure-ctypes twin.

The library is chosen once per process; both speak the ABI of kernels_src/host/prime_host.h.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from ctypes import addressof, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from prime_kernels.errors import ArtifactError, BackendUnavailable, LaunchError
from prime_kernels.loader import abi, fork
from prime_kernels.loader.abi import PkDevice, PkLaunch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOG = logging.getLogger("prime_kernels.loader")
LIBRARY = Path(__file__).resolve().parent.parent / "_host" / "libprime_host.so"

_P, _U32, _I32, _U64, _TEXT = c_void_p, c_uint32, c_int32, c_uint64, c_char_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: (result, arguments...); pointers are plain addresses
    "pk_host_abi": (_U32,),
    "pk_host_layout": (_U64,),
    "pk_host_open": (_I32, _P, _U32),
    "pk_host_error_name": (_TEXT, _I32),
    "pk_host_error_text": (_TEXT, _I32),
    "pk_host_driver_version": (_I32, _P),
    "pk_host_device_count": (_I32, _P),
    "pk_host_device": (_I32, _I32, _P),
    "pk_host_device_attribute": (_I32, _I32, _I32, _P),
    "pk_host_current": (_I32, _P, _P),
    "pk_host_use_device": (_I32, _I32),
    "pk_host_load": (_I32, _P, _U64, _P),
    "pk_host_unload": (_I32, _U64),
    "pk_host_kernel": (_I32, _U64, _TEXT, _P),
    "pk_host_kernel_attribute": (_I32, _U64, _I32, _I32, _P),
    "pk_host_set_kernel_attribute": (_I32, _U64, _I32, _I32, _I32),
    "pk_host_read_global": (_I32, _U64, _TEXT, _P, _U64, _P),
    "pk_host_max_active_clusters": (_I32, _P, _P),
    "pk_host_max_active_blocks": (_I32, _U64, _U32, _U32, _P),
    "pk_host_encode_tensor_map": (_I32, _P, _P),
    "pk_host_launch": (_I32, _P),
}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU as the driver describes it; bytes, counts, and the compute capability `cc` as (major, minor)."""

    ordinal: int
    name: str
    uuid: str
    cc: tuple[int, int]
    sm_count: int
    total_bytes: int
    smem_optin_bytes: int
    l2_bytes: int
    cluster_launch: bool
    pci: str


def no_driver(detail: str) -> BackendUnavailable:
    """The error for a host without libcuda.so.1 (E01)."""
    return BackendUnavailable(
        "no NVIDIA driver library (libcuda.so.1) on this host; prime_kernels imported fine, GPU calls need a driver"
        + (f" ({detail})." if detail else "."),
        code="E01",
        facts={"library": "libcuda.so.1", "detail": detail},
        remedy="Install the NVIDIA driver; on WSL check /usr/lib/wsl/lib; in a container run with --gpus all.",
    )


class Host:
    """Driver calls that raise. Makes no CUDA context except in `use_device`.

    Args:
        library: The loaded C library or a `twin.TwinLibrary`.
        name: What to call it in reports.
    """

    def __init__(self, library: Any, name: str) -> None:
        self.lib = library
        self.name = name
        self._opened = False

    def open(self) -> None:
        """Load the driver library.

        Raises:
            BackendUnavailable: There is none (E01), or it lacks a function that is needed (E02).
        """
        if self._opened:
            return
        message = ctypes.create_string_buffer(512)
        status = self.lib.pk_host_open(addressof(message), len(message))
        detail = message.value.decode(errors="replace")
        if status in (abi.E_NO_DRIVER, abi.E_NO_DLOPEN):
            raise no_driver(detail)
        if status == abi.E_NO_SYMBOL:
            raise BackendUnavailable(
                f"the NVIDIA driver has no {detail}; need a driver for CUDA 12.0 (R525) or newer.",
                code="E02",
                facts={"missing": detail, "needed": 12000},
                remedy="Update the NVIDIA driver.",
            )
        self.check(status, "loading the driver")
        self._opened = True

    def _init(self) -> None:
        """Before a call that initialises the driver: a forked child is refused, and a later child will be."""
        fork.check()
        self.open()
        fork.mark()

    def error_name(self, status: int) -> str:
        """Name of a return code, e.g. CUDA_ERROR_INVALID_IMAGE."""
        return bytes(self.lib.pk_host_error_name(status)).decode(errors="replace")

    def check(self, status: int, doing: str) -> None:
        """Turn a non-zero return code into a LaunchError that says what was being done.

        Raises:
            LaunchError: `status` is not 0 (E43).
            BackendUnavailable: The driver calls itself not initialised, as it does in a forked child (E60).
        """
        if status == 0:
            return
        name = self.error_name(status)
        if status == abi.NOT_INITIALIZED:
            raise fork.error(f"{doing} failed with {name}")
        text = bytes(self.lib.pk_host_error_text(status)).decode(errors="replace")
        raise LaunchError(
            f"{doing} failed: {name} ({status}): {text}.",
            facts={"cuda_result": status, "name": name, "doing": doing},
            remedy="Check for an earlier CUDA error, then run `prime-kernels doctor`.",
        )

    def _number(self, kind: Any, doing: str, call: Any, *args: Any) -> int:
        self.open()
        out = kind()
        self.check(call(*args, addressof(out)), doing)
        return int(out.value)

    def driver_version(self) -> int:
        """CUDA version of the driver, e.g. 13000 for 13.0."""
        return self._number(c_int32, "asking for the driver version", self.lib.pk_host_driver_version)

    def device_count(self) -> int:
        """Number of visible GPUs; 0 if the driver sees none."""
        self._init()
        out = c_int32()
        status = self.lib.pk_host_device_count(addressof(out))
        if status == abi.NO_DEVICE:
            return 0
        self.check(status, "counting devices")
        return int(out.value)

    def device(self, ordinal: int) -> DeviceFacts:
        """Facts of one GPU.

        Raises:
            BackendUnavailable: No driver (E01).
            LaunchError: No such device (E43).
        """
        self._init()
        out = PkDevice()
        self.check(self.lib.pk_host_device(ordinal, addressof(out)), f"asking for device {ordinal}")
        digits = bytes(out.uuid).hex()
        uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        return DeviceFacts(
            ordinal=ordinal,
            name=out.name.decode(errors="replace"),
            uuid=f"GPU-{uuid}",
            cc=(out.cc_major, out.cc_minor),
            sm_count=out.sm_count,
            total_bytes=out.total_bytes,
            smem_optin_bytes=out.smem_optin_bytes,
            l2_bytes=out.l2_bytes,
            cluster_launch=bool(out.cluster_launch),
            pci=f"{out.pci_domain:04x}:{out.pci_bus:02x}:{out.pci_device:02x}",
        )

    def current_device(self) -> int:
        """Device of the calling thread's current context; -1 if it has none."""
        self._init()
        context, ordinal = c_uint64(), c_int32()
        self.check(self.lib.pk_host_current(addressof(context), addressof(ordinal)), "asking for the current context")
        return int(ordinal.value)

    def use_device(self, ordinal: int) -> None:
        """Make the primary context of a device current, creating it if there is none yet."""
        self._init()
        self.check(self.lib.pk_host_use_device(ordinal), f"making the context of device {ordinal} current")

    def load(self, cubin: bytes) -> tuple[int, int]:
        """Load a cubin from memory; returns (status, library handle), because the caller knows what a refusal means."""
        self._init()
        # A bytes object is its own buffer: what was hashed is what is loaded.
        library, image = c_uint64(), c_char_p(cubin)
        status = self.lib.pk_host_load(ctypes.cast(image, c_void_p).value, len(cubin), addressof(library))
        return int(status), int(library.value)

    def unload(self, library: int) -> None:
        """Unload what `load` returned."""
        self.check(self.lib.pk_host_unload(library), "unloading a kernel library")

    def kernel(self, library: int, name: str) -> int:
        """Handle of a kernel in a loaded library."""
        return self._number(c_uint64, f"looking up kernel {name}", self.lib.pk_host_kernel, library, name.encode())

    def kernel_attribute(self, kernel: int, attribute: int, ordinal: int) -> int:
        """Value of a CUfunction_attribute on one device."""
        call = self.lib.pk_host_kernel_attribute
        return self._number(c_int32, f"reading kernel attribute {attribute}", call, kernel, attribute, ordinal)

    def set_kernel_attribute(self, kernel: int, attribute: int, ordinal: int, value: int) -> int:
        """Set a CUfunction_attribute on one device; returns the status."""
        return int(self.lib.pk_host_set_kernel_attribute(kernel, attribute, ordinal, value))

    def max_active_clusters(self, request: PkLaunch) -> int:
        """Clusters of this launch that the current context holds at once."""
        out = c_int32()
        status = self.lib.pk_host_max_active_clusters(addressof(request), addressof(out))
        self.check(status, "asking for resident clusters")
        return int(out.value)


def load_library(path: Path = LIBRARY) -> Host:
    """Load the host library, or the twin if it cannot be loaded.

    Raises:
        ArtifactError: The library has another struct layout than this package: two builds are mixed (E11).
    """
    from prime_kernels.loader.twin import TwinLibrary

    try:
        library = ctypes.CDLL(os.fspath(path))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as err:
        LOG.info("host library %s not used (%s); launching through ctypes, which is slower", path, err)
        return Host(TwinLibrary(), f"ctypes ({'missing' if not path.exists() else err})")
    found, needed = library.pk_host_layout(), abi.layout()
    if library.pk_host_abi() != abi.HOST_ABI or found != needed:
        raise ArtifactError(
            f"host library {path} has struct layout {found:016x}, this package needs {needed:016x}: "
            "two builds are mixed.",
            code="E11",
            facts={"library": str(path), "package": str(Path(__file__).parent), "found": found, "needed": needed},
            remedy="Uninstall every prime-kernels, then install one version.",
        )
    return Host(library, "libprime_host")


_lock = threading.Lock()
_host: Host | None = None


def host() -> Host:
    """The process's driver binding; nothing is opened by asking for it."""
    global _host
    with _lock:
        if _host is None:
            _host = load_library()
        return _host
