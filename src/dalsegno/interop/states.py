"""Where the states of callbacks are stored with another library's checkpoints, in the format of dalsegno's own.

Inside a checkpoint that is a directory, they are a folder, which appears by a rename::

    checkpoint-500/            the library's: model, optimizer, its own state
      dalsegno/                manifest.json, shared.json, …

A checkpoint that is one dict has them inside, as the bytes of each file: so neither is ever saved without the other.
Then the folder of states exists only while it is packed or unpacked, in ``output_dir/.dalsegno``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch

from dalsegno.checkpoint import names
from dalsegno.data.loader import sample_count
from dalsegno.data.step_batch import tokens_in
from dalsegno.distributed import collectives
from dalsegno.errors import DamagedCheckpoint, StateMismatch
from dalsegno.state import TrainerState
from dalsegno.stateful.schema import Count
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

FOLDER = "dalsegno"
"""Folder of the callbacks' states inside a checkpoint of the library."""


def states_in(checkpoint: Path, *, mark: str | None = None) -> Path | None:
    """The folder of states in the library's checkpoint; None if it was saved without a Bridge. Collective. ``mark``:
    where in the library's own files it is written that a Bridge took part; None if it is not, or cannot be."""
    folder = checkpoint / FOLDER
    if collectives.from_rank_zero(folder.exists):
        return folder
    earlier = collectives.from_rank_zero(lambda: _newest_with_states(checkpoint))
    if earlier is not None:
        raise DamagedCheckpoint(
            f"{checkpoint}: contains no states of callbacks, although {earlier} does; probably the job was killed "
            f"while it saved {checkpoint.name}. Delete {checkpoint.name}, and resume from {earlier.name}. To resume "
            f"here nevertheless, with new states, delete {earlier.name}/{FOLDER}"
        )
    if mark is not None:
        raise DamagedCheckpoint(
            f"{checkpoint}: contains no states of callbacks, although a Bridge took part; probably the job was killed "
            f"while it saved {checkpoint.name}. Delete {checkpoint.name}, and start again: it is the first checkpoint. "
            f"To resume here nevertheless, with new states, delete {mark}"
        )
    warn_of_new_states(str(checkpoint))
    return None


def warn_of_new_states(checkpoint: str) -> None:
    if collectives.rank() == 0:
        logger.warning(
            "%s was saved without a Bridge: training resumes, but the states and logs of callbacks begin anew",
            checkpoint,
        )


def remove_states(folder: Path) -> None:
    """Remove the states of an abandoned timeline, whose checkpoint the library has overwritten, in one operation."""
    if folder.exists():
        hidden = names.partial_path(folder)
        filesystem.remove(hidden)
        filesystem.rename(folder, hidden)
        filesystem.remove(hidden)


def _newest_with_states(checkpoint: Path) -> Path | None:
    """The newest other checkpoint in the same directory that was written before and has states of callbacks."""
    written = checkpoint.stat().st_mtime_ns
    others = [path.parent for path in checkpoint.parent.glob(f"*/{FOLDER}") if path.parent != checkpoint]
    earlier = {path: path.stat().st_mtime_ns for path in others if path.stat().st_mtime_ns <= written}
    return max(earlier, key=earlier.__getitem__, default=None)


Packed = Mapping[str, torch.Tensor]
"""Files of a folder of states: the bytes of each, by its path."""


def pack(folder: Path) -> Packed:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {path.relative_to(folder).as_posix(): bytearray(path.read_bytes()) for path in files}
    return {name: torch.from_numpy(np.frombuffer(content, dtype=np.uint8)) for name, content in contents.items()}


def unpack(packed: Packed, folder: Path) -> None:
    """Write the files of a folder of states. Their names and contents are verified when the states are restored."""
    for name, content in packed.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DamagedCheckpoint(f"states of callbacks: {name!r} is not a file name that they can have")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.cpu().numpy().tobytes())


class ProgressState(TypedDict):
    epochs_begun: Count
    epochs_ended: Count
    timeline: str
    run: str
    samples: NotRequired[Count]
    tokens: NotRequired[Count]


class Progress:
    """Epoch events that have fired, a fingerprint of the library's own history, which distinguishes timelines, a name
    that distinguishes runs, and the samples and tokens that were read on all ranks, if the Bridge sees batches."""

    state_schema = ProgressState
    state_compared = False  # records, of which the fingerprint is made, contain times of each rank's clock

    def __init__(self, samples_after: Callable[[int], int] | None) -> None:
        """``samples_after``: how many samples a number of steps has read, on all ranks; None: batches are counted."""
        self.epochs_begun = self.epochs_ended = 0
        self.timeline = self.run = ""
        self.samples = self.tokens = 0  # on all ranks, when they were summed
        self._samples_after = samples_after
        self._of_step, self._unsummed = np.zeros(2), np.zeros(2)  # samples and tokens that this rank has read
        self._sees_batches = False

    def begin_step(self) -> None:
        self._of_step = np.zeros(2)

    def add_batch(self, batch: Any) -> None:
        self._sees_batches = True
        self._of_step += sample_count(batch), tokens_in(batch)

    def end_step(self, state: TrainerState) -> None:
        self._unsummed += self._of_step
        self.show(state)

    def sum_ranks(self, state: TrainerState) -> None:
        """Make the counts exact. Collective."""
        if self._sees_batches:
            samples, tokens = collectives.sum_floats(self._unsummed.tolist(), "samples and tokens")
            self.samples, self.tokens = self.samples + int(samples), self.tokens + int(tokens)
            self._unsummed = np.zeros(2)
            self.show(state)

    def show(self, state: TrainerState) -> None:
        """Since the counts were summed, this rank stands for the others."""
        samples, tokens = (int(each) * collectives.world_size() for each in self._unsummed)
        after = self._samples_after
        state.samples_seen = self.samples + samples if after is None else after(state.global_step)
        if self._sees_batches or self.tokens:
            state.num_input_tokens_seen = self.tokens + tokens

    def check_state(self, state: ProgressState) -> None:
        if state["timeline"] != self.timeline:
            raise StateMismatch(
                "these callback states were saved with a different checkpoint than the one from which training "
                "resumes: its history differs. Either that is in another folder (then pass the Bridge its path: "
                "resume_from_checkpoint=), or the job was killed while it overwrote this checkpoint (then resume from "
                "an earlier one)"
            )

    def state_dict(self) -> ProgressState:
        return cast(ProgressState, {name: getattr(self, name) for name in ProgressState.__annotations__})

    def load_state_dict(self, state: ProgressState) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def samples_of_steps(loader: Any, batch: int, accumulated: int) -> Callable[[int], int]:
    """Return how many samples the first steps have read, by the length of a loader that Accelerate has prepared.

    ``batch``: samples of a full batch on all ranks, of which a step reads ``accumulated``. An epoch's last batch has
    fewer, but not on several ranks, where Accelerate fills it. All count as full if the loader has no length.
    """
    try:
        batches = len(loader)
        read = len(getattr(loader.batch_sampler, "sampler", loader.dataset))
    except (TypeError, AttributeError):
        return lambda steps: steps * accumulated * batch
    is_filled = collectives.world_size() > 1 and getattr(loader.batch_sampler, "even_batches", True)
    of_epoch = batches * batch if is_filled else min(read, batches * batch)
    steps_per_epoch = max(-(-batches // accumulated), 1)

    def count(steps: int) -> int:
        epochs, rest = divmod(steps, steps_per_epoch)
        return epochs * of_epoch + min(rest * accumulated * batch, of_epoch)

    return count
