"""Pickles of other programs, read as data only: a file that names any other class or function is refused.

``torch.load(weights_only=True)`` builds tensors, numbers and plain containers; here also NumPy's numbers and arrays.
DCP's ``.metadata`` has descriptions of tensors, in a protocol that torch's restricted unpickler does not know.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from dalsegno.errors import NotFound, StateMismatch

_NUMBERS = {np.dtype(code).str[1:] for code in "?bBhHiIlLqQefd"}


class _Kind:
    """Stands for ``numpy.dtype``, which takes flags from a file: with these it uses bytes as addresses of objects."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in _NUMBERS:
            raise pickle.UnpicklingError(f"arrays of {code!r} are not arrays of numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for ``numpy.ndarray``, which accepts any bytes as addresses of objects."""

    def __init__(self, *_: object) -> None:
        self._state: Any = None

    def __setstate__(self, state: object) -> None:
        self._state = state

    def value(self) -> np.ndarray[Any, Any]:
        _, shape, kind, is_fortran, raw = self._state
        if not isinstance(kind, _Kind):
            raise TypeError("an array of no kind of numbers")
        return np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if is_fortran else "C").copy()


def with_arrays(content: Any) -> Any:
    """A part of what :func:`load` returns, with NumPy's arrays in their places. Raises ValueError or TypeError for one
    that is not an array of numbers; RecursionError if a part contains itself."""
    if isinstance(content, _Array):
        return content.value()
    if type(content) in (list, tuple):
        return type(content)(map(with_arrays, content))
    return {key: with_arrays(each) for key, each in content.items()} if isinstance(content, dict) else content


def _scalar(kind: _Kind, raw: bytes) -> Any:
    return np.frombuffer(raw, kind.dtype)[0]


_SAFE: list[Any] = [
    (_Array, "numpy.ndarray"),
    (_Kind, "numpy.dtype"),
    (lambda: b"", "builtins.bytes"),  # as torch.save writes the bytes of an empty array
    *((_Array, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    # dicts under other names, in which Lightning keeps hyperparameters
    *((dict, f"{package}.utilities.data.AttributeDict") for package in ("lightning_fabric", "lightning.fabric")),
    *((dict, f"{package}.utilities.parsing.AttributeDict") for package in ("pytorch_lightning", "lightning.pytorch")),
]
"""What files may name beyond what torch allows."""


def load(path: Path) -> Any:
    """Content of a file of ``torch.save``. Raises NotFound if there is none; StateMismatch if it contains more than
    data, or ``torch.save`` did not write it."""
    if not path.exists():
        raise NotFound(f"{path}: does not exist")
    is_archive = zipfile.is_zipfile(path)
    with refusal(path), path.open("rb") as file:
        if not is_archive and file.read(1) != pickle.PROTO:
            raise pickle.UnpicklingError("it is neither a zip archive nor a pickle")
        return load_data(path, mmap=is_archive)


def load_data(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Call within :func:`refusal`."""
    with torch.serialization.safe_globals(_SAFE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tell whoever reads a file of another program how to load it unsafely
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


class _Description:
    """Stands for each class of DCP's metadata: whatever attributes a file gives it."""

    def __init__(self, *_: object) -> None: ...


class _Properties(_Description):
    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


class MetadataUnpickler(pickle.Unpickler):
    """Reads ``.metadata``. Call ``load()`` within :func:`refusal`."""

    def find_class(self, module: str, name: str) -> Any:
        """A file may also assign to attributes of what it names, so each name is a class of its own."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            return type(name, (_Properties if name == "TensorProperties" else _Description,), {})
        if (module, name) == ("torch.serialization", "_get_layout") or module in ("pathlib", "pathlib._local"):
            return type(name, (_Description,), {})
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not part of a description of tensors")


@contextmanager
def refusal(path: Path) -> Iterator[None]:
    """Turn what an unpickler raises into a StateMismatch that names the class or function that the file wants."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file has other values where these are used
        raise StateMismatch(f"{path}: refused: {_reason(str(error) or repr(error))}; nothing was imported") from error


def _reason(text: str) -> str:
    _, named, rest = text.partition("GLOBAL ")
    if named:
        return (
            f"names {rest.split()[0]}, which is code or an unknown class, not data; load the file with the program "
            "that wrote it, and save it again without that object"
        )
    found = text.partition("WeightsUnpickler error:")[2].strip() or text  # before that, torch advises against safety
    reason = "it is a TorchScript archive" if "TorchScript" in found else found.splitlines()[0]
    return f"not a file that torch's restricted unpickler reads ({reason})"
