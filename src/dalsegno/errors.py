"""Every error that dalsegno raises by itself. Each is also the builtin that fits, so both can be caught.

::

    DalsegnoError
    ├── ConfigurationError (ValueError)        an argument has a value that cannot work
    │   ├── UnknownName (TypeError)            a name nobody knows; the message names the nearest known one
    │   ├── UnknownDialect (TypeError)         an object that is no callback of any known kind
    │   └── DuplicateKey                       two callbacks would save under one key
    ├── EmptyDataset (ValueError)              there is not a single batch to train on
    ├── CannotSave (TypeError)                 a state holds something the codec does not take; says where
    ├── SaveFailed (OSError)                   a checkpoint did not get to the disk; older ones are as they were
    ├── StateMismatch (ValueError)             a saved state does not fit the object it is for
    │   └── DamagedRunFile                     run.json is not what any dalsegno has written
    ├── NotFound (FileNotFoundError)           a checkpoint, run or log is not there
    ├── DamagedCheckpoint (OSError)            a checkpoint's bytes are not the ones its manifest names
    ├── Locked (BlockingIOError)               another live run holds this output_dir
    ├── EventNotFired (TypeError)              a callback needs an event that this loop cannot fire
    ├── RankFailed (RuntimeError)              a rank ended with an error, or was killed
    └── RanksApart (RuntimeError)              the ranks are not at the same collective; names both places
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class DalsegnoError(Exception):
    """The root of the tree."""


class ConfigurationError(DalsegnoError, ValueError):
    """An argument has a value that cannot work. The message names it, its value and what is allowed."""


class UnknownName(ConfigurationError, TypeError):
    """A name nobody knows: an argument, an event, a callback's key."""

    def __init__(self, what: str, name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> None:
        """``meant``: other words for known names, such as those of other libraries."""
        known = sorted(known)
        near = [meant[name]] if meant and name in meant else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class UnknownDialect(ConfigurationError, TypeError):
    """An object that is no callback of this library, nor of one whose dialect is known."""


class DuplicateKey(ConfigurationError):
    """Two callbacks would save their state under one key."""


class EmptyDataset(DalsegnoError, ValueError):
    """There is not a single batch to train on."""


class CannotSave(DalsegnoError, TypeError):
    """A state holds something that the codec does not take; the message names component and path."""


class SaveFailed(DalsegnoError, OSError):
    """A checkpoint did not get to the disk; the message says why, and on which rank. Older ones are as they were."""


class StateMismatch(DalsegnoError, ValueError):
    """A saved state does not fit the object that it is for."""


class DamagedRunFile(StateMismatch):
    """``run.json`` is not what any dalsegno has written. The next leg moves it aside and begins another one."""


class NotFound(DalsegnoError, FileNotFoundError):
    """A checkpoint, a run or a log is not where it was looked for."""


class DamagedCheckpoint(DalsegnoError, OSError):
    """A checkpoint's bytes are not the ones that its manifest names."""


class Locked(DalsegnoError, BlockingIOError):
    """Another live run holds this ``output_dir``; the message names host, process and since when."""


class EventNotFired(DalsegnoError, TypeError):
    """A callback handles an event that the loop around :class:`dalsegno.Run` cannot fire."""


class RankFailed(DalsegnoError, RuntimeError):
    """A rank of a multi-process run ended with an error, or was killed by a signal."""


class RanksApart(DalsegnoError, RuntimeError):
    """The ranks are not at the same collective: one was left out, or called, on some of them only."""
