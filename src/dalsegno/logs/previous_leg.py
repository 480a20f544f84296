"""PreviousLeg: why the leg before this one ended, as its launcher found out.

A killed process cannot record its end. The launcher that restarts it passes what it knows in the environment of the
next leg, which writes it into ``run.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

_VARIABLE = "DALSEGNO_PREVIOUS_LEG"


@dataclass(frozen=True, slots=True)
class PreviousLeg:
    """The end of a leg, identified by the process of its rank 0."""

    host: str
    pid: int
    cause: str
    """In words: ``rank 1 was killed by SIGKILL``."""

    def is_end_of(self, host: str, pid: int) -> bool:
        """Whether it is about the leg of this process."""
        return (self.host, self.pid) == (host, pid)

    def to_environment(self) -> dict[str, str]:
        """The environment variable for the processes of the next leg."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None without a launcher, in the first leg of a launch, or if the variable has another content."""
        try:
            return cls(**json.loads(environment[_VARIABLE]))
        except (KeyError, ValueError, TypeError):
            return None
