# SPDX-License-Identifier: Apache-2.0
"""`load_kernel`: from a key and a device to a kernel that can be launched, once per process and device."""

from __future__ import annotations

import hashlib
import logging
import threading

from prime_kernels.errors import BackendUnavailable, LaunchError
from prime_kernels.loader import abi, arch, elf, fork, hostlib, resolve, select
from prime_kernels.loader import device as devices
from prime_kernels.loader.launch import Kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prime_kernels.loader.hostlib import DeviceFacts, Host
    from prime_kernels.loader.meta import Spec

LOG = logging.getLogger("prime_kernels.loader")


def load_failure(status: int, name: str, spec: Spec, cubin: bytes, facts: DeviceFacts, driver: int) -> LaunchError:
    """The error for a cubin that the driver does not load: says what the driver's number means here."""
    found = {"cuda_result": status, "name": name, "key": spec.key, "target": str(spec.arch), "device": facts.name}
    found |= {"driver": driver, "origin": spec.origin, "elf": elf.ident(cubin)}
    text, code, remedy = f"{spec.key} ({spec.origin}) did not load", "E43", "Run `prime-kernels doctor`."
    if status == abi.NO_BINARY:
        here = f"{facts.name} (sm_{facts.cc[0]}{facts.cc[1]})"
        text = f"the driver finds no binary for {here} in {spec.key} for {spec.arch} from {spec.origin}"
        code, remedy = "E04", "This is a packaging bug: report it with `prime-kernels doctor --json`."
    elif status == abi.INVALID_IMAGE:
        # The hash was right, so the bytes are what was built: what is left is a format that this driver does not know.
        osabi, version, _ = elf.ident(cubin)
        text = (
            f"the driver (CUDA {select.version_text(driver)}) refuses the cubin of {spec.key} from {spec.origin}: "
            f"its hash is right, its ELF OS/ABI {osabi} version {version} is too new for this driver"
        )
        code, remedy = "E05", "Update the NVIDIA driver, or unset PRIME_KERNELS_PACK."
    elif status in (abi.INVALID_PTX, abi.UNSUPPORTED_PTX):
        text = f"the driver speaks of PTX in {spec.key} from {spec.origin}, but only cubins are ever loaded"
        code, remedy = "E06", "Some other library here loads PTX: report it with `prime-kernels doctor --json`."
    return LaunchError(f"{text}: {name} ({status}).", code=code, facts=found, remedy=remedy)


_lock = threading.Lock()
_kernels: dict[tuple[str, int], Kernel] = {}
_key_locks: dict[str, threading.Lock] = {}
_libraries: dict[tuple[str, arch.Target], tuple[int, Spec]] = {}
_digests: dict[str, str] = {}


def loaded_digests() -> dict[str, str]:
    """Key -> sha256 of every cubin this process has loaded, for records that must name what ran."""
    return dict(_digests)


def load_kernel(name: str, *, device: int | None = None) -> Kernel:
    """Load a kernel for a device; later calls return the same object.

    Args:
        name: Kernel key, e.g. "gather_rows|b16|t256|l4".
        device: CUDA device index; None takes that of the calling thread's current context, else 0.

    Returns:
        The kernel, safe to launch from any thread.

    Raises:
        BackendUnavailable: No driver, no such GPU, not covered, no such kernel, or forked (E01-E03, E07, E09, E60).
        ArtifactError: A pack or host library is damaged or from another build (E10, E11).
        CompileError: It has to be compiled and cannot be (E30-E32).
        LaunchError: The driver does not load it (E04-E06, E43).
    """
    kernel = _kernels.get((name, device)) if device is not None else None
    if kernel is not None:
        return kernel
    fork.check()
    host = hostlib.host()
    driver = host.driver_version()
    ordinal = device if device is not None else max(host.current_device(), 0)
    with _lock:
        key_lock = _key_locks.setdefault(name, threading.Lock())
    with key_lock:
        if (name, ordinal) not in _kernels:
            _kernels[name, ordinal] = _load(host, name, ordinal, driver)
        return _kernels[name, ordinal]


def _load(host: Host, name: str, ordinal: int, driver: int) -> Kernel:
    if ordinal >= host.device_count():
        raise devices.no_device()
    at, facts = resolve.installation(), host.device(ordinal)
    devices.check(facts, driver, [pack.header for pack in at.packs], at.settings.pack)
    loaded = next((_libraries[name, t] for t in arch.targets_for(facts.cc) if (name, t) in _libraries), None)
    if loaded is None:
        found, trace = resolve.resolve(name, facts.cc, driver, at)
        if found is None:
            raise resolve.not_found(name, facts.cc, trace)
        cubin, spec = found
        status, library = host.load(cubin)
        if status:
            raise load_failure(status, host.error_name(status), spec, cubin, facts, driver)
        loaded = _libraries[name, spec.arch] = (library, spec)
        _digests[name] = hashlib.sha256(cubin).hexdigest()
        LOG.info("loaded %s for %s from %s", name, spec.arch, spec.origin)
    library, spec = loaded
    handle = host.kernel(library, spec.symbol)
    _prepare(host, handle, spec, facts)
    return Kernel(host, spec, handle, ordinal, facts.sm_count)


def _prepare(host: Host, handle: int, spec: Spec, facts: DeviceFacts) -> None:
    """Set what a kernel needs set once on a device."""
    smem = spec.meta.smem_bytes
    if smem > facts.smem_optin_bytes:
        raise BackendUnavailable(
            f"{spec.key} needs {smem} bytes of shared memory per CTA, {facts.name} has {facts.smem_optin_bytes}.",
            code="E40",
            facts={"key": spec.key, "needed": smem, "fits": facts.smem_optin_bytes, "device": facts.name},
            remedy='Use backend="grouped".',
        )
    wanted = [(abi.FUNC_MAX_DYNAMIC_SMEM, smem)] if smem else []
    if spec.meta.cluster > abi.PORTABLE_CLUSTER:
        wanted.append((abi.FUNC_NON_PORTABLE_CLUSTER, 1))
    for attribute, value in wanted:
        status = host.set_kernel_attribute(handle, attribute, facts.ordinal, value)
        host.check(status, f"setting attribute {attribute} of {spec.key} to {value} on device {facts.ordinal}")
