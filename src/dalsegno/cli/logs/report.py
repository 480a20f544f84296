"""Write a report on runs as one interactive HTML file.

It contains summaries, curves to zoom, toggle and smooth, restarts, the comparison with the first run, the divergence
detector's verdicts, spikes, parameter norms and log headers. The file works offline and is at most 5 MB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.cli.tables import print_json, size
from dalsegno.errors import ConfigurationError

from .arguments import add_json, add_runs
from .pictures import add_force, expect_free


def describe(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="HTML file; default: %(default)s"
    )
    add_force(parser)
    parser.add_argument("--title", help="title of the page; default: the names of the runs")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no run.
        ConfigurationError: if the file cannot be written there, or the runs do not fit into 5 MB.
    """
    from dalsegno.analysis import open_logs, write_report

    path: Path = arguments.output
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: name a file in an existing directory")
    expect_free(path, arguments)
    logs = open_logs(arguments.runs, arguments.step_key)
    write_report(logs, path, title=arguments.title)
    if arguments.json:
        print_json({"file": str(path), "bytes": path.stat().st_size, "runs": [log.name for log in logs]})
    else:
        print(f"wrote {path} ({size(path.stat().st_size)})")
    return 0
