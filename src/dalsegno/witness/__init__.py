"""Witness: what each step had as input and what came out, so that a resumed leg can prove that it repeats its steps."""

from __future__ import annotations

from .rows import WITNESS as WITNESS
from .unsaved import Unsaved as Unsaved
from .witness import OnResume as OnResume
from .witness import Witness as Witness
