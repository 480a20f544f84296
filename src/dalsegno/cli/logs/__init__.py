"""Read, plot, compare and export training logs.

RUN is a run directory, a log file, or a directory of runs. Reads dalsegno's logs and those of Forgather, Hugging Face,
Lightning, TensorBoard, W&B, MLflow and Trackio, and any JSON lines with a step.
"""

from __future__ import annotations

from dalsegno.cli.command import Command

from . import checks, plots, records, runs

_OTHERS = "error, or a run that cannot be read; the others are {}".format

COMMANDS = {
    "list": Command(runs.list_runs, runs.describe_list, {2: _OTHERS("listed")}),
    "summary": Command(runs.summary, runs.describe_summary, {2: _OTHERS("summarized")}),
    "show": Command(records.show, records.describe_show, {1: "no record matches"}),
    "tail": Command(records.tail, records.describe_tail),
    "plot": Command(plots.plot, plots.describe_plot),
    "heatmap": Command(plots.heatmap, plots.describe_heatmap),
    "compare": Command(checks.compare, checks.describe_compare, {1: "a run separates from the first"}),
    "diff": Command(records.diff, records.describe_diff, {1: "the logs differ"}),
    "spikes": Command(checks.spikes, checks.describe_spikes, {2: _OTHERS("searched")}),
    "detect": Command(
        checks.detect,
        checks.describe_detect,
        {
            1: "the detector fires in an unmarked run, or is wrong about a marked one",
            2: "error, or a run that cannot be read or lacks the metric; the others are checked",
        },
    ),
    "lineage": Command(runs.lineage, runs.describe_lineage),
    "export": Command(records.export, records.describe_export),
    "report": Command(plots.report, plots.describe_report),
}
"""In the order of the help."""
