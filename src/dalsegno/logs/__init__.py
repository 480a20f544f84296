"""Logs: one record a line, cut back on resume to what the checkpoint knew. Nothing here imports torch."""

from __future__ import annotations

from .clock import is_wall_clock, timeless
from .event_files import EventPosition
from .legs import Leg, RunFile, RunRecord
from .reader import ReadReport, read_records
from .rewind import Position, RewindReport
from .writer import RecordLog

__all__ = [
    "EventPosition",
    "Leg",
    "Position",
    "ReadReport",
    "RecordLog",
    "RewindReport",
    "RunFile",
    "RunRecord",
    "is_wall_clock",
    "read_records",
    "timeless",
]
