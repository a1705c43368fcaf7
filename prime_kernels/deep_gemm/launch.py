# SPDX-License-Identifier: Apache-2.0
"""The launches behind the calls: group bounds first, then one GEMM, on the current stream."""

from __future__ import annotations

import math
from contextlib import nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from prime_kernels.deep_gemm import faults, options
from prime_kernels.loader import load_kernel
from prime_kernels.moe import cuda_maps as maps

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from prime_kernels.moe.cuda_maps import Map, Matrices

_TILE = "t128x256x64|s4|c2"
_TILE_COLUMNS = 256
_STAGE_K = 64
_ROWS_PER_CHECKING_CTA = 4096
KEYS = {
    "bounds": "group_bounds|i32",
    "nt": f"rows_nt|bf16|{_TILE}",
    "nn": f"rows_nn|bf16|{_TILE}",
    "tn_bf16": f"wgrad|bf16|{_TILE}",
    "tn_fp32": f"wgrad|fp32|{_TILE}",
    "tn_add": f"wgrad|fp32acc|{_TILE}",
}


class Groups(IntEnum):
    """How a tensor describes groups: `Groups` of kernels_src/moe/group_bounds.cuh."""

    ROWS = 0
    ENDS = 1
    SIZES = 2
    PLACES = 3


class Place(NamedTuple):
    """Where a call runs."""

    device: int
    stream: int
    sms: int
    fault: int


class Bounds(NamedTuple):
    """Rows and first row of every group, on the device. `memory` owns both."""

    memory: Tensor
    num_groups: int

    @property
    def counts(self) -> int:
        return self.memory.data_ptr()

    @property
    def starts(self) -> int:
        return self.memory.data_ptr() + 4 * self.num_groups


def on(device: torch.device) -> AbstractContextManager[Any]:
    """The device's context, for launches; free when it is the current one."""
    import torch

    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def place_of(device: torch.device) -> Place:
    """The current stream of a device; raises what earlier calls there left behind."""
    import torch

    index = device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    return Place(index, stream, options.usable_sms(index), faults.record_address(index))


def _run(at: Place, key: str, grid: int, args: dict[str, Any], tensors: dict[str, Map] | None = None) -> None:
    """Launch a kernel that other layers use too: arguments and maps that only they have say "not used" here."""
    kernel = load_kernel(key, device=at.device)
    args = dict.fromkeys(kernel.packer.names, 0) | args
    if tensors is not None:
        filler = next(iter(tensors.values()))
        tensors = dict.fromkeys(kernel.packer.map_names, filler) | tensors
    kernel.launch(grid=grid, stream=at.stream, args=args, maps=tensors)


def bounds(at: Place, kind: Groups, layout: Tensor, num_groups: int, rows: int, *, align: int, round_to: int) -> Bounds:
    """Turn a description of groups into bounds without looking at it on the host."""
    import torch

    found = Bounds(torch.empty(2 * num_groups + 1, dtype=torch.int32, device=layout.device), num_groups)
    args = {
        "groups": layout.data_ptr(),
        "counts": found.counts,
        "starts": found.starts,
        "fault": at.fault,
        "kind": int(kind),
        "rows": rows,
        "num_groups": num_groups,
        "align": align,
        "round": round_to,
    }
    checking = math.ceil(rows / _ROWS_PER_CHECKING_CTA) if kind is Groups.ROWS else 1
    _run(at, KEYS["bounds"], max(1, min(at.sms, checking)), args)
    return found


def rows_by_weights(at: Place, groups: Bounds, a: Matrices, b: Matrices, d: Matrices, *, k_major: bool) -> None:
    """d rows = a rows times their group's b: [group, n, k] when `k_major`, else [group, k, n]."""
    k_steps = a.cols // _STAGE_K
    args = {
        "counts": groups.counts,
        "starts": groups.starts,
        "fault": at.fault,
        "num_experts": groups.num_groups,
        "k_steps": k_steps,
        "split": k_steps,
        "columns": d.cols,
        "n_tiles": math.ceil(d.cols / _TILE_COLUMNS),
    }
    weights = maps.reduce_cols(b) if k_major else maps.reduce_rows(b)
    tensors = {"a": maps.strided_rows(a), "b0": weights, "b1": weights, "out0": maps.strided_rows(d)}
    _run(at, KEYS["nt" if k_major else "nn"], max(2, at.sms // 2 * 2), args, tensors)


def reduce_rows(at: Place, groups: Bounds, a: Matrices, b: Matrices, d: Matrices, *, fp32: bool, add: bool) -> None:
    """d[group] = (or +=, in fp32) a rows of the group, transposed, times b rows of the group."""
    args = {
        "counts": groups.counts,
        "starts": groups.starts,
        "fault": at.fault,
        "num_experts": groups.num_groups,
        # One weight [m, n] of the layer's two: the down projection's, [hidden, intermediate].
        "hidden": a.cols,
        "intermediate": b.cols,
        "do_down": 1,
    }
    if add:
        args |= {"down_sum": d.address, "down_matrix": d.stride, "down_pitch": d.pitch}
    tensors = {
        "a1": maps.reduce_rows(a),
        "b1": maps.reduce_rows(b),
        "down": maps.gradient(d, "f32" if fp32 else "bf16"),
    }
    key = KEYS["tn_add" if add else "tn_fp32" if fp32 else "tn_bf16"]
    _run(at, key, max(2, at.sms // 2 * 2), args, tensors)
