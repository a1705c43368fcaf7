# SPDX-License-Identifier: Apache-2.0
"""Kernels by name: which can run here, why not, and the module that holds the calls.

A name stands for code that runs on a GPU. `prime_kernels.mega_moe` itself also works where `mega_moe` is unavailable:
on CPU tensors, or with a backend that is asked for by name.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from importlib.util import find_spec

from prime_kernels.errors import BackendUnavailable, PrimeKernelsError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

_MODULE_OF = {"mega_moe": "prime_kernels.moe", "deep_gemm": "prime_kernels.deep_gemm"}

KERNELS: tuple[str, ...] = tuple(_MODULE_OF)
"""Names that the functions below accept."""

MIN_TORCH = "2.9"


def _torch_error() -> BackendUnavailable | None:
    """An error without torch, or with one that is too old; looks at the installed metadata and imports nothing."""
    from packaging.version import Version

    try:
        found = distribution_version("torch")
    except PackageNotFoundError:
        found = ""
    # Public versions only: 2.9.0+cu130 and 2.9.0 have one interface.
    if found and Version(Version(found).public) >= Version(MIN_TORCH):
        return None
    return BackendUnavailable(
        f"torch is {found or 'not installed'}; need torch>={MIN_TORCH}.",
        code="E08",
        facts={"torch": found or None, "needed": MIN_TORCH},
        remedy=f"Run: pip install -U 'torch>={MIN_TORCH}'",
    )


def _error(name: str, device: int | None) -> PrimeKernelsError | None:
    if name not in _MODULE_OF:
        return BackendUnavailable(
            f"prime_kernels has no kernel {name!r}; it has {', '.join(KERNELS)}.",
            code="E09",
            facts={"kernel": name, "known": KERNELS},
            remedy="Check the spelling, or update prime-kernels.",
        )
    if find_spec(_MODULE_OF[name]) is None:
        return BackendUnavailable(
            f"this version of prime_kernels does not contain {name} ({_MODULE_OF[name]} is missing).",
            code="E09",
            facts={"kernel": name, "module": _MODULE_OF[name]},
            remedy="Update prime-kernels.",
        )
    if name == "mega_moe":
        return _torch_error() or _device_error(name, device) or _fused_error()
    return _torch_error() or _device_error(name, device)


def _device_error(name: str, device: int | None) -> PrimeKernelsError | None:
    """Driver, GPU and kernel packs, asked without torch and without a CUDA context."""
    from prime_kernels.loader.device import unavailable_error

    return unavailable_error(name, device=device)


def _fused_error() -> PrimeKernelsError | None:
    """Whether this build has the part that launches the fused kernels."""
    from prime_kernels.moe.backends import get_backend

    try:
        get_backend("cuda")
    except PrimeKernelsError as error:
        return error
    return None


def unavailable_reason(name: str, device: int | None = None) -> str | None:
    """Why a kernel cannot run here.

    Args:
        name: One of `KERNELS`.
        device: CUDA device index; None asks about the first.

    Returns:
        None if it can run, else what `load` raises, as text.

    Raises:
        Nothing: a bad environment variable or a damaged pack is a reason as well.
    """
    error = _error(name, device)
    return None if error is None else str(error)


def is_available(name: str, device: int | None = None) -> bool:
    """Whether a kernel can run here. Raises nothing and creates no CUDA context.

    Args:
        name: One of `KERNELS`; False for any other name.
        device: CUDA device index; None asks about the first.

    Returns:
        True if `load(name, device)` would succeed.

    Raises:
        Nothing: a bad environment variable or a damaged pack is a reason as well.
    """
    return _error(name, device) is None


def load(name: str, device: int | None = None) -> ModuleType:
    """The module that holds a kernel's calls.

    Args:
        name: One of `KERNELS`: "mega_moe" is `prime_kernels.moe`; "deep_gemm" has DeepGEMM's names for grouped GEMMs.
        device: CUDA device index; None asks about the first.

    Returns:
        The module.

    Raises:
        BackendUnavailable: The kernel cannot run here; the text is `unavailable_reason(name, device)`.
        ArtifactError: The installed kernel packs are damaged.
    """
    error = _error(name, device)
    if error is not None:
        raise error
    return import_module(_MODULE_OF[name])


def status(device: int | None = None) -> dict[str, str]:
    """Every kernel's state.

    Args:
        device: CUDA device index; None asks about the first.

    Returns:
        Kernel name -> "available" or the reason.

    Raises:
        Nothing: a bad environment variable or a damaged pack is a reason as well.
    """
    return {name: unavailable_reason(name, device) or "available" for name in KERNELS}
