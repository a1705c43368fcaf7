# SPDX-License-Identifier: Apache-2.0
"""Backend "cuda": the layer on the packed kernels. Among peers: cuda_peers.py.

Forward of one rank: plan (gives every slot a pool row), gate_up (pulls rows of x), down, combine. Backward: prepare,
gate_up where z was not kept, down_grad (pulls dy), gate_up_grad (pulls x unless it was kept), wgrad, combine. Nothing
reads a count on the host.

The pool holds rows grouped by expert, each expert starting at a multiple of 64 rows. The plan is
[counts E | starts E + 1 | pool row of every slot T*K | token of every pool row]. `preact` is z [pool rows, 2I],
followed under save="full" by the x rows [pool rows, H].
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING

import torch

from prime_kernels.errors import PrimeKernelsError
from prime_kernels.moe import cuda_peers
from prime_kernels.moe.backend import Backend, BackwardResult, ForwardResult, Needs
from prime_kernels.moe.cuda_calls import BackwardAddresses, BackwardShape, Calls, ForwardAddresses, ForwardShape
from prime_kernels.moe.cuda_faults import FAULT_WORDS, fault_error
from prime_kernels.moe.cuda_variants import address, kernel_keys, peer_kernel_keys, plan_numel, preact_shape, split
from prime_kernels.peers.arena import MAX_PEERS

if TYPE_CHECKING:
    from torch import Tensor

    from prime_kernels.moe.backend import RuntimeView, Weights
    from prime_kernels.moe.config import MegaMoEConfig

MAX_EXPERTS = 4096  # kMaxExperts of kernels_src/moe/plan.cuh


class CudaBackend(Backend):
    """BF16 on Hopper; one rank, or groups of up to 8."""

    name = "cuda"

    def __init__(self) -> None:
        self._faults: weakref.WeakKeyDictionary[RuntimeView, Tensor] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[RuntimeView, Calls] = weakref.WeakKeyDictionary()

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
        if ep_size > MAX_PEERS:
            return (
                f"ep_size={ep_size}; the fused kernels connect at most {MAX_PEERS} ranks. Use a smaller group, or "
                'backend="grouped".'
            )
        if config.num_experts > MAX_EXPERTS:
            return f"num_experts={config.num_experts}; the kernels take at most {MAX_EXPERTS}."
        return None if ep_size == 1 else cuda_peers.unsupported_reason(config, ep_size)

    def plan_numel(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int) -> int:
        return plan_numel(config, num_tokens, ep_size)

    def preact_shape(self, config: MegaMoEConfig, *, num_tokens: int, ep_size: int, save: str) -> tuple[int, int]:
        return preact_shape(config, num_tokens, save, ep_size)

    def open(self, runtime: RuntimeView) -> None:
        # Host memory that the device writes: readable without a synchronisation, and after a fault.
        self._faults[runtime] = torch.zeros(FAULT_WORDS, dtype=torch.int32, pin_memory=True)
        runtime.peers = cuda_peers.open_peers(runtime, self._faults[runtime])

    def close(self, runtime: RuntimeView, *, abort: bool) -> None:
        self._calls.pop(runtime, None)
        self._faults.pop(runtime, None)
        if runtime.peers is not None:
            runtime.peers.close()

    def _calls_of(self, runtime: RuntimeView) -> Calls:
        calls = self._calls.get(runtime)
        if calls is None:
            # Holds no runtime, which could never go while its own entry here refers to it.
            own = runtime.config, runtime.device.index, self._faults[runtime].data_ptr()
            made = Calls(*own) if runtime.peers is None else cuda_peers.PeerCalls(*own, runtime.peers)
            calls = self._calls.setdefault(runtime, made)
        return calls

    def warmup(self, runtime: RuntimeView, num_tokens: tuple[int, ...]) -> None:
        from prime_kernels.loader import load_kernel
        from prime_kernels.loader.resolve import warming_up

        keys = kernel_keys if runtime.peers is None else peer_kernel_keys
        with warming_up():
            for key in keys(runtime.config):
                load_kernel(key, device=runtime.device.index)

    def check(self, runtime: RuntimeView) -> None:
        record = self._faults[runtime]
        error = fault_error(record.tolist(), runtime)
        record.zero_()
        if error is not None:
            raise error

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
        device = x.device
        gate_up, up = split(w_gate_up)
        shape = ForwardShape(x.shape[0], save, up is not None, topk_ids.dtype == torch.int64)
        call = self._calls_of(runtime).of(shape)
        preact = None
        if call.preact_shape is not None:
            preact = torch.empty(call.preact_shape, dtype=torch.bfloat16, device=device)
        y = torch.empty_like(x)
        plan = torch.empty(call.plan_numel, dtype=torch.int32, device=device)
        sent = torch.empty(runtime.config.num_experts, dtype=torch.int32, device=device)
        received = torch.empty(runtime.num_local_experts, dtype=torch.int32, device=device)
        work = torch.empty(call.work_bytes, dtype=torch.uint8, device=device)
        addresses = ForwardAddresses(
            x=x.data_ptr(),
            topk_ids=topk_ids.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            w_gate_up=gate_up.data_ptr(),
            w_up=address(up),
            w_down=w_down.data_ptr(),
            y=y.data_ptr(),
            plan=plan.data_ptr(),
            sent=sent.data_ptr(),
            received=received.data_ptr(),
            preact=address(preact),
            work=work.data_ptr(),
        )
        call.launch(device, addresses)
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
        device = x.device
        gate_up, up = split(w_gate_up)
        dtype = wgrad_dtype or w_down.dtype
        saved = 0 if preact is None else preact.shape[1]
        shape = BackwardShape(x.shape[0], saved, up is not None, needs, dtype == torch.float32)
        call = self._calls_of(runtime).of(shape)
        dx = torch.empty_like(x) if needs.x else None
        dscore = torch.empty_like(topk_weights, dtype=torch.float32) if needs.topk_weights else None
        dw_gate_up = torch.empty_like(gate_up, dtype=dtype) if needs.w_gate_up else None
        dw_up = torch.empty_like(up, dtype=dtype) if needs.w_gate_up and up is not None else None
        dw_down = torch.empty_like(w_down, dtype=dtype) if needs.w_down else None
        work = torch.empty(call.work_bytes, dtype=torch.uint8, device=device)
        addresses = BackwardAddresses(
            dy=dy.data_ptr(),
            x=x.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            w_gate_up=gate_up.data_ptr(),
            w_up=address(up),
            w_down=w_down.data_ptr(),
            plan=plan.data_ptr(),
            preact=address(preact),
            dx=address(dx),
            dscore=address(dscore),
            dw_gate_up=address(dw_gate_up),
            dw_up=address(dw_up),
            dw_down=address(dw_down),
            work=work.data_ptr(),
        )
        call.launch(device, addresses)
        gradients = dw_gate_up if dw_gate_up is None or dw_up is None else (dw_gate_up, dw_up)
        return BackwardResult(dx, dscore, gradients, dw_down)
