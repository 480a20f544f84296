"""Read and write files of ``torch.save``. These are pickles: torch's restricted unpickler reads them, as data only.

``torch.load(weights_only=True)`` builds tensors, NumPy's arrays and plain containers. A file that names any other class
or function is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from dalsegno.errors import NotFound, StateMismatch
from dalsegno.system import filesystem

from .run_state import RunState

_RECONSTRUCT = np.empty(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
_SAFE: list[Any] = [
    *((type(np.dtype(code)), f"numpy.dtypes.{type(np.dtype(code)).__name__}") for code in "?bBhHiIlLqQefd"),
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


def load(path: Path) -> Any:
    """Raises NotFound if there is no such file; StateMismatch if it contains more than data, or ``torch.save`` did not
    write it.
    """
    if not path.exists():
        raise NotFound(f"{path}: does not exist")
    with refusal(path):
        return load_data(path, mmap=zipfile.is_zipfile(path))


def load_data(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """Call within :func:`refusal`."""
    with torch.serialization.safe_globals(_SAFE):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


@contextmanager
def refusal(path: Path) -> Iterator[None]:
    """Turn what an unpickler raises into a StateMismatch that names the class or function that the file wants."""
    try:
        yield
    except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError, EOFError, LookupError) as error:
        raise StateMismatch(f"{path}: refused: {_reason(str(error) or repr(error))}; nothing was imported") from error


def _reason(text: str) -> str:
    _, named, rest = text.partition("GLOBAL ")
    if named:
        return (
            f"names {rest.split()[0]}, which is code or an unknown class, not data; load the file with the program "
            "that wrote it, and save it again without that object"
        )
    return f"not a file that torch's restricted unpickler reads ({text.splitlines()[0]})"


def save(content: object, path: Path) -> Path:
    """``torch.save``; the file appears under its name once it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(content, partial)
    filesystem.rename(partial, path)
    return path


def save_states(run: RunState, program: str, target: Path, names: Mapping[str, str]) -> list[Path]:
    """Save the optimizer, the first schedule and the gradient scaler, as far as there are any, under ``names``."""
    states = {
        "optimizer": run.expect_optimizer(program).numbered(),
        "scheduler": next(iter(run.schedulers), None),
        "scaler": run.scaler,
    }
    return [save(state, target / names[key]) for key, state in states.items() if state is not None]


def tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Further name to first name of each tensor that has several: they are one place in memory."""
    first: dict[object, str] = {}
    names = {
        name: first.setdefault((each.data_ptr(), each.dtype, each.shape, each.stride()), name)
        for name, each in tensors.items()
        if each.numel()
    }
    return {name: other for name, other in names.items() if name != other}
