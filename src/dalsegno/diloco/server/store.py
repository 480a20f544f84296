"""ServerStore: what a DiLoCo server keeps on disk.

::

    FOLDER/
      checkpoints/step-00000012/           global parameters, outer optimizer, state; the step is the version
      logs/train.jsonl                     a record of each outer step
      diloco/journal.jsonl                 events after the newest checkpoint, and before it a few
      diloco/submissions/w0-00000012.safetensors
      diloco/versions/00000012-all.frame   parameters as workers fetch them: all,
      diloco/versions/00000012-3.frame     or those of a fragment

Once a checkpoint contains a submission, and once no worker may ask for a version again, its file is overwritten by the
next one: see :mod:`.files`.

An outer step waits neither for the disk nor for the journal: the submissions reach the disk meanwhile. Nothing that
depends on an event may leave the server before it is committed. After a kill or a power cut, the committed events lead
to a state beyond which no worker is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from dalsegno.checkpoint import Checkpoint, CheckpointManager, ModelState, OptimizerState, saved_states
from dalsegno.checkpoint.index import Index
from dalsegno.checkpoint.listing import newest_verified
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.tensor_files import StoredFile
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.checkpoint.weights import Weights, naming_hint, weights_are_at
from dalsegno.diloco.server.rounds import Event, ServerState, event_from_json
from dalsegno.diloco.wire.messages import FrameReader, Submission
from dalsegno.diloco.wire.signature import GROUP, Specs, TensorSpec, dequantize, element_count, file_layout
from dalsegno.errors import NotRunning, SaveFailed, StateMismatch
from dalsegno.logs import RecordLog, read_records
from dalsegno.logs.line_file import LineFile
from dalsegno.logs.values import decode
from dalsegno.policies.retention import Latest
from dalsegno.stateful import schema
from dalsegno.stateful.component import Component
from dalsegno.system import filesystem

from .files import SpareFiles, SpooledTensors, Versions, spooled
from .outer import ALONE, BLOCK, GlobalModel, MakeOptimizer

logger = logging.getLogger("dalsegno")

_STATE, _LOG = "diloco", "log"  # keys of components


@dataclass(frozen=True, slots=True)
class _Recorded:
    number: int
    event: Event
    make_durable: Callable[[], object] | None


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    batch: int
    """Number of the first event that was committed with this one."""
    event: Event


class Journal:
    """The events at ``path``, with their numbers. :meth:`record` is called on one thread at a time, all others on
    any."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, _parse)
        self._recorded: list[_Recorded] = []  # but not committed
        self._is_closed = False
        self._turn = threading.Lock()  # of the threads that change the file

    def record(self, event: Event, number: int, make_durable: Callable[[], object] | None = None) -> None:
        """Take the next event. ``make_durable``: called before the event is written; what the event refers to is on
        disk when it returns."""
        self._recorded.append(_Recorded(number, event, make_durable))

    def commit(self) -> None:
        """Write all events that are recorded. They are on disk when this returns, whichever thread has written them.

        Raises OSError if the disk refuses it: the next commit tries again. Raises NotDurable, at each later commit too,
        if the disk has lost what an event refers to, or may lose this file. Raises NotRunning if the journal is closed.
        """
        with self._turn:
            recorded = self._recorded[:]
            if recorded and self._is_closed:
                raise NotRunning("the server has stopped; start it again, it continues")
            for each in recorded:
                if each.make_durable is not None:
                    each.make_durable()
            if recorded:
                self._file.append(_lines(recorded[0].number, (each.event for each in recorded)))
            del self._recorded[: len(recorded)]

    def recover(self, number: int) -> list[Event]:
        """As :meth:`after`, at the start of a server: remove before what a power cut has left of the last commit."""
        with self._turn:
            self._remove_torn_batch(number)
            return self.after(number)

    def after(self, number: int) -> list[Event]:
        """The committed events after this number. Raises StateMismatch if the journal is damaged, has no event that
        follows on this number, or two events of one number."""
        events = []
        expected = number + 1
        seen: dict[int, Event] = {}  # the same batch is here twice if its first write could not be undone
        for line in self._file.read(strict=True):
            if seen.setdefault(line.number, line.event) != line.event:
                raise StateMismatch(f"{self._file.path}: event {line.number} is there twice, with different content")
            if line.number < expected:
                continue
            if line.number > expected:
                raise StateMismatch(f"{self._file.path}: event {expected} is missing")
            expected += 1
            events.append(line.event)
        return events

    def _remove_torn_batch(self, number: int) -> None:
        """Remove the end of the file from its first hole on, if all of it can be of one batch, of which nothing was
        acknowledged.

        The pages of an append reach the disk in any order: after a power cut, one that did not is a hole, of NULs, also
        before others that did. No line has a NUL. What is on disk from an earlier commit is not affected.
        """
        path = self._file.path
        data = path.read_bytes() if path.exists() else b""
        if b"\0" not in data:
            return
        begin = data.rfind(b"\n", 0, data.index(b"\0")) + 1
        last = max((line.number for line in _readable(data[:begin])), default=number)
        batches = {line.batch for line in _readable(data[begin:])}
        if len(batches) > 1 or any(batch > last + 1 for batch in batches):
            return  # a damaged event was followed by a later commit
        removed = filesystem.numbered(path.parent, f"{path.name}.torn")
        filesystem.replace_durably(removed, data[begin:])
        filesystem.replace_durably(path, data[:begin])
        logger.warning(
            "%s: what a power cut left of the last commit, which acknowledged nothing, is moved to %s",
            path,
            removed.name,
        )

    def shorten(self, number: int) -> None:
        """Drop the events up to this number, which are committed. Raises OSError if the disk refuses it, and nothing is
        dropped; NotDurable, as each later commit does, if the disk may lose this file."""
        with self._turn:
            self._file.replace(_lines(number + 1, self.after(number)))

    def clear(self) -> None:
        with self._turn:
            self._file.replace(())

    def close(self) -> None:
        """Write no more: from now on the file may be another server's. What is not committed is lost."""
        with self._turn:
            self._is_closed = True


def _lines(first: int, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Lines that are written together."""
    for number, event in enumerate(events, first):
        yield {"event": number, "batch": first, **asdict(event)}


def _parse(text: bytes) -> _Line:
    content = decode(text)
    if not isinstance(content, dict) or any(type(content.get(name)) is not int for name in ("event", "batch")):
        raise ValueError(f"not an event: {text[:80]!r}")
    return _Line(content.pop("event"), content.pop("batch"), event_from_json(content))


def _readable(data: bytes) -> Iterator[_Line]:
    for text in data.split(b"\n"):
        with suppress(ValueError, StateMismatch):
            yield _parse(text)


@dataclass(slots=True)
class Globals:
    """The global parameters and their optimizer."""

    model: GlobalModel
    optimizer: Optimizer

    @classmethod
    def of(cls, specs: Specs, make_optimizer: MakeOptimizer) -> Globals:
        model = GlobalModel(specs)
        return cls(model, make_optimizer(model.by_name.values()))


class ServerStore:
    """The files below ``folder``. Used on one thread at a time, but for :meth:`spooled`, :meth:`save`, and what
    :attr:`journal` and :attr:`versions` allow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = folder / "diloco"
        self._submissions, versions = own / "submissions", own / "versions"
        for each in (self._submissions, versions):
            filesystem.make_directory(each)
        self.journal = Journal(own / "journal.jsonl")
        self.versions = Versions(versions)
        self.unlogged: deque[dict[str, Any]] = deque()
        """Records that :meth:`write_log` appends to the log."""
        self._manager = CheckpointManager(folder, keep=Latest(2))
        self._log = RecordLog("logs/train.jsonl", folder)
        self._spare = SpareFiles(self._submissions)

    # -- start and end ----------------------------------------------------------------------------------------------

    def find(self) -> tuple[Checkpoint, ServerState] | None:
        """The newest checkpoint that verifies, and its state; None in a new folder."""
        self._manager.remove_partial()
        self._delete_spare_files()
        found = self._manager.find()
        if found is None:
            self._log.open()
            return None
        states = saved_states(found).get(_STATE)
        if states is None:
            raise StateMismatch(f"{found.path}: not a checkpoint of a DiLoCo server; use another folder")
        return found, schema.check(states[0], ServerState, "the state of a DiLoCo server")

    def load(self, found: Checkpoint, parts: Globals) -> None:
        """Restore the global parameters and the optimizer, and cut the log back to the checkpoint."""
        (position,) = saved_states(found)[_LOG]
        self._manager.load(found, self._sharded(parts), [Component(key, _Saved(None)) for key in (_STATE, _LOG)])
        self._log.open(position)

    def close(self) -> None:
        """Close the journal and the log, and delete the files that nothing refers to."""
        self.journal.close()
        self._log.close()
        self._delete_spare_files()

    def _delete_spare_files(self) -> None:
        self._spare.delete_all()
        self.versions.spare.delete_all()

    # -- records, checkpoints ---------------------------------------------------------------------------------------

    def newest_record(self) -> dict[str, Any] | None:
        """The log's record of the newest outer step."""
        newest = None
        for record in read_records(self._log.path):
            newest = newest if "kind" in record else record
        return newest

    def write_log(self) -> None:
        """Append the records to the log. Raises OSError if the disk refuses one; the next call tries again."""
        while self.unlogged:
            self._log.append(self.unlogged[0])
            self.unlogged.popleft()

    def save(self, state: ServerState, parts: Globals) -> bool:
        """Save a checkpoint, unless there is one of this version. Returns whether it was saved. Older ones, and the
        journal, remain."""
        if self._manager.path_of(state.version).exists():
            return False
        try:
            self.write_log()  # the checkpoint has its length
        except OSError as error:
            raise SaveFailed(f"no checkpoint of version {state.version}: its log cannot be written: {error}") from error
        components = [
            Component(_STATE, _Saved(asdict(state))),
            Component(_LOG, _Saved(self._log.state(), self._log.make_durable)),
        ]
        self._manager.save(state.version, self._sharded(parts), components)
        return True

    def _sharded(self, parts: Globals) -> list[ModelState | OptimizerState]:
        return [ModelState(parts.model), OptimizerState(parts.model, parts.optimizer)]

    # -- submissions ------------------------------------------------------------------------------------------------

    def spooled(self, specs: Specs, frame: FrameReader) -> AbstractContextManager[SpooledTensors]:
        return spooled(self._spare, specs, frame)

    def keep(self, arrived: SpooledTensors, submission: Submission) -> None:
        """Give a complete submission its name."""
        arrived.keep(self._submissions / submission.file_name)

    def tensors(self, submission: Submission, specs: Specs) -> TensorFile:
        return TensorFile(self._submissions / submission.file_name, submission.sent(specs))

    def release_submissions(self, *, except_for: Collection[str]) -> None:
        """Allow the files of submissions that no event needs any more to be overwritten."""
        self._spare.release(lambda path: path.name in except_for)


class Scratch:
    """Memory for the blocks that one thread reads, one at a time."""

    def __init__(self) -> None:
        self._blocks: dict[torch.dtype, torch.Tensor] = {}

    def block(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """``count`` elements, at most ``BLOCK``: the same memory each time."""
        if dtype not in self._blocks:
            self._blocks[dtype] = torch.empty(BLOCK, dtype=dtype)
        return self._blocks[dtype][:count]


class TensorFile:
    """Reads parts of tensors from a file that a frame has brought; quantized ones as float32. On any thread."""

    def __init__(self, path: Path, specs: Specs) -> None:
        self._file, layout = StoredFile(path), file_layout(specs)
        self._stored = {spec.name: (spec, span) for spec, span in zip(specs, layout.spans, strict=True)}

    def block(self, name: str, begin: int, count: int, scratch: Scratch) -> torch.Tensor:
        """``count`` elements of a tensor, flat, from ``begin`` on, a multiple of ``BLOCK``: in ``scratch``."""
        spec, span = self._stored[name]
        block = scratch.block(spec.dtype, count)
        self._file.fill(block, span, spec.dtype, (spec.count,), [(begin, count)])
        if spec.dtype != torch.int8:
            return block
        scales, values = self._scales(name, begin, count), scratch.block(torch.float32, count)
        for first in range(0, count, ALONE):
            part = block[first : first + ALONE]
            values[first : first + ALONE] = dequantize(part, scales[first // GROUP :][: -(-len(part) // GROUP)])
        return values

    def _scales(self, name: str, begin: int, count: int) -> torch.Tensor:
        """Read the scales of ``count`` elements of a quantized tensor, from ``begin`` on."""
        spec, span = self._stored[name]
        scales = torch.empty(-(-count // GROUP), dtype=torch.float32)
        first = element_count(spec.count) + begin // GROUP * scales.itemsize
        coded = scales.view(spec.dtype)
        self._file.fill(coded, span, spec.dtype, (spec.count,), [(first, len(coded))])
        return scales


class InitialWeights:
    """Weights at ``path``, with which a run may begin: a checkpoint, the newest one of a run, or safetensors of another
    program."""

    def __init__(self, path: Path) -> None:
        files = Weights.open(path) if weights_are_at(path) else newest_verified(path)
        index = files.index if isinstance(files, Weights) else Index.of_checkpoint(files)
        self._reader, self._stored = ChunkReader(files), index.of(MODEL)
        self._who = f"{path}, with which the server begins"

    def fill(self, spec: TensorSpec, parameter: torch.Tensor) -> None:
        """Read a parameter, cast if it is stored in another dtype."""
        stored = self._stored.get(spec.name)
        if stored is None:
            hint = naming_hint(self._stored, [spec.name]) or "start the server with weights of the workers' model"
            raise StateMismatch(f"{self._who}, has no {spec.name}; {hint}")
        if tuple(stored.shape) != spec.shape:
            shapes = f"{list(stored.shape)}, in the worker {list(spec.shape)}"
            raise StateMismatch(f"{self._who}: {spec.name} has the shape {shapes}")
        parameter.copy_(self._reader.full_tensor(stored))
        if not parameter.isfinite().all():
            raise StateMismatch(f"{self._who}: {spec.name} contains NaN or infinity")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state that is read before there is an object to load it into."""

    state: Any
    make_durable: Callable[[], object] | None = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None: ...
