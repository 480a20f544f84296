"""One timeline: what a run leaves behind when it goes back, or starts over, is moved into ``rewound/``, not deleted."""

from __future__ import annotations

from pathlib import Path

from . import filesystem


def new_archive_dir(output_dir: Path) -> Path:
    """A new, empty place for a timeline that is left: ``rewound/timeline.0001`` and so on. It is not created yet."""
    return filesystem.numbered(output_dir / "rewound", "timeline")


def archive_run(output_dir: Path) -> Path | None:
    """Move the whole run in ``output_dir`` out of the way. Where it is now; None if there was none.

    Checkpoints go first, at once: a kill before leaves the run as it was, and one after it a run without checkpoints,
    whose logs are then moved away as those of any run that was killed before its first one.
    """
    leftovers = [output_dir / name for name in ("checkpoints", "logs", "run.json", "config.json")]
    leftovers = [path for path in leftovers if path.exists()]
    if not leftovers:
        return None
    place = new_archive_dir(output_dir)
    filesystem.make_directory(place)
    for path in leftovers:
        filesystem.rename(path, place / path.name)
    filesystem.fsync_directory(output_dir)
    return place
