"""Private files: state trees in files that only the user can read, in the checkpoint's codec."""

from __future__ import annotations

import json
import os
from pathlib import Path

import safetensors.torch
import torch

from dalsegno.checkpoint.codec import decode, encode
from dalsegno.errors import DamagedCheckpoint
from dalsegno.stateful.component import State


def write_private(path: Path, tree: State) -> None:
    """Write ``tree`` as ``path`` and, if it has tensors, a file of tensors beside it. Replaces neither atomically."""
    content, arrays = encode(tree, path.stem)
    _write(path, json.dumps(content, allow_nan=False).encode())
    whole = {name: each.contiguous().cpu().clone() for name, each in arrays.items()}
    _write(_tensors(path), safetensors.torch.save(whole))


def read_private(path: Path) -> State:
    """Read what :func:`write_private` wrote.

    Raises:
        FileNotFoundError: if nothing was.
    """
    content = json.loads(path.read_bytes())
    stored = safetensors.torch.load(_tensors(path).read_bytes())

    def read_array(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        found = stored.get(name)
        if found is None or found.dtype != dtype or list(found.shape) != shape:
            raise DamagedCheckpoint(f"{path}: the tensor {name!r} is missing")
        return found

    return decode(content, read_array, path.stem)


def _tensors(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
