# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's grouped GEMMs by their names, on this package's kernels: `prime_kernels.load("deep_gemm")`.

Nothing is compiled and no torch build is needed in particular. bf16 on Hopper; the FP8 and FP4 names are here so that a
caller gets a reason instead of an AttributeError. docs/deep_gemm.md says where this module and DeepGEMM differ.
"""

from __future__ import annotations

from prime_kernels.deep_gemm.faults import check as check
from prime_kernels.deep_gemm.k_grouped import k_grouped_bf16_gemm_tn_contiguous as k_grouped_bf16_gemm_tn_contiguous
from prime_kernels.deep_gemm.m_grouped import m_grouped_bf16_gemm_nn_contiguous as m_grouped_bf16_gemm_nn_contiguous
from prime_kernels.deep_gemm.m_grouped import m_grouped_bf16_gemm_nt_contiguous as m_grouped_bf16_gemm_nt_contiguous
from prime_kernels.deep_gemm.m_grouped import m_grouped_bf16_gemm_nt_masked as m_grouped_bf16_gemm_nt_masked
from prime_kernels.deep_gemm.options import (
    get_mk_alignment_for_contiguous_layout as get_mk_alignment_for_contiguous_layout,
)
from prime_kernels.deep_gemm.options import get_num_sms as get_num_sms
from prime_kernels.deep_gemm.options import (
    get_theoretical_mk_alignment_for_contiguous_layout as get_theoretical_mk_alignment_for_contiguous_layout,
)
from prime_kernels.deep_gemm.options import (
    set_mk_alignment_for_contiguous_layout as set_mk_alignment_for_contiguous_layout,
)
from prime_kernels.deep_gemm.options import set_num_sms as set_num_sms
from prime_kernels.deep_gemm.precisions import OTHER_PRECISIONS, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# Names of earlier and later DeepGEMM releases for the same calls.
get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked

__all__ = [
    "bf16_m_grouped_gemm_nt_masked",
    "check",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "k_grouped_bf16_gemm_tn_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in OTHER_PRECISIONS:
        return refusal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
