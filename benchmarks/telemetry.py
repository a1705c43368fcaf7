# SPDX-License-Identifier: Apache-2.0
"""Clock, power, name and driver of the GPU, through pynvml if it is there, else nvidia-smi, else unknown (None)."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from types import TracebackType
from typing import Any

_PERIOD_S = 0.1


def query_gpu(index: int) -> dict[str, float | str | None]:
    """{"clock_mhz", "power_w", "driver"} of one GPU now."""
    return _by_pynvml(index) or _by_smi(index) or {"clock_mhz": None, "power_w": None, "driver": None}


class Sampler:
    """Samples clock and power in a thread while the `with` block runs; medians afterwards."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._samples: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def median(self, key: str) -> float | None:
        """Median of "clock_mhz" or "power_w"; None if nobody could be asked."""
        values = [sample[key] for sample in self._samples if sample.get(key) is not None]
        return round(statistics.median(values), 1) if values else None

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._samples.append(dict(query_gpu(self._index)))


def _by_pynvml(index: int) -> dict[str, float | str | None] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        driver = pynvml.nvmlSystemGetDriverVersion()
        return {
            "clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
        }
    except pynvml.NVMLError:
        return None


def _by_smi(index: int) -> dict[str, float | str | None] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=clocks.sm,power.draw,driver_version"]
    done = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    return parse_smi(done.stdout) if done.returncode == 0 else None


def parse_smi(line: str) -> dict[str, float | str | None]:
    """One line "clock, watts, driver"; fields nvidia-smi does not know ("[N/A]") become None."""
    clock, power, driver = (field.strip() for field in line.strip().splitlines()[0].split(","))
    return {"clock_mhz": _number(clock), "power_w": _number(power), "driver": driver}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
