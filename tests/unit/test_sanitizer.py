# SPDX-License-Identifier: Apache-2.0
"""The sanitizer's program knows which kernels were launched, whichever way they went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.stub_cuda import run_with_stub
from tests.unit.test_loader_launch import PRELUDE

CODE = """
from prime_kernels.loader.prepared import Prepared, Step
from tests.sanitizer.small import Launches
kernels._kernels.clear()
launches = Launches()
kernel = kernels.load_kernel(made.KEY, device=0)
launch()
failure(args={})
Prepared([Step(kernel, 1, args, {"map_x": (rows, 0x7000)})] * 2, ()).launch(0, ())
known = launches.by_symbol()
kernels._kernels.clear()
out(known=known, unknown=launches.by_symbol(), launches=len(stub.calls("cuLaunchKernelEx")))
"""


@pytest.mark.parametrize("binding", ["shim", "twin"])
def test_launches_of_both_paths_are_counted_and_kernels_of_nobody_are_told(binding: str, tmp_path: Path) -> None:
    settings = {"PK_TEST_FOLDER": str(tmp_path), "PK_TEST_BINDING": binding}
    found = json.loads(run_with_stub(PRELUDE + CODE, **settings).splitlines()[-1])
    assert found["known"] == {"pk_fake": found["launches"]} == {"pk_fake": 3}
    ((name, count),) = found["unknown"].items()
    assert name.startswith("unknown kernel 0x")
    assert count == 3
