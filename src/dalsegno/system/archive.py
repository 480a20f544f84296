"""Archive of abandoned timelines: going back or starting over moves files into ``rewound/`` and deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import filesystem


def new_archive_dir(output_dir: Path) -> Path:
    """Return an unused path for an abandoned timeline, ``rewound/timeline.0001`` and so on. Does not create it."""
    return filesystem.numbered(output_dir / "rewound", "timeline")


def run_files(output_dir: Path) -> list[Path]:
    """What the run in ``output_dir`` consists of: files and directories; nothing if there is no run."""
    names = ("checkpoints", "recoveries.jsonl", "control.jsonl", "logs", "witness", "run.json", "config.json")
    return [path for name in names if (path := output_dir / name).exists()]


def archive_run(files: Iterable[Path], place: Path) -> None:
    """Move a run into an archive, one file after another. If the process is killed meanwhile, call it again."""
    for path in files:
        filesystem.make_directory(place)
        filesystem.rename(path, place / path.name)
        filesystem.fsync_directory(path.parent)
