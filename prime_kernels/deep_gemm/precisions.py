# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's grouped GEMMs in precisions that have no kernel here: each name is a call that says so."""

from __future__ import annotations

from prime_kernels.errors import UnsupportedConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# Name -> precision of the operands.
OTHER_PRECISIONS = {
    "m_grouped_fp8_gemm_nt_contiguous": "fp8",
    "m_grouped_fp8_gemm_nn_contiguous": "fp8",
    "m_grouped_fp8_gemm_nt_masked": "fp8",
    "fp8_m_grouped_gemm_nt_masked": "fp8",
    "k_grouped_fp8_gemm_tn_contiguous": "fp8",
    "k_grouped_fp8_gemm_nt_contiguous": "fp8",
    "m_grouped_fp8_fp4_gemm_nt_contiguous": "fp8 x fp4",
    "m_grouped_fp8_fp4_gemm_nn_contiguous": "fp8 x fp4",
    "m_grouped_fp8_fp4_gemm_nt_masked": "fp8 x fp4",
    "m_grouped_fp4_gemm_nt_contiguous": "fp4",
    "m_grouped_fp4_gemm_nt_masked": "fp4",
    "k_grouped_fp4_gemm_nt_contiguous": "fp4",
}


def refusal(name: str) -> Callable[..., NoReturn]:
    """A call named `name` that raises `UnsupportedConfig`."""
    precision = OTHER_PRECISIONS[name]
    words = name.split("_")
    first = words.index(precision.split(" ")[0])
    bf16 = "_".join([*words[:first], "bf16", *words[first + (2 if " x " in precision else 1) :]])

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UnsupportedConfig(
            f"{name} needs operands of precision {precision}; the kernels here are bf16.",
            facts={"call": name, "precision": precision, "supported": ("bf16",)},
            remedy=f"Pass bf16 operands to the bf16 call of this module ({bf16}), or use the package deep_gemm itself.",
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
