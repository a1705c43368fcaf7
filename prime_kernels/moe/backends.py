# SPDX-License-Identifier: Apache-2.0
"""The backends by name, and which of them a config gets on a device. Nothing falls back unless it was asked for."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from prime_kernels.errors import BackendUnavailable, PrimeKernelsError, UnsupportedConfig
from prime_kernels.moe import config as config_module

if TYPE_CHECKING:
    import torch

    from prime_kernels.moe.backend import Backend
    from prime_kernels.moe.config import MegaMoEConfig

_HOME = {
    "reference": ("reference", "ReferenceBackend"),
    "grouped": ("grouped", "GroupedBackend"),
    "cuda": ("cuda", "CudaBackend"),
}

_CODE = re.compile(r"(.*) \[(E\d\d)\]", re.DOTALL)
_log = logging.getLogger("prime_kernels")


class Choice(NamedTuple):
    """A backend, or why there is none. `fallback` is the reason the first choice was passed over."""

    backend: Backend | None
    error: PrimeKernelsError | None = None
    fallback: str | None = None

    @property
    def reason(self) -> str | None:
        return None if self.error is None else str(self.error)


@cache
def get_backend(name: str) -> Backend:
    """The backend of this name.

    Raises:
        UnsupportedConfig: no backend has this name.
        BackendUnavailable: this build does not contain it.
    """
    if name not in _HOME:
        raise UnsupportedConfig(
            f"backend is {name!r}; need one of {', '.join(map(repr, _HOME))}.", facts={"argument": "backend"}
        )
    module, attribute = _HOME[name]
    path = f"prime_kernels.moe.{module}"
    try:
        return cast("Backend", getattr(import_module(path), attribute)())
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise BackendUnavailable(
            f"this build has no {name!r} backend of mega_moe ({path} is not installed).",
            code="E09",
            facts={"backend": name},
            remedy='Use backend="reference", or allow_fallback=True to get it with a warning.',
        ) from error


def select_backend(config: MegaMoEConfig, *, ep_size: int, device: torch.device | str) -> Choice:
    """The backend this config gets on this device: the named one, or for "auto" the one of the device's kind."""
    import torch

    device = torch.device(device)
    if str(device) == "cuda":
        # A question about "cuda" must not be what initialises it.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device() if started else 0)
    name = config.backend
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "reference"
    choice = _try(name, config, ep_size, device)
    if choice.error is None or config.backend != "auto" or not config.allow_fallback:
        return choice
    fallback = _try("reference", config, ep_size, device)
    return fallback._replace(fallback=choice.reason) if fallback.error is None else choice


def _try(name: str, config: MegaMoEConfig, ep_size: int, device: torch.device) -> Choice:
    facts = {"backend": name, "device": str(device)}
    # Faults of the config first: they hold on every machine, so they are the same error everywhere.
    reason = config_module.common_reason(config, ep_size=ep_size, backend=name)
    if reason is not None:
        return Choice(None, UnsupportedConfig(reason, facts=facts))
    if name == "cuda" and device.type != "cuda":
        return Choice(
            None,
            BackendUnavailable(
                f'backend="cuda" got device {device}; need a CUDA device.',
                facts=facts,
                remedy='Pass device=torch.device("cuda", i), or backend="reference" on a CPU.',
            ),
        )
    try:
        backend = get_backend(name)
    except BackendUnavailable as error:
        return Choice(None, error)
    reason = backend.unavailable_reason(device, config)
    if reason is not None:
        # The loader's reasons carry the code of its own error; it says more than this error's default.
        found = _CODE.fullmatch(reason)
        text, code = found.groups() if found else (reason, None)
        return Choice(None, BackendUnavailable(text, code=code, facts=facts))
    reason = backend.unsupported_reason(config, ep_size=ep_size, device=device)
    if reason is not None:
        return Choice(None, UnsupportedConfig(reason, facts=facts))
    return Choice(backend)


@cache
def log_fallback(reason: str) -> None:
    """Say once per process and reason that the reference stands in for a kernel."""
    _log.warning("mega_moe uses the slow reference backend (allow_fallback=True): %s", reason)
