"""The errors that dalsegno raises. Each is also the builtin that fits, so callers can catch either."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence


class DalsegnoError(Exception):
    """Root of the tree."""


class ConfigurationError(DalsegnoError, ValueError):
    """An argument has a value that cannot work. The message names the argument, its value and the allowed values."""


class UnknownName(ConfigurationError, TypeError):
    """An unknown name of an argument, an event or a callback's key."""

    def __init__(self, what: str, name: str, known: Iterable[str], answers: Mapping[str, str] | None = None) -> None:
        """``answers`` maps other words, such as those of other libraries, to known names or to advice."""
        known = sorted(map(str, known))
        answer = (answers or {}).get(str(name)) or nearest(str(name), known)
        if answer is None:
            answer = f"known: {', '.join(known) or 'none'}"
        elif answer in known:
            answer = f"did you mean {answer!r}?"
        super().__init__(f"unknown {what} {name!r}; {answer}")


def expect_known(
    what: str, names: Iterable[str], known: Collection[str], answers: Mapping[str, str] | None = None
) -> None:
    """Raises UnknownName for the first of ``names`` that is not ``known``."""
    for name in names:
        if name not in [*known]:
            raise UnknownName(what, name, known, answers)


def nearest(name: str, known: list[str]) -> str | None:
    """The most similar name, else the shortest that begins with ``name`` or whose last word does; None for none.

    Half of the letters of two long names are often the same by chance; of three letters one may be wrong.
    """
    if same := [each for each in known if each.lower() == name.lower()]:
        return same[0]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75 if len(name) > 4 else 0.65)
    longer = [each for each in known if each.startswith(name) or each.rpartition("_")[2].startswith(name)]
    return next(iter(similar or sorted(longer, key=len)), None)


def no_attribute(
    owner: object, name: str, places: Mapping[str, Iterable[str]], advice: str | None = None
) -> AttributeError:
    """An error that says what to use: ``advice``, or what has this name or a similar one. ``places``: names by the
    expression of which they are attributes."""
    known = {each: place for place in reversed([*places]) for each in places[place] if not each.startswith("_")}
    ends = sorted((each for each in known if each.endswith(f"_{name}")), key=len)
    found = None if name.startswith("_") else name if name in known else next(iter(ends), nearest(name, [*known]))
    if advice is None and found is not None:
        advice = f"{known[found]}.{found}"
    use = "" if advice is None else f"; use {advice}" if found in (None, name) else f"; did you mean {advice}?"
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{use}", name=name, obj=owner)


def first_few(names: Sequence[str], most: int = 1) -> str:
    """The first of the names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


class UnknownDialect(ConfigurationError, TypeError):
    """An object is not a callback of dalsegno, nor of a library whose dialect is known."""


class DuplicateKey(ConfigurationError):
    """Two callbacks would save their state under the same key."""


class EmptyDataset(DalsegnoError, ValueError):
    """The training data contains no batch."""


class CannotSave(DalsegnoError, TypeError):
    """A state contains a value that the codec does not support; the message names the component and the path."""


class SaveFailed(DalsegnoError, OSError):
    """A checkpoint could not be written; the message gives the reason and the rank. Older ones are unchanged."""


class StateMismatch(DalsegnoError, ValueError):
    """A saved state does not fit the object that loads it."""


class DamagedRunFile(StateMismatch):
    """``run.json`` was not written by any version of dalsegno. The next leg moves it aside and starts a new one."""


class NotFound(DalsegnoError, FileNotFoundError):
    """A checkpoint, a run or a log does not exist at the given place."""


class DamagedCheckpoint(DalsegnoError, OSError):
    """A checkpoint's bytes differ from those that its manifest lists."""


class Locked(DalsegnoError, BlockingIOError):
    """Another live run uses this ``output_dir``; the message names its host, process and start time."""


class LeaseLost(Locked):
    """Another process took this run over, or its directory was moved; it ended here without another write there."""


class NotRunning(DalsegnoError, RuntimeError):
    """No leg is running that could carry out a command, or it has decided to end."""


class EventNotFired(DalsegnoError, TypeError):
    """A callback handles an event that a hand-written loop, or another library's trainer, cannot fire."""


class NotSupported(DalsegnoError, NotImplementedError):
    """This operating system lacks something that the call needs; the message names the systems that have it."""


class RankFailed(DalsegnoError, RuntimeError):
    """A rank of a multi-process run failed, or was killed by a signal."""


class RanksApart(DalsegnoError, RuntimeError):
    """The ranks are not at the same collective: only some of them called it."""
