"""Left entries: sends what waits in the outboxes of a run that no process trains, say after its last leg."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import NotFound, StateMismatch, UnknownName
from dalsegno.logs import RunFile
from dalsegno.system.lock import DirectoryLock

from .connection import Connection, read_connection
from .entries import Status
from .mlflow_logger import MLflowTracker
from .outbox import OUTBOX, OUTBOXES, Outbox
from .sender import Sender
from .tracker import Tracker
from .tracker_logger import status_of
from .wandb_logger import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}


@dataclass(frozen=True, slots=True)
class Sent:
    logger: str
    """The callback's key."""
    sent: int
    """Number of entries that the tracker has accepted now, or had accepted before."""
    waiting: int
    """Number of entries that it has not accepted."""
    error: str | None = None
    """Why nothing was sent."""


def send_left_entries(output_dir: Path, wait_s: float) -> list[Sent]:
    """Send what waits in each outbox of the run. Entries that the tracker has are not sent twice.

    Args:
        output_dir: of the run.
        wait_s: seconds that each tracker has.

    Raises:
        NotFound: if the run has no outbox.
        Locked: if a process trains the run.
    """
    output_dir = output_dir.absolute()  # the working directory changes below
    outboxes = sorted((output_dir / "logs" / OUTBOXES).glob(f"*/{OUTBOX}"))
    if not outboxes:
        raise NotFound(f"{output_dir}: not a run with a tracker's logger: it has no logs/{OUTBOXES}/*/{OUTBOX}")
    with DirectoryLock(output_dir):
        leg = RunFile(output_dir).last_leg()
        status = status_of(None if leg is None else leg.reason)
        return [_send(path.parent, output_dir / "logs", status, wait_s) for path in outboxes]


def _send(directory: Path, logs: Path, status: Status, wait_s: float) -> Sent:
    waiting = 0
    try:
        with closing(Outbox(directory)) as outbox:
            waiting = outbox.waiting()
            if waiting:
                connection = read_connection(directory, logs, TRACKERS)
                with connection.in_force():
                    Sender(directory.name, _tracker(connection), outbox, lambda: connection.run).close(status, wait_s)
            return Sent(directory.name, waiting - outbox.waiting(), outbox.waiting())
    except (NotFound, StateMismatch, UnknownName, OSError) as error:
        return Sent(directory.name, 0, waiting, str(error))


def _tracker(connection: Connection) -> Tracker:
    try:
        return TRACKERS[connection.tracker](**connection.arguments)
    except TypeError as error:
        raise StateMismatch(f"tracker.json does not fit this version of dalsegno: {error}") from error
