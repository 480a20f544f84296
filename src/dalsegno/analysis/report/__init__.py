"""Report on runs as one HTML file: tables, and curves to zoom, hover, toggle and smooth.

Needs a browser and no network. Its Content-Security-Policy allows only its own script, by hash, so that a name in a log
is never executed, whatever it contains.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files as resources
from itertools import islice
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dalsegno.analysis.divergence import DetectorSettings
from dalsegno.analysis.folder import open_logs
from dalsegno.analysis.log import TrainingLog
from dalsegno.analysis.plotting.curves import colour
from dalsegno.analysis.plotting.plot import TITLES
from dalsegno.analysis.series import WHERE, ParameterSeries
from dalsegno.analysis.webpage import inlined
from dalsegno.errors import ConfigurationError, NotFound
from dalsegno.logs.values import to_json
from dalsegno.stateful.annotations import check_types
from dalsegno.system import filesystem

from . import tables
from .payload import payload

MOST_BYTES = 5_000_000
POINTS = 200_000
"""Points in all curves together; fewer if the file would exceed :data:`MOST_BYTES`."""
MOST_HEATMAPS = 8


@check_types
def write_report(
    logs: Sequence[TrainingLog] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    settings: DetectorSettings | None = None,
) -> Path:
    """Write a report on runs, at most 5 MB, as one HTML file; returns its path.

    Args:
        logs: as :func:`open_logs` returns them, or the path of a run or of a folder of runs.
        path: overwritten if it exists.
        title: None: the names of the runs.
        settings: of the divergence detector.

    Raises:
        ConfigurationError: without a run, or if the runs do not fit into 5 MB.
    """
    logs = open_logs(logs) if isinstance(logs, str | os.PathLike) else logs
    if not logs:
        raise ConfigurationError("a report needs at least one run")
    names = [log.name for log in logs]
    page = _page(logs, title or (" and ".join(names) if len(names) < 3 else f"{len(names)} runs"), settings)
    with filesystem.output_file(Path(path)) as file:
        file.write(page.encode())
    return Path(path)


def _page(logs: Sequence[TrainingLog], title: str, settings: DetectorSettings | None) -> str:
    for log in logs:
        log.series(log.metrics())  # one pass over the file, cached for all that follows
    heatmaps = list(islice(_heatmaps(logs), MOST_HEATMAPS + 1))
    more, heatmaps = len(heatmaps) > MOST_HEATMAPS, heatmaps[:MOST_HEATMAPS]
    settings = settings or DetectorSettings()
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    files = resources(__name__)
    parts = inlined(styles=[files / "report.css"], scripts=[files / "heatmap.js", files / "report.js"])
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    template = environment.from_string(
        files.joinpath("report.html").read_text("utf-8"),
        {name: Markup(part) for name, part in parts.items()}
        | {
            "title": title,
            "subtitle": f"as of {now}",
            "colour": colour,
            "summaries": tables.summary_tables([log.summary() for log in logs]),
            "lineages": tables.lineage_tables(logs),
            "interventions": tables.interventions_table(logs),
            "first_run": logs[0].name,
            "comparison": tables.comparison_table(logs),
            "limits": tables.limits(settings),
            "verdicts": tables.verdict_table(logs, settings),
            "spikes": tables.spikes_table(logs),
            "heatmaps": [f"{each.run}: {TITLES[each.name]} of each parameter" for each in heatmaps],
            "more_heatmaps": more,
            "headers": [
                (log.name, json.dumps(to_json(log.header), indent=2, ensure_ascii=False)) for log in logs if log.header
            ],
        },
    )
    points = POINTS
    while points >= 100:
        page = template.render(data=payload(logs, heatmaps, points))
        if len(page.encode()) <= MOST_BYTES:
            return page
        points //= 4
    raise ConfigurationError(f"{len(logs)} runs do not fit into a report of 5 MB; pass fewer runs")


def _heatmaps(logs: Sequence[TrainingLog]) -> Iterator[ParameterSeries]:
    for log in logs:
        for metric in WHERE:
            try:
                series = log.parameters(metric)
            except NotFound:
                continue
            if series.values.size:
                yield series
