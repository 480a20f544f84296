"""Where the states of callbacks are stored with another library's checkpoints, in the format of dalsegno's own.

Inside a checkpoint that is a directory, they are a folder, which appears by a rename::

    checkpoint-500/            the library's: model, optimizer, its own state
      dalsegno/                manifest.json, shared.json, …

A checkpoint that is one dict has them inside, as the bytes of each file: so neither is ever saved without the other.
Then the folder of states exists only while it is packed or unpacked, in ``output_dir/.dalsegno``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from dalsegno.checkpoint import names
from dalsegno.distributed import collectives
from dalsegno.errors import DamagedCheckpoint
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

FOLDER = "dalsegno"
"""Folder of the callbacks' states inside a checkpoint of the library."""


def states_in(checkpoint: Path, *, mark: str | None = None) -> Path | None:
    """The folder of states in the library's checkpoint; None if it was saved without a Bridge. Collective.

    Args:
        mark: where in the library's own files it is written that a Bridge took part; None if it is not, or cannot be.
    """
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
    """Log that training resumes without states of callbacks."""
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
    """Read all files of a folder of states."""
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
