# SPDX-License-Identifier: Apache-2.0
"""The four registry verbs agree with each other and say why something is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

import prime_kernels
from prime_kernels import registry
from prime_kernels.errors import BackendUnavailable


def test_the_verbs_agree_about_every_kernel() -> None:
    status = prime_kernels.status()
    assert tuple(status) == prime_kernels.KERNELS == ("mega_moe", "deep_gemm")
    for name, text in status.items():
        reason = prime_kernels.unavailable_reason(name)
        assert text == (reason or "available")
        assert prime_kernels.is_available(name) is (reason is None)
        if reason is None:
            assert prime_kernels.load(name).__name__.startswith("prime_kernels.")
        else:
            with pytest.raises(BackendUnavailable) as caught:
                prime_kernels.load(name)
            assert str(caught.value) == reason


def test_an_unknown_name_is_unavailable_and_load_names_the_known_ones() -> None:
    assert not prime_kernels.is_available("flash_moe")
    with pytest.raises(BackendUnavailable, match=r"no kernel 'flash_moe'; it has mega_moe, deep_gemm.*\[E09\]"):
        prime_kernels.load("flash_moe")


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (None, "torch is not installed; need torch>=2.9."),
        ("2.8.1+cu128", "torch is 2.8.1+cu128; need torch>=2.9."),
        ("2.10.0a0+git123", None),
        ("2.9.0+cpu", None),
        ("3.0", None),
    ],
)
def test_torch_is_judged_by_its_public_version(
    installed: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "torch"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(registry, "distribution_version", version)
    error = registry._torch_error()
    assert (error and error.message) == expected
    if error is not None:
        assert error.code == "E08"
        assert error.facts
        assert error.remedy
        assert prime_kernels.unavailable_reason("mega_moe") == str(error)
        assert not prime_kernels.is_available("mega_moe")
