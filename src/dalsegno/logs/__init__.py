"""Logs: one record per line, rewound on resume to the checkpoint's position. Does not import torch.

The names are imported lazily, so that reading a log does not import the writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .event_files import EventPosition as EventPosition
    from .legs import Leg as Leg
    from .legs import RunFile as RunFile
    from .legs import RunRecord as RunRecord
    from .previous_leg import PreviousLeg as PreviousLeg
    from .reader import ReadReport as ReadReport
    from .reader import read_records as read_records
    from .rewind import Position as Position
    from .rewind import RewindReport as RewindReport
    from .wall_clock import drop_wall_clock as drop_wall_clock
    from .wall_clock import is_wall_clock as is_wall_clock
    from .writer import RecordLog as RecordLog

_HOMES = {
    "wall_clock": ("is_wall_clock", "drop_wall_clock"),
    "event_files": ("EventPosition",),
    "legs": ("Leg", "RunFile", "RunRecord"),
    "previous_leg": ("PreviousLeg",),
    "reader": ("ReadReport", "read_records"),
    "rewind": ("Position", "RewindReport"),
    "writer": ("RecordLog",),
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
