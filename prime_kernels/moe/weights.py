# SPDX-License-Identifier: Apache-2.0
"""Expert weights: quantised copies that know their age, and conversion from other layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from prime_kernels.errors import ShapeError, StaleWeightsError, UnsupportedConfig
from prime_kernels.moe import ops
from prime_kernels.moe.arguments import split_gate_up
from prime_kernels.moe.function import local_weight
from prime_kernels.moe.handles import require_generation
from prime_kernels.moe.limits import require_choice, require_int
from prime_kernels.moe.recipe import PREPARED_NAMES

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.runtime import MegaMoERuntime

Layout = Literal["packed", "interleaved", "transposed", "transposed_interleaved"]
_SAMPLES = 64


class PreparedExpertWeights:
    """Quantised weights of one layer, at fixed addresses. Make and refresh them with `prepare_weights`.

    Attributes:
        precision: Recipe of the codes.
        tensors: Codes and scales, then the weight generation as an int64 CPU scalar.
        nbytes: Bytes of the codes and scales.
    """

    def __init__(self, precision: str, tensors: tuple[Tensor, ...]) -> None:
        self.precision = precision
        self.tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors[:-1])
        self._samples: tuple[Tensor, ...] | None = None

    @property
    def generation(self) -> int:
        """Weight generation these codes were made from."""
        return int(self.tensors[-1])

    def is_current(self, runtime: MegaMoERuntime) -> bool:
        """Whether the runtime's weights are still those these codes were made from."""
        return self.generation == runtime.weight_generation

    def require_current(self, runtime: MegaMoERuntime, w_gate_up: Tensor, w_up: Tensor | None, w_down: Tensor) -> None:
        """Raise unless the codes fit the runtime and its generation; with `debug` also unless sampled values match."""
        if self.precision != runtime.config.precision:
            raise UnsupportedConfig(
                f"prepared weights are {self.precision!r}; the runtime runs {runtime.config.precision!r}.",
                facts={"argument": "prepared"},
                remedy="Prepare the weights with the runtime that uses them.",
            )
        require_generation(self.generation, runtime)
        if not runtime.config.debug or self._samples is None:
            return
        for name, now, then in zip(PREPARED_NAMES[::2], _sample(w_gate_up, w_up, w_down), self._samples, strict=True):
            if now.numel() and not torch.equal(now, then):
                raise StaleWeightsError(
                    f"{name} changed since it was prepared, but the weight generation is still {self.generation}.",
                    facts={"argument": name, "generation": self.generation},
                    remedy="Call runtime.advance_weight_generation() after every change of the weights, "
                    "or runtime.attach_optimizer(optimizer) once.",
                )

    def remember(self, w_gate_up: Tensor, w_up: Tensor | None, w_down: Tensor) -> None:
        """Keep a few values of the weights for the comparison under `debug`."""
        self._samples = _sample(w_gate_up, w_up, w_down)


def prepare_weights(
    w_gate_up: Tensor | tuple[Tensor, Tensor],
    w_down: Tensor,
    *,
    runtime: MegaMoERuntime,
    out: PreparedExpertWeights | None = None,
    free_bf16: bool = False,
) -> PreparedExpertWeights:
    """Quantise one layer's expert weights for the runtime's precision, once for many calls.

    Args:
        w_gate_up: [E_l, 2I, H] bf16, or [E_l, 2, I, H], or (w_gate, w_up), as in `mega_moe`.
        w_down: [E_l, H, I] bf16.
        runtime: Gives the recipe, and the generation the result is stamped with.
        out: An earlier result for weights of the same shapes; overwritten in place, so addresses stay.
        free_bf16: Release the storage of the weights, which "fp8" and "mxfp8" no longer read. They keep their shape
            and must be filled again before anything else reads them.

    Returns:
        What `mega_moe(prepared=...)` takes until the next `runtime.advance_weight_generation()`.

    Raises:
        UnsupportedConfig: a bf16 runtime, `free_bf16` with "fp8_bwd", or `out` of another recipe.
        ShapeError: weights that do not fit the runtime.

    Source: this file; codes in moe/quantize.py.
    """
    runtime.require_open()
    precision = runtime.config.precision
    if not runtime.config.quantized:
        raise UnsupportedConfig(
            'prepare_weights got a runtime of precision "bf16", which reads the weights as they are.',
            facts={"argument": "runtime"},
            remedy='Use it with "fp8", "fp8_bwd" or "mxfp8".',
        )
    if free_bf16 and precision == "fp8_bwd":
        raise UnsupportedConfig(
            'free_bf16=True got precision "fp8_bwd", whose forward reads the bf16 weights.',
            facts={"argument": "free_bf16"},
            remedy="Leave free_bf16 off.",
        )
    gate_up, up = split_gate_up(w_gate_up)
    weights = (local_weight(gate_up), local_weight(up), local_weight(w_down))
    with torch.no_grad():
        tensors = tuple(ops.mega_moe_prepare(*weights, runtime.id))
        prepared = PreparedExpertWeights(precision, tensors) if out is None else _overwrite(out, precision, tensors)
        if runtime.config.debug and not free_bf16:
            prepared.remember(gate_up, up, w_down)
        if free_bf16:
            for weight in weights:
                if weight is not None:
                    weight.untyped_storage().resize_(0)
    return prepared


def convert_gate_up(w: Tensor, *, layout: Layout, block: int = 1) -> Tensor:
    """Bring gate/up weights of another project into the natural layout; differentiable.

    Args:
        w: "packed": [E, 2I, H], or [E, 2, I, H]. "interleaved": [E, 2I, H], `block` gate rows, then `block` up rows,
            and so on. "transposed": [E, H, 2I], gate columns first. "transposed_interleaved": [E, H, 2I] with
            alternating columns, as in gpt-oss.
        layout: Which of these.
        block: Rows per run in the interleaved layouts; divides I.

    Returns:
        [E, 2I, H] contiguous, gate rows, then up rows. A view of `w` when nothing had to move.

    Raises:
        ShapeError: a shape that does not fit the layout.
        UnsupportedConfig: an unknown layout.

    Source: this file.
    """
    require_choice("layout", layout, ("packed", "interleaved", "transposed", "transposed_interleaved"))
    require_int("block", block, low=1)
    if layout == "packed" and w.dim() == 4 and w.shape[1] == 2:
        return w.contiguous().view(w.shape[0], -1, w.shape[3])
    if layout.startswith("transposed") and w.dim() == 3:
        w = w.transpose(1, 2)
    if w.dim() != 3 or w.shape[1] % (2 * block):
        raise ShapeError(
            f"w is {list(w.shape)} for layout {layout!r}; need three dimensions and 2*I divisible by {2 * block}.",
            facts={"argument": "w", "layout": layout, "block": block},
            remedy="See the shapes in the description of convert_gate_up.",
        )
    if layout.endswith("interleaved"):
        experts, rows, hidden = w.shape
        w = w.reshape(experts, rows // (2 * block), 2, block, hidden).transpose(1, 2).reshape(experts, rows, hidden)
    return w.contiguous()


def _overwrite(out: PreparedExpertWeights, precision: str, tensors: tuple[Tensor, ...]) -> PreparedExpertWeights:
    fits = out.precision == precision and [t.shape for t in out.tensors] == [t.shape for t in tensors]
    if not fits:
        raise UnsupportedConfig(
            f"out holds {out.precision!r} weights of other shapes; need {precision!r} for these weights.",
            facts={"argument": "out"},
            remedy="Pass the result of an earlier prepare_weights for the same layer and runtime.",
        )
    for old, new in zip(out.tensors, tensors, strict=True):
        old.copy_(new)
    return out


def _sample(w_gate_up: Tensor, w_up: Tensor | None, w_down: Tensor) -> tuple[Tensor, Tensor]:
    """A few values of either weight, spread over its whole extent."""

    def values(weight: Tensor | None) -> Tensor:
        flat = local_weight(weight).detach().reshape(-1)  # type: ignore[union-attr]
        return flat[:: max(1, flat.numel() // _SAMPLES)].clone()

    gate_up = values(w_gate_up) if w_up is None else torch.cat([values(w_gate_up), values(w_up)])
    return gate_up, values(w_down)
