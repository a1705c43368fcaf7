# SPDX-License-Identifier: Apache-2.0
"""fp32 GEMMs in fp32: the process may have allowed TF32 or bf16 in them, which an oracle must not follow."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXACT = ("ieee", "none")  # "none": nothing was asked for, which is ieee


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Multiply fp32 in fp32 inside; what the process asked for is back in force afterwards."""
    # The per-backend switches: torch.get_float32_matmul_precision raises once a process has used these as well.
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [(switch, switch.fp32_precision) for switch in switches]
    changed = [(switch, value) for switch, value in before if value not in _EXACT]
    for switch, _ in changed:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        for switch, value in changed:
            switch.fp32_precision = value
