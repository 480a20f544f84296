"""Logs: one record per line, rewound on resume to the checkpoint's position. Does not import torch.

The names are imported lazily, so that reading a log does not import the writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from dalsegno.logs.run_file import Leg as Leg
    from dalsegno.logs.run_file import PreviousLeg as PreviousLeg
    from dalsegno.logs.run_file import RunFile as RunFile
    from dalsegno.logs.run_file import RunRecord as RunRecord
    from dalsegno.logs.values import drop_wall_clock as drop_wall_clock
    from dalsegno.logs.values import is_wall_clock as is_wall_clock

    from .event_files import EventPosition as EventPosition
    from .reader import ReadReport as ReadReport
    from .reader import read_records as read_records
    from .rewind import Position as Position
    from .rewind import RewindReport as RewindReport
    from .writer import RecordLog as RecordLog
else:
    __getattr__, __dir__ = lazy_exports(__name__)
