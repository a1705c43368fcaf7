# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: the verdict on two loss curves, a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

# Largest relative difference between the two loss curves, each a running mean over WINDOW steps. Float32 differs by the
# order of additions only (2e-7 in 300 steps). Bfloat16 rounds at other places in the two computations, and a rounded
# score may pick another expert, from where single steps wander apart (3e-2 in 300 steps; their running means 1.5e-2).
WINDOW = 20
AGREEMENT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Report:
    """What a run showed; losses are means over the batch, times are milliseconds a training step."""

    backend: str
    device: str
    dtype: str
    steps: int
    first_loss: float
    final_loss: float
    plain_final_loss: float
    max_relative_difference: float
    allowed_difference: float
    step_ms: float
    plain_step_ms: float
    plot: str | None

    @property
    def learned(self) -> bool:
        """The loss ended below half of its first value."""
        return self.final_loss < 0.5 * self.first_loss

    @property
    def agrees(self) -> bool:
        """The curves stayed within the allowed relative difference (false for NaN)."""
        return self.max_relative_difference <= self.allowed_difference


def largest_difference(ours: list[float], plain: list[float]) -> float:
    """How far two loss curves part.

    Args:
        ours: Losses of the curve that is judged.
        plain: Losses of the curve that it should follow; as many.

    Returns:
        The largest relative difference of their running means over `WINDOW` steps; NaN if any loss is NaN.
    """
    curves = torch.tensor([ours, plain], dtype=torch.float64)
    sums = F.pad(curves.cumsum(1), (1, 0))
    ends = torch.arange(1, curves.shape[1] + 1)
    starts = (ends - WINDOW).clamp(min=0)
    means = (sums[:, ends] - sums[:, starts]) / (ends - starts)
    return float(((means[0] - means[1]).abs() / means[1].abs()).max())


def draw(path: Path, ours: list[float], plain: list[float], backend: str) -> str | None:
    """Write the loss curves as a picture.

    Args:
        path: File to write, a PNG; its folder is made if missing.
        ours: Losses of `mega_moe`.
        plain: Losses of plain torch.
        backend: What ran, for the legend.

    Returns:
        The path written; None where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(plain, color="#bbbbbb", linewidth=5, label="plain torch, loop over experts")
    axes.plot(ours, color="#0b5fa5", linewidth=1.5, label=f"prime_kernels.mega_moe ({backend})")
    axes.set(xlabel="step", ylabel="mean squared error", yscale="log", title="One MoE layer learning a fixed teacher")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return str(path)


def table(report: Report, layer: str) -> str:
    """The report as lines of text.

    Args:
        report: What a run showed.
        layer: Sizes of the layer, in words.

    Returns:
        One line a fact, without a last line break.
    """
    rows = [
        ("backend", f"{report.backend} on {report.device}, {report.dtype}"),
        ("layer", layer),
        ("loss", f"{report.first_loss:.4f} -> {report.final_loss:.4f}  ({report.steps} steps)"),
        ("plain torch", f"{report.first_loss:.4f} -> {report.plain_final_loss:.4f}"),
        (
            "step time",
            f"{report.step_ms:.2f} ms, plain torch {report.plain_step_ms:.2f} ms (a toy size; not a benchmark)",
        ),
        ("learned", f"{'yes' if report.learned else 'NO'} (final loss below half of the first)"),
        (
            "curves agree",
            f"{'yes' if report.agrees else 'NO'} (largest relative difference {report.max_relative_difference:.1e}, "
            f"allowed {report.allowed_difference:.0e}; running means of {WINDOW} steps)",
        ),
        ("plot", report.plot or "not drawn: matplotlib is not installed (pip install 'prime-kernels[plot]')"),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)
