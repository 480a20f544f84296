"""Commands that judge curves: compare, spikes, detect."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno import analysis
from dalsegno.cli.command import JSON, METRIC, argument, command, converter, flag, option, settings_of
from dalsegno.cli.console import Column, number, numbers, print_json, print_table, text, texts
from dalsegno.errors import ConfigurationError

from .arguments import RUN, STEP_KEY, PerRunResults, metric_names, output_path, picture_file, run_paths, save_picture

if TYPE_CHECKING:
    from dalsegno.analysis.replay import Firing


@command(
    run_paths(),
    metric_names("the loss and the evaluation losses"),
    option("--window", metavar="N", help="records to average; default: 1/20 of the records, at most 50"),
    option("--sigmas", metavar="S", default=4.0, help="mean difference that counts as separated, in standard errors"),
    picture_file(None),
    JSON,
    statuses={1: "a run separates from the first"},
)
def compare(arguments: argparse.Namespace) -> int:
    """Compare runs with the first one, step by step: where the curves separate, and their difference at the end.

    "differs at": first step with another value. "separates at": first step at which the mean difference leaves the
    noise of both curves for more than half a window (it may return later). The last columns are means over the last
    window of records, their difference and its standard error.
    """
    from dataclasses import asdict

    path = output_path(arguments, "compare") if arguments.output or arguments.format else None
    logs = analysis.open_logs(arguments.runs, arguments.step_key)
    if len(logs) < 2:
        raise ConfigurationError(f"only one run, {logs[0].name}; a comparison needs at least two")
    metrics = arguments.metrics or _in_common(logs)
    for log in logs:
        log.series([name for name in metrics if name in log.metrics()])  # reads the log once for all metrics
    compare_with = partial(analysis.compare_series, window=arguments.window, sigmas=arguments.sigmas)
    rows = [
        {"metric": metric, "run": other.name, **asdict(compare_with(logs[0].metric(metric), other.metric(metric)))}
        for metric in metrics
        for other in logs[1:]
    ]
    if path is not None:
        save_picture(analysis.plot_logs(logs, metrics, compare=True), path, quiet=arguments.json)
    if arguments.json:
        print_json({"first": logs[0].name, "comparisons": rows})
    else:
        print(f"compared with {logs[0].name}:")
        ends = {"first": logs[0].name, "second": "this run", "difference": "difference", "noise": "noise"}
        columns = [
            *texts(metric="metric", run="run"),
            *numbers(records="compared", differs_at="differs at"),
            Column("parts_at", "separates at", number, True, lambda step: "" if step is None else "red"),
            *numbers(last_step="last step", **ends),
        ]
        print_table(columns, rows)
    return 1 if any(row["parts_at"] is not None for row in rows) else 0


def _in_common(logs: list[analysis.TrainingLog]) -> list[str]:
    """The loss and the evaluation losses that all runs log."""
    shared = [name for name in logs[0].metrics() if all(name in log.metrics() for log in logs)]
    chosen = [name for name in shared if name == logs[0].loss or (name.startswith("eval") and name.endswith("loss"))]
    if not chosen:
        names = ", ".join(shared) or "none"
        raise ConfigurationError(f"the runs have no loss in common; choose with --metrics one of: {names}")
    return chosen


@command(
    run_paths(),
    metric_names("the loss and grad_norm"),
    option("--sigmas", metavar="S", default=6.0, help="height in standard deviations"),
    option(
        "--window", metavar="N", help="preceding records of the median; default: 1/10 of the records, from 16 to 50"
    ),
    argument(
        "--mode",
        choices=("min", "max"),
        default="min",
        help="max: spikes point down, as for an accuracy; default: %(default)s",
    ),
    JSON,
    statuses={2: "error, or a run that cannot be read; the others are searched"},
)
def spikes(arguments: argparse.Namespace) -> int:
    """Find spikes: records far outside the noise of the records before them.

    A spike lies more than --sigmas standard deviations above the median of the preceding records, or is NaN or
    infinite.
    """
    from dataclasses import asdict

    def of_run(log: analysis.TrainingLog) -> list[dict[str, Any]]:
        default = [name for name in (log.loss, "grad_norm") if name in log.metrics()]
        find = partial(analysis.find_spikes, window=arguments.window, sigmas=arguments.sigmas, mode=arguments.mode)
        curves = log.series(arguments.metrics or default)
        return [{"run": log.name, "metric": name, **asdict(spike)} for name in curves for spike in find(curves[name])]

    results = PerRunResults(analysis.open_logs(arguments.runs, arguments.step_key), of_run)
    rows = [row for _, found in results.found for row in found]
    if arguments.json:
        print_json(rows)
    elif rows:
        columns = [
            *texts(run="run", metric="metric"),
            *numbers(step="step", value="value", usual="median"),
            Column("sigmas", "sigmas", lambda sigmas: f"{sigmas:.0f}", True),
            *numbers(records="records"),
            Column(
                "recovered", "recovered", lambda yes: "yes" if yes else "no", style=lambda yes: "" if yes else "red"
            ),
        ]
        print_table(columns, rows)
    elif results.found:
        print("No spikes.")
    return results.status()


Marked = dict[str | None, list["analysis.Series"]]
"""Curves of runs by their mark: good, bad or none."""


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


_float_or_none = converter(lambda word: None if word.lower() == "none" else float(word), "a number, or none")


@command(
    argument("runs", metavar="RUN", nargs="*", type=Path, help=RUN),
    argument(
        "--good", metavar="RUN", nargs="+", type=Path, default=[], help="runs in which the detector should not fire"
    ),
    argument("--bad", metavar="RUN", nargs="+", type=Path, default=[], help="runs in which the detector should fire"),
    flag("--sweep", help="search for the best settings; needs --good and --bad"),
    option(*METRIC, metavar="NAME", help="metric the detector watches; default: the loss"),
    option(
        "--smoothing",
        metavar="A",
        default=0.3,
        help="weight of the newest value in the moving average, over 0, up to 1",
    ),
    option(
        "--threshold",
        metavar="T",
        type=_float_or_none,
        help="distance from the baseline, in the metric's unit; default: none",
    ),
    option(
        "--relative-threshold", metavar="F", type=_float_or_none, help="factor of the baseline, over 1; default: none"
    ),
    option(
        "--baseline-smoothing",
        metavar="B",
        type=_float_or_none,
        help="baseline is a slower moving average with this weight; default: the baseline is the best value",
    ),
    option("--patience", metavar="N", default=3, help="bad records in a row to fire"),
    option("--warmup", metavar="N", default=10, help="first records, not judged"),
    argument("--mode", choices=("min", "max"), default="min", help="max: the metric should rise; default: %(default)s"),
    option(
        "--save-steps",
        metavar="N",
        help="steps between checkpoints: show to which one of them the run would have gone back; default: do not",
    ),
    option("--margin", metavar="N", default=50, help="with --save-steps, the margin of the RecoveryPolicy, in steps"),
    STEP_KEY,
    JSON,
    statuses={
        1: "the detector fires in an unmarked run, or is wrong about a marked one",
        2: "error, or a run that cannot be read or lacks the metric; the others are checked",
    },
)
def detect(arguments: argparse.Namespace) -> int:
    """Replay past runs through DivergenceDetector: would it have stopped them, and when?

    With --save-steps, show to which checkpoint action="rollback" would first have gone back. Mark runs with --good and
    --bad to count false alarms and missed divergences; --sweep finds the settings that separate the two best. With
    neither threshold, the limit adapts to the run's own gain and noise. Exit status 1 if the detector fires in an
    unmarked run or is wrong about a marked one; 2 if a run cannot be read or lacks the metric, after the other runs
    have been checked.
    """
    settings = settings_of(analysis.DetectorSettings, arguments)
    if arguments.save_steps is not None and arguments.save_steps < 1:
        raise ConfigurationError(f"--save-steps {arguments.save_steps}: needs at least 1")
    named = {"good": arguments.good, "bad": arguments.bad, None: arguments.runs}
    if not any(named.values()):
        raise ConfigurationError("no runs given: name them as RUN, --good RUN or --bad RUN")
    results = {mark: _watched(paths, arguments) for mark, paths in named.items()}
    marked = {mark: [series for _, series in result.found] for mark, result in results.items()}
    failed = max(result.status() for result in results.values())
    if not any(marked.values()):
        return failed
    found = _sweep(marked, arguments) if arguments.sweep else _detect(marked, settings, arguments)
    return failed or found


def _detect(marked: Marked, settings: analysis.DetectorSettings, arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for mark, runs in marked.items():
        for series in runs:
            found = analysis.detect_divergence(series, settings)
            fired = found.fired
            rows.append(
                {
                    "run": series.run,
                    "marked": mark,
                    "records": found.observations,
                    "fires_at": fired.step if fired else None,
                    "back_to": _checkpoint_before(fired, arguments),
                    "verdict": _VERDICTS[mark][fired is not None],
                    "reason": found.reason,
                }
            )
    wrong = {kind: sum(row["verdict"] == kind for row in rows) for kind in ("false alarm", "missed")}
    if arguments.json:
        print_json({"false_alarms": wrong["false alarm"], "missed": wrong["missed"], "runs": rows})
    else:
        columns = [
            *texts(run="run"),
            *(texts(marked="marked") if arguments.good or arguments.bad else []),
            *numbers(records="records", fires_at="fires at"),
            *(numbers(back_to="back to") if arguments.save_steps is not None else []),
            Column("verdict", "verdict", style=lambda verdict: "" if verdict in ("passes", "right") else "red"),
            *texts(reason="reason"),
        ]
        print_table(columns, rows)
        if arguments.good or arguments.bad:
            print(f"false alarms: {wrong['false alarm']} of {len(marked['good'])} good runs; ", end="")
            print(f"missed: {wrong['missed']} of {len(marked['bad'])} bad runs")
    return 1 if any(row["verdict"] in ("diverges", *wrong) for row in rows) else 0


def _checkpoint_before(fired: Firing | None, arguments: argparse.Namespace) -> int | None:
    """Step of the checkpoint to which the run would have gone back; None: not, or unknown without ``--save-steps``."""
    from dalsegno.policies.recovery import RecoveryPolicy

    policy = RecoveryPolicy(margin=arguments.margin)  # an impossible margin is refused in any case
    if fired is None or arguments.save_steps is None:
        return None
    latest = policy.latest_checkpoint(fired.step, [])
    return latest - latest % int(arguments.save_steps)


def _sweep(marked: Marked, arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    candidates = analysis.sweep_settings(marked["good"], marked["bad"], mode=arguments.mode)
    found = [asdict(each) for each in candidates]
    rows = [{**row.pop("settings"), **row} for row in found]
    if arguments.json:
        print_json(rows)
    else:
        columns = [
            *numbers(missed="missed", false_alarms="false alarms"),
            Column("margin", "margin", lambda margin: f"{margin:.3g} ×", True),
            Column("fires_at", "fires at", lambda part: text(None) if part is None else f"{part:.0%}", True),
            Column("threshold", "--threshold", _or_none, True),
            Column("relative_threshold", "--relative-threshold", _or_none, True),
            *numbers(smoothing="--smoothing", patience="--patience", warmup="--warmup"),
        ]
        print_table(columns, rows)
        print("margin: factor by which the threshold may be off; fires at: mean fraction of a bad run before it fires")
    return 1 if candidates[0].errors else 0


def _watched(paths: list[Path], arguments: argparse.Namespace) -> PerRunResults[analysis.Series]:
    def watched(log: analysis.TrainingLog) -> analysis.Series:
        metric = arguments.metric or log.loss
        if metric is None:
            names = ", ".join(log.metrics()) or "nothing"
            raise ConfigurationError(f"{log.name} logs no loss; choose with --metric one of: {names}")
        return log.metric(metric)

    return PerRunResults(analysis.open_logs(paths, arguments.step_key), watched)


_VERDICTS = {None: ("passes", "diverges"), "good": ("right", "false alarm"), "bad": ("missed", "right")}
"""By the mark of a run: if the detector does not fire, and if it does."""
