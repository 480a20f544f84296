"""Read the pickles of other programs, in a process of its own: the one place where dalsegno does. Only imports use it.

The process (``pickle_process.py``) has no network and limited memory, does not see this process's environment, and
hands over JSON and safetensors in a temporary directory. Nothing is unpickled in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.format import codec
from dalsegno.checkpoint.format.layout import StoredFile
from dalsegno.errors import NotFound, StateMismatch

from .pickle_process import CONTENT, TENSORS

_HOME = "dalsegno.checkpoint.interchange"
_ALLOWANCE = 1 << 30  # bytes, for files of any size


@dataclass(frozen=True, slots=True)
class Unpickled:
    """Content of files, by the names under which they were requested.

    Attributes:
        dropped: path and class of each part that is not plain data, such as a set.
    """

    content: Mapping[str, Any]
    dropped: Sequence[str] = ()


def tied_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Further name to first name of each tied tensor."""
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(each), name)) for name, each in state.items() if isinstance(each, torch.Tensor)]
    return {name: other for name, other in pairs if name != other}


def read(paths: Mapping[str, Path], *, program: str = "pickle_process") -> Unpickled:
    """Read files that ``torch.save`` wrote, by any name; with the program ``dcp_process``, folders of DCP.

    Raises:
        NotFound: if one does not exist.
        StateMismatch: if one contains more than tensors and plain data, or is not such a file; names what and why.
    """
    for path in paths.values():
        if not path.exists():
            raise NotFound(f"{path}: does not exist")
    if not paths:
        return Unpickled({})
    with tempfile.TemporaryDirectory(prefix="dalsegno-import-") as name:
        folder = Path(name)
        request = {"paths": {key: str(path.resolve()) for key, path in paths.items()}, "memory": _memory(paths)}
        (folder / "request.json").write_text(json.dumps(request))
        done = subprocess.run(
            [sys.executable, "-P", "-m", f"{_HOME}.{program}", str(folder / "request.json")],
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
        )
        return _received(folder, done, ", ".join(map(str, paths.values())))


def _memory(paths: Mapping[str, Path]) -> int:
    """Bytes: the files, mapped; their tensors; and a copy of those that are not contiguous."""
    files = [each for path in paths.values() for each in (path.rglob("*") if path.is_dir() else [path])]
    return 3 * sum(each.stat().st_size for each in files if each.is_file()) + _ALLOWANCE


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    places = [place for place in sys.path if place and Path(place).is_absolute()]
    return {**kept, "PYTHONPATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _received(folder: Path, done: subprocess.CompletedProcess[str], what: str) -> Unpickled:
    path = folder / CONTENT
    if not path.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StateMismatch(f"{what}: the process that reads it ended with status {done.returncode}: {last}")
    message = json.loads(path.read_text())
    if "refused" in message:
        raise StateMismatch(f"{what}: refused: {message['refused']}; nothing was imported")
    stored = StoredFile(folder / TENSORS)
    spans = stored.spans()

    def read_array(array: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return stored.tensor(spans[array], dtype, shape)

    return Unpickled(codec.decode(message["content"], read_array, what), message["dropped"])
