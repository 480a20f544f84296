"""MemorySaves: the run's newest state in shared memory, beside its checkpoints on disk.

A checkpoint in memory serves one purpose: a leg resumes from it if it is newer than every valid one on disk. Whatever
else selects a checkpoint (a path, retention, a rollback, the best model) sees those on disk only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dalsegno.checkpoint import Checkpoint, CheckpointManager, MemoryCheckpoints
from dalsegno.checkpoint.format import memory_dir
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.logs import RunFile

from .contents import CheckpointContents
from .parts import RunParts


class MemorySaves:
    """All ranks call every method.

    Args:
        run_file: its last leg names the run's directory in shared memory.
    """

    def __init__(
        self, parts: RunParts, contents: CheckpointContents, manager: CheckpointManager, run_file: RunFile
    ) -> None:
        self._parts = parts
        self._contents = contents
        self._manager = manager
        self._run_file = run_file
        self.checkpoints = MemoryCheckpoints(parts.args.directory, parts.layout)

    def newest(self, after: int) -> Checkpoint | None:
        """The newest checkpoint in memory that verifies, of a step greater than ``after``; None if there is none."""
        return self.checkpoints.find(collectives.from_rank_zero(self._candidates), after=after)

    def _candidates(self) -> dict[str, int | None]:
        """The directory of the last leg; and the checkpoint in memory that it resumed from, as long as it has none and
        is not rolled back. What a leg gave up may still be in the memory of a host that was away then."""
        last = self._run_file.last_leg()
        candidates: dict[str, int | None] = {}
        if last is None or last.reason == "aborted":
            return candidates
        if last.from_checkpoint is not None and not last.rollbacks:
            former = memory_dir.name_of(Path(last.from_checkpoint))
            if former is not None:
                candidates[former] = last.first_step
        if last.memory is not None:
            candidates[last.memory] = None
        return candidates

    def begin_leg(self) -> None:
        """Free what no leg resumes from any more; make room, if this leg saves in memory.

        Raises:
            ConfigurationError: on all ranks, if the state does not fit into memory.
        """
        when = self._parts.args.saving_in_memory
        self.checkpoints.begin_leg(
            self._contents.sharded(), saving=bool(when), copies=when.copies, base=self._manager.base
        )

    def prepare(self) -> None:
        """Reserve the memory. To be called after the first step, when the optimizer has its state.

        Raises:
            ConfigurationError: on all ranks, if the state does not fit into memory.
        """
        self.checkpoints.prepare(self._contents.sharded())

    def capture(self, step: int, *, metrics: Mapping[str, float]) -> None:
        """Copy every state into shared memory, for :meth:`MemoryCheckpoints.publish`.

        Raises:
            CannotSave: on all ranks, if a state contains what cannot be saved, or their models differ.
            SaveFailed: if the save before is stuck.
        """
        parts = self._parts
        self._contents.expect_equal_ranks()
        self.checkpoints.capture(
            step,
            self._contents.sharded(),
            self._contents.components(),
            self._manager.carried,
            metrics=metrics,
            is_finite=not parts.metrics.is_broken() or are_finite(parts.model),
        )
