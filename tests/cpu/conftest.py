# SPDX-License-Identifier: Apache-2.0
"""One thread per process: the tensors are small, and threads that wait for each other cost more than they save."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
