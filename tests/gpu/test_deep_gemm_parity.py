# SPDX-License-Identifier: Apache-2.0
"""The same calls to this package's module and to the package deep_gemm, with the same tensors.

Without the mark `gpu`: `--require-gpu` asks for a GPU, not for an optional package, and this file needs both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import gpu_skip_reason
from tests.helpers.groups import make_layout, product_of_rows, product_over_rows, worst_excess


@pytest.fixture(scope="module")
def both() -> dict[str, Any]:
    """Module by name: ours, and theirs where it works on this machine."""
    from prime_kernels import deep_gemm
    from prime_kernels.moe.grouped_deep_gemm import load_deep_gemm

    reason = gpu_skip_reason()
    if reason is not None:
        pytest.skip(reason)
    theirs = load_deep_gemm(torch.device("cuda", torch.cuda.current_device()))
    if isinstance(theirs, str):
        pytest.skip(theirs)
    return {"prime_kernels": deep_gemm, "deep_gemm": theirs._module}


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


SIZES = (128, 1, 0, 300, 64, 1000)


@pytest.mark.parametrize("name", ["nt", "nn"])
def test_rows_of_groups_get_the_same_products(both: dict[str, Any], name: str) -> None:
    layout = make_layout(SIZES, align=both["deep_gemm"].get_mk_alignment_for_contiguous_layout())
    a, b = normal(layout.rows, 768, seed=1), normal(len(SIZES), 512, 768, seed=2)
    taken, (want, size) = layout.taken().cuda(), product_of_rows(a, b, layout)
    for module in both.values():
        d = torch.full((layout.rows, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
        weights = b if name == "nt" else b.transpose(1, 2).contiguous()
        getattr(module, f"m_grouped_bf16_gemm_{name}_contiguous")(a, weights, d, layout.indices().cuda())
        assert worst_excess(d[taken], want[taken], size[taken]) <= 1


def test_weight_gradients_add_up_to_the_same(both: dict[str, Any]) -> None:
    layout = make_layout(SIZES, align=both["deep_gemm"].get_mk_alignment_for_contiguous_layout())
    taken = layout.taken().cuda()
    a, b = normal(layout.rows, 768, seed=3), normal(layout.rows, 512, seed=4)
    a[~taken], b[~taken] = 0.0, 0.0
    start = torch.randn(len(SIZES), 768, 512, device="cuda") * 30
    want, size = product_over_rows(a, b, layout)
    ks = [-(-rows // layout.align) * layout.align for rows in SIZES]
    for module in both.values():
        d = start.clone()
        module.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, torch.tensor(ks, dtype=torch.int32, device="cuda"), d)
        assert worst_excess(d, start.double() + want, size + start.double().abs()) <= 1
        assert torch.equal(d[2], start[2])
