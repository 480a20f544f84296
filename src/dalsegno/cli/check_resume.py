"""Kill your own training run, resume it, and see whether anything differs from one that was never killed.

FACTORY is "module:function"; the module is looked for in the current folder first. The function gets an output folder
(a pathlib.Path) and builds your trainer, with model, data and callbacks, the same each time:

    def build(output_dir):
        return dalsegno.Trainer(model, dalsegno.TrainingArguments(output_dir=output_dir, ...), ...)

Exit status 0: nothing differs; 1: something does, and the table says what, down to the first record and tensor; 2: it
could not be tried.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.testing import Comparison


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("factory", metavar="FACTORY", help="module:function that builds the trainer")
    parser.add_argument(
        "--kill-at",
        metavar="SPEC",
        action="append",
        default=[],
        help="when to kill a leg: on_step_end:12 (an event, and its how manyth time), write:3 or write:3:logs (a file "
        "operation, on paths that contain a text), 2.5s (time). Once for each kill; default: two, at random",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random kills; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes that train together, over gloo")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for each leg; default: %(default)g"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave both runs, and what they print, in this folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and the progress to stderr")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigurationError: if factory, moments or folder are not to be had; UnknownName names the nearest.
        RankFailed: if a leg ends with an error of its own.
    """
    if arguments.ranks < 1:
        raise ConfigurationError(f"--ranks {arguments.ranks}: needs at least 1")
    if arguments.keep is not None:
        _check_empty(arguments.keep)
    sys.path.insert(0, str(Path.cwd()))  # other processes begin with this one's path

    import tempfile

    from dalsegno.testing import check_resume

    from .factory import Factory
    from .moments import moment

    factory = Factory.named(arguments.factory)
    kill_at = [moment(spec) for spec in arguments.kill_at]
    with tempfile.TemporaryDirectory(prefix="dalsegno-check-resume-") as temporary:
        comparison = check_resume(
            factory,
            kill_at or None,
            folder=arguments.keep or Path(temporary),
            world_size=arguments.ranks,
            timeout=arguments.timeout,
            seed=arguments.seed,
            say=_to_stderr if arguments.json else _to_stdout,
        )
    _to_stdout(_as_json(comparison) if arguments.json else _as_text(comparison))
    return 0 if comparison.identical else 1


def _check_empty(keep: Path) -> None:
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(f"--keep {keep}: is not an empty folder; name another one")


def _as_text(comparison: Comparison) -> str:
    verdict = "Nothing differs." if comparison.identical else "THE RUNS DIFFER."
    return f"\n{comparison.table()}\n\n{verdict}"


def _as_json(comparison: Comparison) -> str:
    import json
    from dataclasses import asdict

    rows = [{**asdict(row), "identical": row.identical} for row in comparison.rows]
    return json.dumps({"identical": comparison.identical, "rows": rows}, indent=2)


def _to_stdout(line: str) -> None:
    print(line, flush=True)


def _to_stderr(line: str) -> None:
    print(line, flush=True, file=sys.stderr)
