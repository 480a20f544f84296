"""Read, plot, compare and export training logs.

RUN is a run directory, a log file, or a directory of runs. Reads dalsegno's logs and those of Forgather, Hugging Face,
Lightning, TensorBoard, W&B and MLflow, and any JSON lines with a step.
"""

from __future__ import annotations

from . import checks, plots, records, runs

COMMANDS = {
    "list": runs.list_runs,
    "summary": runs.summary,
    "show": records.show,
    "tail": records.tail,
    "plot": plots.plot,
    "heatmap": plots.heatmap,
    "compare": checks.compare,
    "diff": records.diff,
    "spikes": checks.spikes,
    "detect": checks.detect,
    "lineage": runs.lineage,
    "export": records.export,
    "report": plots.report,
}
"""In the order of the help."""
