"""Archive of abandoned timelines: going back or starting over moves files into ``rewound/`` and deletes nothing."""

from __future__ import annotations

from pathlib import Path

from . import filesystem


def new_archive_dir(output_dir: Path) -> Path:
    """Return an unused path for an abandoned timeline, ``rewound/timeline.0001`` and so on. Does not create it."""
    return filesystem.numbered(output_dir / "rewound", "timeline")


def archive_run(output_dir: Path) -> Path | None:
    """Move the whole run in ``output_dir`` into an archive. Returns its new path; None if there is no run.

    The checkpoints are moved first, by one rename. A kill before that leaves the run unchanged; a kill after it leaves
    a run without checkpoints, whose logs the next start archives like those of any run killed before its first save.
    """
    names = ("checkpoints", "recoveries.jsonl", "control.jsonl", "logs", "run.json", "config.json")
    leftovers = [output_dir / name for name in names]
    leftovers = [path for path in leftovers if path.exists()]
    if not leftovers:
        return None
    place = new_archive_dir(output_dir)
    filesystem.make_directory(place)
    for path in leftovers:
        filesystem.rename(path, place / path.name)
    filesystem.fsync_directory(output_dir)
    return place
