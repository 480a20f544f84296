"""Makes the picture of docs/guides/diloco.md, and prints its figures:
``PYTHONPATH=. python -P docs/images/diloco.py``, in the root of the repository. Takes some ten minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.diloco import WARM_UP, Curve, losses
from benchmarks.row import table
from matplotlib.figure import Figure

HERE = Path(__file__).parent


def draw(curves: Mapping[str, Curve]) -> None:
    """Write the picture. ``curves``: by name, as :func:`benchmarks.diloco.losses` fills them."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    colours = {"1": "#98a2b3", "2": "#0072b2", "4": "#d55e00"}
    for name, curve in curves.items():
        workers = next((part for part in name.replace(",", " ").split() if part.isdigit()), "1")
        dashes = "--" if name.startswith("DDP") else ":" if "int8" in name else "-"
        label = name.replace(f", {workers}", f", {workers} workers")
        axes.plot(*zip(*curve, strict=True), dashes, color=colours[workers], label=label)
    axes.axvline(WARM_UP, color="#98a2b3", linewidth=0.8, zorder=0)
    axes.text(WARM_UP, 1, " DiLoCo begins", transform=axes.get_xaxis_transform(), va="top", color="#667085", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="steps of a worker", ylabel="loss on held-out text")
    axes.legend(frameon=False)
    figure.savefig(HERE / "diloco.png", dpi=110)


if __name__ == "__main__":
    curves: dict[str, Curve] = {}
    print(table(losses(curves=curves)))
    draw(curves)
