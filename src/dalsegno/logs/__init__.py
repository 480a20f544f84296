"""Logs: one record per line, rewound on resume to the checkpoint's position. Does not import torch.

The names are imported lazily, so that reading a log does not import the writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .event_files import EventPosition
    from .legs import Leg, RunFile, RunRecord
    from .previous_leg import PreviousLeg
    from .reader import ReadReport, read_records
    from .rewind import Position, RewindReport
    from .wall_clock import drop_wall_clock, is_wall_clock
    from .writer import RecordLog

_HOMES = {
    "wall_clock": ("is_wall_clock", "drop_wall_clock"),
    "event_files": ("EventPosition",),
    "legs": ("Leg", "RunFile", "RunRecord"),
    "previous_leg": ("PreviousLeg",),
    "reader": ("ReadReport", "read_records"),
    "rewind": ("Position", "RewindReport"),
    "writer": ("RecordLog",),
}

__all__ = [
    "EventPosition",
    "Leg",
    "Position",
    "PreviousLeg",
    "ReadReport",
    "RecordLog",
    "RewindReport",
    "RunFile",
    "RunRecord",
    "drop_wall_clock",
    "is_wall_clock",
    "read_records",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
