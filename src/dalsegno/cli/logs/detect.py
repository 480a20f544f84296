"""Ask the divergence detector about past runs: would it have stopped them, and when?

With runs marked by --good and --bad, false alarms and missed divergences are told; --sweep finds the settings that tell
the two apart best. Exit status 1 if it fires in a run of unknown kind, or is wrong about a marked one; 2 if a run
cannot be read, or has no such metric: the others are looked at all the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_step_key, settings_of

if TYPE_CHECKING:
    from dalsegno.analysis import DetectorSettings, Series, TrainingLog

    from .per_run_results import PerRunResults


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", type=Path, help="a run's folder, a log file, or a folder of runs"
    )
    parser.add_argument("--good", metavar="RUN", nargs="+", type=Path, default=[], help="runs that it should let pass")
    parser.add_argument("--bad", metavar="RUN", nargs="+", type=Path, default=[], help="runs that it should stop")
    parser.add_argument("--sweep", action="store_true", help="look for better settings; needs good and bad runs")
    parser.add_argument("--metric", metavar="NAME", help="what it watches; default: the loss")
    parser.add_argument("--smoothing", type=float, default=0.3, metavar="A", help="default: %(default)g")
    parser.add_argument("--threshold", type=_perhaps, metavar="T", help="distance from the best; default: none")
    parser.add_argument("--relative-threshold", type=_perhaps, metavar="F", help="a factor over 1; default: none")
    parser.add_argument(
        "--baseline-smoothing", type=_perhaps, metavar="B", help="compare with a slower average; default: with the best"
    )
    parser.add_argument("--patience", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="max: for what should rise")
    add_step_key(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        ConfigurationError: for a value that cannot work.
    """
    from dalsegno.analysis import DetectorSettings

    settings = settings_of(DetectorSettings, arguments)
    named = {"good": arguments.good, "bad": arguments.bad, None: arguments.runs}
    if not any(named.values()):
        raise ConfigurationError("name the runs to look at: RUN, --good RUN or --bad RUN")
    asked = {mark: _watched(paths, arguments) for mark, paths in named.items()}
    marked = {mark: [series for _, series in answers.given] for mark, answers in asked.items()}
    failed = max(answers.status() for answers in asked.values())
    if not any(marked.values()):
        return failed
    found = _sweep(marked, arguments) if arguments.sweep else _detect(marked, settings, arguments)
    return failed or found


def _detect(marked: dict[str | None, list[Series]], settings: DetectorSettings, arguments: argparse.Namespace) -> int:
    from dalsegno.analysis import detect_divergence
    from dalsegno.cli.tables import Column, number, print_json, print_table, text

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
                Column("verdict", "verdict", text, False, _style),
                Column("reason", "because"),
            ],
            rows,
        )
        if arguments.good or arguments.bad:
            print(f"false alarms: {wrong['false alarm']} of {len(marked['good'])} good runs; ", end="")
            print(f"missed: {wrong['missed']} of {len(marked['bad'])} bad runs")
    return 1 if any(row["verdict"] in ("diverges", *wrong) for row in rows) else 0


def _sweep(marked: dict[str | None, list[Series]], arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from dalsegno.analysis import sweep_settings
    from dalsegno.cli.tables import Column, number, print_json, print_table, text

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
        print("margin: by what factor the threshold could be off; fires at: mean part of a bad run that has passed")
    return 1 if candidates[0].errors else 0


def _watched(paths: list[Path], arguments: argparse.Namespace) -> PerRunResults[Series]:
    from dalsegno.analysis import open_logs

    from .per_run_results import PerRunResults

    def watched(log: TrainingLog) -> Series:
        metric = arguments.metric or log.loss
        if metric is None:
            names = ", ".join(log.metrics()) or "nothing"
            raise ConfigurationError(f"{log.name} has no loss; choose with --metric from what it has: {names}")
        return log.metric(metric)

    return PerRunResults(open_logs(paths, arguments.step_key), watched)


def _verdict(mark: str | None, fired: bool) -> str:
    if mark is None:
        return "diverges" if fired else "passes"
    if mark == "good":
        return "false alarm" if fired else "right"
    return "right" if fired else "missed"


def _style(verdict: str) -> str:
    return "" if verdict in ("passes", "right") else "red"


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _perhaps(word: str) -> float | None:
    return None if word.lower() == "none" else float(word)
