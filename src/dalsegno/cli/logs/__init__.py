"""Read, plot, compare and export training logs.

RUN is a run directory, a log file, or a directory of runs. Reads dalsegno's logs and those of Forgather, Hugging Face,
Lightning, TensorBoard, W&B, MLflow and Trackio, and any JSON lines with a step.
"""

from __future__ import annotations

COMMANDS = (
    *("list", "summary", "show", "tail", "plot", "heatmap", "compare", "diff", "spikes", "detect", "lineage", "export"),
    "report",
)
"""In the order of the help."""
