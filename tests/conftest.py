# SPDX-License-Identifier: Apache-2.0
"""The one place where tests are skipped: `gpu` tests without a GPU that the kernels run on."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail gpu tests that would be skipped")
    parser.addoption(
        "--host-rounds", type=int, default=1, help="runs of every case of tests/host_cxx, each another one"
    )


def gpu_skip_reason() -> str | None:
    """Why gpu tests cannot run here; None if they can. Asks torch, so only once a gpu test was collected."""
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"{torch.cuda.get_device_name()} is sm_{major}{minor}; need sm_90 or newer"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or config.getoption("--require-gpu"):
        return
    reason = gpu_skip_reason()
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and item.config.getoption("--require-gpu"):
        reason = gpu_skip_reason()
        if reason is not None:
            pytest.fail(f"--require-gpu: {reason}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """With --require-gpu a gpu test that skips itself half way is a failure as well."""
    report = yield
    if report.skipped and item.get_closest_marker("gpu") and item.config.getoption("--require-gpu"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: skipped: {report.longrepr}"
    return report
