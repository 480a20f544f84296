"""Ask the logs of runs what has happened.

RUN is a run's folder, a log file, or a folder of runs. Logs of other programs can be read too: Forgather, Hugging Face,
Lightning, TensorBoard, and JSON lines of any kind.
"""

from __future__ import annotations

COMMANDS = (
    *("list", "summary", "show", "tail", "plot", "heatmap", "compare", "diff", "spikes", "detect", "lineage", "export"),
    "report",
)
"""In the order of their help."""
