"""Packed states: callbacks' states inside a checkpoint that is one dict, for libraries that save by ``state_dict``.

They are in one file with the library's own state, so neither is ever saved without the other. The folder of states
exists only while it is packed or unpacked, in ``output_dir/.dalsegno``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from dalsegno.distributed import collectives
from dalsegno.errors import DamagedCheckpoint
from dalsegno.system import filesystem

from .leg import Leg
from .states import remove_states, warn_of_new_states

Packed = Mapping[str, torch.Tensor]
"""Files of a folder of states: the bytes of each, by its path."""


def locate_in(directory: Path) -> Callable[[int], Path]:
    """Return where a leg writes the states of a step before they are packed."""
    return lambda step: directory / ".dalsegno" / f"states-{step}"


def save_packed(leg: Leg) -> Packed:
    """Capture the callbacks' states of this step, and pack them; equal on all ranks. Collective.

    Raises:
        CannotSave: on every rank, if a state contains what cannot be saved.
        SaveFailed: on every rank, if the states could not be written.
    """
    folder = leg.save()
    try:
        return collectives.from_rank_zero(lambda: pack(folder))
    finally:
        collectives.from_rank_zero(lambda: filesystem.remove(folder))


def begin_packed(leg: Leg, packed: Packed | None, *, saves: bool, checkpoint: str) -> None:
    """Begin the leg with these states, or with a warning if training resumes without. Collective.

    Args:
        packed: None: no states were loaded.
        saves: whether the library will save checkpoints.
        checkpoint: from which the library resumes, for the warning.

    Raises:
        DamagedCheckpoint: if the states are damaged.
        StateMismatch: before anything is loaded, if a state does not fit.
        CannotSave: if a state contains what cannot be saved.
    """
    if packed is None:
        if leg.state.global_step:
            warn_of_new_states(checkpoint)
        leg.begin(None, saves=saves)
        return
    folder = leg.args.directory / ".dalsegno" / "restored"
    collectives.from_rank_zero(lambda: remove_states(folder))
    collectives.from_rank_zero(lambda: unpack(packed, folder))
    try:
        leg.begin(folder, saves=saves)
    finally:
        collectives.from_rank_zero(lambda: filesystem.remove(folder))


def pack(folder: Path) -> Packed:
    """Read all files of a folder of states."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _as_tensor(path.read_bytes()) for path in files}


def unpack(packed: Packed, folder: Path) -> None:
    """Write the files of a folder of states. Their names and contents are verified when the states are restored.

    Raises:
        DamagedCheckpoint: if a name leads out of the folder.
    """
    for name, content in packed.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DamagedCheckpoint(f"states of callbacks: {name!r} is not a file name that they can have")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.cpu().numpy().tobytes())


def _as_tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
