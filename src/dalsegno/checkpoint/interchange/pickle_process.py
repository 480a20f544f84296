"""The process that reads the pickles of other programs, and hands their content over as JSON and safetensors.

Started by ``pickles.py`` with the path of a request; ``dcp_process.py`` is the same for DCP's folders. torch's
restricted unpickler (``weights_only=True``) builds tensors and plain containers only; a file that names anything else
is refused. Whatever happens here, the other side reads only ``content.json`` and ``tensors.safetensors``, as data.
"""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dalsegno.checkpoint.format import codec
from dalsegno.checkpoint.format.layout import FileLayout, TensorChunk, as_bytes
from dalsegno.errors import CannotSave

from . import sandbox

CONTENT, TENSORS = "content.json", "tensors.safetensors"

_NUMPY = [(type(np.dtype(code)), f"numpy.dtypes.{type(np.dtype(code)).__name__}") for code in "?bBhHiIlLqQefd"]
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
SAFE: list[Any] = [
    *dict(_NUMPY),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    # dicts under other names, in which Lightning keeps hyperparameters
    (dict, "lightning_fabric.utilities.data.AttributeDict"),
    (dict, "lightning.fabric.utilities.data.AttributeDict"),
    (dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    (dict, "lightning.pytorch.utilities.parsing.AttributeDict"),
]
"""What files may name beyond what torch allows: NumPy's numbers and arrays, and plain dicts."""


def main(request: Path, load: Callable[[Path], Any]) -> int:
    """Restrict this process, ``load`` each path of the request, and hand over the result; returns the exit status."""
    wanted: dict[str, Any] = json.loads(request.read_text())
    folder = request.parent
    sandbox.enter(folder, wanted["memory"])
    try:
        with torch.serialization.safe_globals(SAFE):
            content = {name: load(Path(path)) for name, path in wanted["paths"].items()}
    except MemoryError:
        return _refuse(folder, f"needs more than {wanted['memory'] >> 20} MiB of memory, three times its size")
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        TypeError,
    ) as error:
        return _refuse(folder, _in_words(error))
    _hand_over(content, folder)
    return 0


def load_file(path: Path) -> Any:
    """What ``torch.save`` wrote; the tensors stay in the file until they are copied."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _in_words(error: BaseException) -> str:
    text = str(error)
    _, named, rest = text.partition("GLOBAL ")
    if named:
        return f"names {rest.split()[0]}, which is code or an unknown class, not data"
    return f"not a file that torch's restricted unpickler reads ({text.splitlines()[0] if text else repr(error)})"


def _refuse(folder: Path, why: str) -> int:
    (folder / CONTENT).write_text(json.dumps({"refused": why}))
    return 1


def _hand_over(content: Mapping[str, Any], folder: Path) -> None:
    dropped: list[str] = []
    tree = {name: _plain(value, name, dropped.append) for name, value in content.items()}
    encoded, arrays = codec.encode(tree, "")
    layout = FileLayout.of([TensorChunk.entire(name, each) for name, each in arrays.items()])
    with (folder / TENSORS).open("wb") as file:
        file.write(layout.header)
        for _, each in sorted(zip(layout.spans, arrays.values(), strict=True), key=lambda pair: pair[0]):
            file.write(as_bytes(each).numpy().data)
    (folder / CONTENT).write_text(json.dumps({"content": encoded, "dropped": dropped}))


def _plain(value: Any, where: str, drop: Callable[[str], object], depth: int = 0) -> Any:
    """``value`` without what a checkpoint cannot contain; ``drop`` receives the path of each such part."""
    if depth < codec.DEEPEST:
        if isinstance(value, dict) and not isinstance(value, Counter):
            return {
                key: inner
                for key, each in value.items()
                if (inner := _plain(each, f"{where}.{key}", drop, depth + 1)) is not DROPPED and type(key) in (str, int)
            }
        if isinstance(value, list):
            return list(_kept(value, where, drop, depth))
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return tuple(_kept(value, where, drop, depth))
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        codec.encode(value, where)
    except CannotSave:
        drop(f"{where}: a {type(value).__name__}")
        return DROPPED
    return value


def _kept(values: Any, where: str, drop: Callable[[str], object], depth: int) -> Iterator[Any]:
    for number, each in enumerate(values):
        inner = _plain(each, f"{where}[{number}]", drop, depth + 1)
        yield None if inner is DROPPED else inner


DROPPED = object()

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), load_file))
