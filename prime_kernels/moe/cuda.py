# SPDX-License-Identifier: Apache-2.0
"""Backend "cuda": the layer on the packed kernels, one rank holding all experts.

Forward: plan (gives every slot a pool row), gate_up (pulls rows of x), down, combine. Backward: prepare, gate_up where
z was not kept, down_grad (pulls dy), gate_up_grad (pulls x unless it was kept), wgrad, combine. Nothing reads a count
on the host.

The pool holds rows grouped by expert, each expert starting at a multiple of 64 rows. The plan is
[counts E | starts E + 1 | pool row of every slot T*K | token of every pool row]. `preact` is z [pool rows, 2I],
followed under save="full" by the x rows [pool rows, H].
"""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import LaunchError, PrimeKernelsError, ShapeError
from prime_kernels.moe.backend import Backend, BackwardResult, ForwardResult, Needs
from prime_kernels.moe.cuda_launch import Call
from prime_kernels.moe.cuda_variants import TILE_N, Pull, kernel_keys

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView, Weights
    from prime_kernels.moe.config import MegaMoEConfig

POOL_ALIGN = 64  # rows; kPoolAlign of kernels_src/moe/plan.cuh
MAX_EXPERTS = 4096  # kMaxExperts of kernels_src/moe/plan.cuh
_FAULT_WORDS = 8  # FaultRecord of kernels_src/common/fault.cuh
_ROLES = {1: "schedule", 2: "load", 3: "math", 4: "dispatch"}
_WAITS = {1: "a tile", 2: "room in the tile list", 3: "operands", 4: "a free stage", 5: "saved activations"}


class CudaBackend(Backend):
    """BF16 on Hopper, ep_size 1."""

    name = "cuda"

    def __init__(self) -> None:
        self._faults: weakref.WeakKeyDictionary[RuntimeView, Tensor] = weakref.WeakKeyDictionary()

    @property
    def cubin_digest(self) -> str:
        """16 hex digits over the kernels that this process has loaded: what a measurement ran."""
        from prime_kernels.loader.kernels import loaded_digests

        text = "".join(f"{key} {digest}\n" for key, digest in sorted(loaded_digests().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def unavailable_reason(self, device: torch.device, config: MegaMoEConfig) -> str | None:
        from prime_kernels.loader import load_kernel

        index = device.index if device.index is not None else torch.cuda.current_device()
        try:
            for key in kernel_keys(config):
                load_kernel(key, device=index)
        except PrimeKernelsError as error:
            return str(error)
        return None

    def unsupported_reason(self, config: MegaMoEConfig, *, ep_size: int, device: torch.device) -> str | None:
        if config.precision != "bf16":
            return f'precision="{config.precision}" has no kernel; backend="cuda" needs precision="bf16".'
        if ep_size != 1:
            return f'ep_size={ep_size} has no fused kernel yet; need ep_size=1, or backend="grouped".'
        if config.num_experts > MAX_EXPERTS:
            return f"num_experts={config.num_experts}; the kernels take at most {MAX_EXPERTS} on one rank."
        return None

    def plan_numel(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int) -> int:
        return 2 * config.num_experts + 1 + num_tokens * config.topk + pool_rows(config, num_tokens)

    def preact_shape(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int, save: str) -> tuple[int, int]:
        kept = config.hidden if save == "full" else 0
        return pool_rows(config, num_tokens), 2 * config.intermediate + kept

    def open(self, runtime: RuntimeView) -> None:
        # Host memory that the device writes: readable without a synchronisation, and after a fault.
        self._faults[runtime] = torch.zeros(_FAULT_WORDS, dtype=torch.int32, pin_memory=True)

    def close(self, runtime: RuntimeView, *, abort: bool) -> None:
        self._faults.pop(runtime, None)

    def warmup(self, runtime: RuntimeView, num_tokens: tuple[int, ...]) -> None:
        from prime_kernels.loader import load_kernel

        for key in kernel_keys(runtime.config):
            load_kernel(key, device=runtime.device.index)

    def check(self, runtime: RuntimeView) -> None:
        record = self._faults[runtime]
        code, cta, role, wait, bad_ids = record[:5].tolist()
        record.zero_()
        if code:
            raise LaunchError(
                f"a kernel gave up after 20 s: the {_ROLES.get(role, role)} role of CTA {cta} waited for "
                f"{_WAITS.get(wait, wait)}; its output is not valid.",
                code="E44",
                facts={"cta": cta, "role": role, "wait": wait},
                remedy="Report it with `prime-kernels doctor --json`; under a debugger, lower the clock's pace first.",
            )
        if bad_ids:
            raise ShapeError(
                f"topk_ids held {bad_ids} ids outside [-1, {runtime.config.num_experts}) since the last check; "
                "those slots were skipped.",
                facts={"argument": "topk_ids", "got": bad_ids},
                remedy="Fix the router, or set validate=True to find the call.",
            )

    def forward(
        self,
        runtime: RuntimeView,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        *,
        save: str,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> ForwardResult:
        call = Call(runtime, x, self._faults[runtime])
        config, tokens, experts = runtime.config, x.shape[0], runtime.config.num_experts
        pool = pool_rows(config, tokens)
        plan = call.empty(self.plan_numel(config, num_tokens=tokens, ep_size=1), dtype=torch.int32)
        call.use_plan(plan)
        sent, received = call.empty(experts, dtype=torch.int32), call.empty(experts, dtype=torch.int32)
        preact = None
        if save != "inputs":
            preact = call.empty(*self.preact_shape(config, num_tokens=tokens, ep_size=1, save=save))
        kept = kept_rows(preact, pool, config)
        score = call.empty(pool, dtype=torch.float32)
        counters = call.counters(pool, 1)
        call.make_plan(topk_ids, topk_weights, (sent, received), score, counters)
        pull = Pull(x, call.empty(pool, config.hidden) if kept is None else kept, counters[0])
        h = call.empty(pool, config.intermediate)
        y_rows = call.empty(pool, config.hidden)
        call.gate_up(pull, w_gate_up, h, preact)
        call.down(h, w_down, score, y_rows)
        y = torch.empty_like(x)
        call.combine(y_rows, y)
        return ForwardResult(y, plan, sent, received, preact)

    def backward(
        self,
        runtime: RuntimeView,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w_gate_up: Weights,
        w_down: Tensor,
        plan: Tensor,
        preact: Tensor | None,
        *,
        needs: Needs,
        wgrad_dtype: torch.dtype | None,
        prepared: tuple[Tensor, ...] | None = None,
    ) -> BackwardResult:
        call = Call(runtime, x, self._faults[runtime])
        call.use_plan(plan)
        config = runtime.config
        pool = pool_rows(config, x.shape[0])
        score = call.empty(pool, dtype=torch.float32)
        counters = call.counters(pool, 2)
        call.prepare(topk_weights, score, counters)
        x_rows = kept_rows(preact, pool, config)
        wants_rows = needs.w_gate_up and x_rows is None  # of x, by the weight gradient
        scaled = call.empty(pool, config.intermediate)
        if preact is None:
            x_rows, wants_rows = call.empty(pool, config.hidden), False
            preact = call.empty(pool, 2 * config.intermediate)
            call.gate_up(Pull(x, x_rows, counters[1]), w_gate_up, scaled, preact)
        dy_rows = call.empty(pool, config.hidden)
        dz = call.empty(pool, 2 * config.intermediate)
        parts = call.empty(pool, math.ceil(config.intermediate / TILE_N), dtype=torch.float32)
        call.down_grad(Pull(dy, dy_rows, counters[0]), w_down, preact, score, dz, scaled, parts)
        if wants_rows:
            x_rows = call.empty(pool, config.hidden)
        dx = dscore = dx_rows = None
        if needs.x:
            dx_rows, dx = call.empty(pool, config.hidden), torch.empty_like(x)
            pull = Pull(x, x_rows, None) if wants_rows and x_rows is not None else None
            call.gate_up_grad(pull, dz, w_gate_up, dx_rows)
        elif wants_rows and x_rows is not None:
            call.gather(x, x_rows)
        dw_gate_up, dw_down = self._weight_gradients(
            call, (dz, x_rows, dy_rows, scaled), (w_gate_up, w_down), needs, wgrad_dtype
        )
        if needs.topk_weights:
            dscore = torch.empty(topk_ids.shape, dtype=torch.float32, device=x.device)
        if needs.x or needs.topk_weights:
            call.combine(dx_rows, dx, parts, dscore)
        return BackwardResult(dx, dscore, dw_gate_up, dw_down)

    def _weight_gradients(
        self,
        call: Call,
        operands: tuple[Tensor, Tensor | None, Tensor, Tensor],
        weights: tuple[Weights, Tensor],
        needs: Needs,
        wgrad_dtype: torch.dtype | None,
    ) -> tuple[Weights | None, Tensor | None]:
        if not (needs.w_gate_up or needs.w_down):
            return None, None
        gate_up, down = weights
        dtype = wgrad_dtype or down.dtype
        dw_gate_up: Weights | None = None
        if needs.w_gate_up:
            dw_gate_up = (
                torch.empty_like(gate_up, dtype=dtype)
                if isinstance(gate_up, torch.Tensor)
                else (torch.empty_like(gate_up[0], dtype=dtype), torch.empty_like(gate_up[1], dtype=dtype))
            )
        dw_down = torch.empty_like(down, dtype=dtype) if needs.w_down else None
        call.wgrad(operands, dw_gate_up, dw_down, dtype)
        return dw_gate_up, dw_down


def pool_rows(config: MegaMoEConfig, num_tokens: int) -> int:
    """Rows of the pool: all routes, plus what aligning every expert to 64 rows can add. May be symbolic."""
    most = num_tokens * config.topk + (POOL_ALIGN - 1) * config.num_experts
    return (most + POOL_ALIGN - 1) // POOL_ALIGN * POOL_ALIGN


def kept_rows(preact: Tensor | None, pool: int, config: MegaMoEConfig) -> Tensor | None:
    """The x rows behind z in what save="full" keeps; None for the other modes."""
    z_width = 2 * config.intermediate
    if preact is None or preact.shape[1] == z_width:
        return None
    return preact.view(-1)[pool * z_width :].view(pool, config.hidden)
