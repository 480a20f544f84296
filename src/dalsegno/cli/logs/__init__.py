"""Ask the logs of runs what has happened.

RUN is a run's folder, a log file, or a folder of runs. Logs of other programs can be read too: Forgather, Hugging Face,
Lightning, TensorBoard, and JSON lines of any kind.
"""

from __future__ import annotations

from . import compare, detect, diff, export, heatmap, lineage, list, plot, report, show, spikes, summary, tail

COMMANDS = {
    "list": list,
    "summary": summary,
    "show": show,
    "tail": tail,
    "plot": plot,
    "heatmap": heatmap,
    "compare": compare,
    "diff": diff,
    "spikes": spikes,
    "detect": detect,
    "lineage": lineage,
    "export": export,
    "report": report,
}
