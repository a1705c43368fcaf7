# SPDX-License-Identifier: Apache-2.0
"""Facts about driver and GPUs, and whether kernels can run on one. Asking never makes a CUDA context."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prime_kernels.errors import BackendUnavailable, PrimeKernelsError
from prime_kernels.loader import hostlib, packs, select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from prime_kernels.loader.hostlib import DeviceFacts, Host
    from prime_kernels.loader.manifest import PackHeader

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_RELEASE = re.compile(r"\b(\d{3}\.\d{2,3}(?:\.\d{2})?)\b")


def driver_release(text: str) -> str | None:
    """Driver release ("580.95.05") in the text of /proc/driver/nvidia/version; None if there is none."""
    found = _RELEASE.search(text)
    return found[1] if found else None


def installed_release() -> str | None:
    """Release of the loaded kernel module; None without one."""
    try:
        return driver_release(_KERNEL_MODULE.read_text(errors="replace"))
    except OSError:
        return None


def is_mig(facts: DeviceFacts) -> bool:
    """Whether a device is a slice of a GPU; the driver says so in its name, e.g. "NVIDIA H200 MIG 3g.71gb"."""
    return " MIG " in facts.name


@dataclass(frozen=True, slots=True)
class Machine:
    """Driver and GPUs of this process.

    Attributes:
        driver: CUDA version of the driver, e.g. 13000.
        devices: The visible GPUs.
    """

    driver: int
    devices: tuple[DeviceFacts, ...]


def machine(host: Host | None = None) -> Machine:
    """Ask the driver.

    Raises:
        BackendUnavailable: There is no driver, or it is too old to be asked (E01, E02).
        LaunchError: The driver reports an error (E43).
    """
    host = host or hostlib.host()
    driver = host.driver_version()
    return Machine(driver, tuple(host.device(ordinal) for ordinal in range(host.device_count())))


def check(facts: DeviceFacts, driver: int, installed: list[PackHeader], forced: str | None) -> None:
    """Refuse a device that no installed pack serves.

    Raises:
        BackendUnavailable: Compute capability not covered (E03), or driver too old (E02).
    """
    from prime_kernels.loader.arch import targets_for

    error = select.not_covered(facts.cc, f"cuda:{facts.ordinal} is {facts.name}", (str(p.arch) for p in installed))
    if error is None:
        target = targets_for(facts.cc)[0]
        error = select.driver_problem(driver, target, installed, forced)
    if error is not None:
        raise error


def no_device() -> BackendUnavailable:
    """The error for a driver that shows no GPU (E07)."""
    return BackendUnavailable(
        "the NVIDIA driver shows no GPU to this process.",
        code="E07",
        facts={"devices": 0},
        remedy="Check CUDA_VISIBLE_DEVICES and the container's --gpus option.",
    )


def unavailable_error(name: str, *, device: int | None = None) -> PrimeKernelsError | None:
    """Why the kernels of a family cannot run on a GPU here.

    Args:
        name: Family, e.g. "mega_moe".
        device: CUDA device index; None asks about the first.

    Returns:
        The error that the call itself would raise, or None. Never raises and never makes a CUDA context.
    """
    from prime_kernels.loader import resolve
    from prime_kernels.settings import settings

    try:
        found = machine()
        ordinal = device or 0
        if ordinal >= len(found.devices):
            raise no_device()
        facts = found.devices[ordinal]
        headers = [pack.header for pack in packs.open_installed()]
        check(facts, found.driver, headers, settings().pack)
        resolve.check_family(name, facts.cc, found.driver)
    except PrimeKernelsError as err:
        return err
    return None


def unavailable_reason(name: str, *, device: int | None = None) -> str | None:
    """`unavailable_error` as text."""
    error = unavailable_error(name, device=device)
    return None if error is None else str(error)
