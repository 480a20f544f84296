"""Replay past runs through DivergenceDetector: would it have stopped them, and when?

With --save-steps, show to which checkpoint action="rollback" would first have gone back. Mark runs with --good and
--bad to count false alarms and missed divergences; --sweep finds the settings that separate the two best. With neither
threshold, the limit adapts to the run's own gain and noise. Exit status 1 if the detector fires in an unmarked run or
is wrong about a marked one; 2 if a run cannot be read or lacks the metric, after the other runs have been checked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.tables import Column, number, print_json, print_table, text
from dalsegno.errors import ConfigurationError

from .arguments import RUN, add_json, add_step_key, settings_of

if TYPE_CHECKING:
    from dalsegno.analysis import DetectorSettings, Series, TrainingLog
    from dalsegno.analysis.stats.detect import Firing

    from .per_run_results import PerRunResults

EXIT_STATUSES = {
    1: "the detector fires in an unmarked run, or is wrong about a marked one",
    2: "error, or a run that cannot be read or lacks the metric; the others are checked",
}


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help=RUN)
    parser.add_argument(
        "--good", metavar="RUN", nargs="+", type=Path, default=[], help="runs in which the detector should not fire"
    )
    parser.add_argument(
        "--bad", metavar="RUN", nargs="+", type=Path, default=[], help="runs in which the detector should fire"
    )
    parser.add_argument("--sweep", action="store_true", help="search for the best settings; needs --good and --bad")
    parser.add_argument("--metric", metavar="NAME", help="metric the detector watches; default: the loss")
    parser.add_argument(
        "--smoothing",
        type=float,
        default=0.3,
        metavar="A",
        help="weight of the newest value in the moving average, over 0, up to 1; default: %(default)g",
    )
    parser.add_argument(
        "--threshold",
        type=_float_or_none,
        metavar="T",
        help="distance from the baseline, in the metric's unit; default: none",
    )
    parser.add_argument(
        "--relative-threshold", type=_float_or_none, metavar="F", help="factor of the baseline, over 1; default: none"
    )
    parser.add_argument(
        "--baseline-smoothing",
        type=_float_or_none,
        metavar="B",
        help="baseline is a slower moving average with this weight; default: the baseline is the best value",
    )
    parser.add_argument(
        "--patience", type=int, default=3, metavar="N", help="bad records in a row to fire; default: %(default)s"
    )
    parser.add_argument(
        "--warmup", type=int, default=10, metavar="N", help="first records, not judged; default: %(default)s"
    )
    parser.add_argument(
        "--mode", choices=("min", "max"), default="min", help="max: the metric should rise; default: %(default)s"
    )
    parser.add_argument(
        "--save-steps",
        type=int,
        metavar="N",
        help="steps between checkpoints: show to which one of them the run would have gone back; default: do not",
    )
    parser.add_argument(
        "--margin",
        type=int,
        default=50,
        metavar="N",
        help="with --save-steps, the margin of the RecoveryPolicy, in steps; default: %(default)s",
    )
    add_step_key(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        ConfigurationError: for an invalid value.
    """
    from dalsegno.analysis import DetectorSettings

    settings = settings_of(DetectorSettings, arguments)
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


def _detect(marked: dict[str | None, list[Series]], settings: DetectorSettings, arguments: argparse.Namespace) -> int:
    from dalsegno.analysis import detect_divergence

    rows: list[dict[str, Any]] = []
    for mark, runs in marked.items():
        for series in runs:
            found = detect_divergence(series, settings)
            fired = found.fired
            rows.append(
                {
                    "run": series.run,
                    "marked": mark,
                    "records": found.observations,
                    "fires_at": fired.step if fired else None,
                    "back_to": _checkpoint_before(fired, arguments),
                    "verdict": _verdict(mark, fired is not None),
                    "reason": found.reason,
                }
            )
    wrong = {kind: sum(row["verdict"] == kind for row in rows) for kind in ("false alarm", "missed")}
    if arguments.json:
        print_json({"false_alarms": wrong["false alarm"], "missed": wrong["missed"], "runs": rows})
    else:
        print_table(
            [
                Column("run", "run"),
                *([Column("marked", "marked")] if arguments.good or arguments.bad else []),
                Column("records", "records", number, True),
                Column("fires_at", "fires at", number, True),
                *([Column("back_to", "back to", number, True)] if arguments.save_steps is not None else []),
                Column("verdict", "verdict", style=lambda verdict: "" if verdict in ("passes", "right") else "red"),
                Column("reason", "reason"),
            ],
            rows,
        )
        if arguments.good or arguments.bad:
            print(f"false alarms: {wrong['false alarm']} of {len(marked['good'])} good runs; ", end="")
            print(f"missed: {wrong['missed']} of {len(marked['bad'])} bad runs")
    return 1 if any(row["verdict"] in ("diverges", *wrong) for row in rows) else 0


def _checkpoint_before(fired: Firing | None, arguments: argparse.Namespace) -> int | None:
    """Step of the checkpoint to which the run would have gone back; None if it would not, or without
    ``--save-steps``."""
    from dalsegno.policies.recovery import RecoveryPolicy

    policy = RecoveryPolicy(margin=arguments.margin)
    apart: int | None = arguments.save_steps
    if fired is None or apart is None:
        return None
    latest = policy.latest_checkpoint(fired.step, [])
    return latest - latest % apart


def _sweep(marked: dict[str | None, list[Series]], arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from dalsegno.analysis import sweep_settings

    candidates = sweep_settings(marked["good"], marked["bad"], mode=arguments.mode)
    rows = [
        {**asdict(each.settings), **{key: value for key, value in asdict(each).items() if key != "settings"}}
        for each in candidates
    ]
    if arguments.json:
        print_json(rows)
    else:
        print_table(
            [
                Column("missed", "missed", number, True),
                Column("false_alarms", "false alarms", number, True),
                Column("margin", "margin", lambda margin: f"{margin:.3g} ×", True),
                Column("fires_at", "fires at", lambda part: text(None) if part is None else f"{part:.0%}", True),
                Column("threshold", "--threshold", _or_none, True),
                Column("relative_threshold", "--relative-threshold", _or_none, True),
                Column("smoothing", "--smoothing", number, True),
                Column("patience", "--patience", number, True),
                Column("warmup", "--warmup", number, True),
            ],
            rows,
        )
        print("margin: factor by which the threshold may be off; fires at: mean fraction of a bad run before it fires")
    return 1 if candidates[0].errors else 0


def _watched(paths: list[Path], arguments: argparse.Namespace) -> PerRunResults[Series]:
    from dalsegno.analysis import open_logs

    from .per_run_results import PerRunResults

    def watched(log: TrainingLog) -> Series:
        metric = arguments.metric or log.loss
        if metric is None:
            names = ", ".join(log.metrics()) or "nothing"
            raise ConfigurationError(f"{log.name} logs no loss; choose with --metric one of: {names}")
        return log.metric(metric)

    return PerRunResults(open_logs(paths, arguments.step_key), watched)


def _verdict(mark: str | None, fired: bool) -> str:
    if mark is None:
        return "diverges" if fired else "passes"
    if mark == "good":
        return "false alarm" if fired else "right"
    return "right" if fired else "missed"


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _float_or_none(word: str) -> float | None:
    return None if word.lower() == "none" else float(word)
