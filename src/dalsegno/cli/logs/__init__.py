"""Ask the logs of runs what has happened.

RUN is a run's folder, a log file, or a folder of runs. Logs of other programs can be read too: Forgather, Hugging Face,
Lightning, TensorBoard, and JSON lines of any kind.
"""

from __future__ import annotations

from . import compare, detect, diff, heatmap, list, plot, spikes

COMMANDS = {
    "list": list,
    "plot": plot,
    "heatmap": heatmap,
    "compare": compare,
    "diff": diff,
    "spikes": spikes,
    "detect": detect,
}
