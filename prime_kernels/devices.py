# SPDX-License-Identifier: Apache-2.0
"""The `--device` option of the verbs that compute."""

from __future__ import annotations

import torch

from prime_kernels.errors import BackendUnavailable, UnsupportedConfig


def choose_device(name: str) -> torch.device:
    """The device that a command line names.

    Args:
        name: "auto" (CUDA if torch finds a device, else CPU), "cpu", "cuda" or "cuda:N".

    Returns:
        The device.

    Raises:
        UnsupportedConfig: Not such a name.
        BackendUnavailable: A CUDA device was named and torch finds none of that index.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdecimal())):
        raise UnsupportedConfig(
            f"--device is {name!r}; need auto, cpu, cuda or cuda:N.",
            facts={"device": name},
            remedy="Take auto for the first CUDA device, or the CPU without one.",
        )
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise BackendUnavailable(
            f"--device is {name!r} and torch finds {count} CUDA devices.",
            facts={"device": name, "devices": count},
            remedy="Run `prime-kernels doctor` to see why, or take --device cpu.",
        )
    return torch.device(name)
