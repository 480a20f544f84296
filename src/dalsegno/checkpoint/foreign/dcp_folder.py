"""A folder of PyTorch's Distributed Checkpoint (DCP), such as torchtitan's ``step-500``.

::

    .metadata                        a pickle: names, shapes, and where each chunk is
    __0_0.distcp  __1_0.distcp  …    chunks and other items, each a pickle of torch.save

torchtitan saves the model's tensors under their own names, beside ``optimizer``, ``lr_scheduler``, ``dataloader`` and
``train_state``; other programs as they like, mostly ``model`` and ``optimizer``.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dalsegno.checkpoint.foreign.run_state import Files, Program, Source
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import as_bytes
from dalsegno.checkpoint.tensor_reader import part
from dalsegno.errors import ConfigurationError

from . import pickles
from .run_state import RunState
from .torch_files import dict_of_run, run_of_dict

_METADATA = ".metadata"
_DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
"""What a description of tensors consists of: module to names."""
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}


def _read(source: Source) -> RunState:
    with pickles.refusal(source.path):
        content = _load_folder(source.path)
    if isinstance(optimizer := content.get("optimizer"), Mapping):
        content["optimizer"] = _nested(optimizer) if "state" not in optimizer else _with_numbers(optimizer)
    program = DCP.name
    if isinstance(progress := content.pop("train_state", None), Mapping):
        program = "torchtitan"
        content["step"] = int(progress["step"])
    return run_of_dict(program, content, source)


def _load_folder(folder: Path) -> dict[str, Any]:
    """Nested dicts of full tensors and other items."""
    with (folder / _METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{_METADATA} describes no checkpoint")
    content: dict[str, Any] = {}
    first: dict[object, torch.Tensor] = {}
    paths = metadata.planner_data or {}
    places = {(key.fqn, key.offset): each for key, each in metadata.storage_data.items()}
    for name, description in metadata.state_dict_metadata.items():
        if isinstance(description, TensorStorageMetadata):
            value = torch.empty(description.size, dtype=description.properties.dtype)
            if sum(math.prod(chunk.sizes) for chunk in description.chunks) != value.numel():
                raise ValueError(f"the chunks of {name} are not the whole tensor")
            for chunk in description.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                part(value, box).copy_(_item(folder, places[name, chunk.offsets]))
            value = first.setdefault(_identity(value, name), value)
        else:
            value = _item(folder, places[name, None])
        _insert(content, paths.get(name, (name,)), value)
    return content


def _item(folder: Path, stored: Any) -> Any:
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"items are stored as {', '.join(stored.transform_descriptors)}, which is not supported")
    path = folder / stored.relative_path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"names {stored.relative_path}, which is outside of the folder")
    with path.open("rb") as file:
        file.seek(stored.offset)
        return pickles.load_data(io.BytesIO(file.read(stored.length)))


def _identity(tensor: torch.Tensor, name: str) -> object:
    """Equal for matrices with equal bits: tied ones, of which DCP saves one for each name. Vectors may be constants."""
    if tensor.dim() < 2:
        return name
    return tensor.dtype, tuple(tensor.shape), xxhash.xxh3_128_digest(as_bytes(tensor).numpy().data)


def _insert(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put ``value`` at ``path``: keys of dicts, and an ``int`` for an index of a list."""
    here: Any = content
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, list):
            here.extend([None] * (key + 1 - len(here)))
        if following is None:
            here[key] = value
        elif (here[key] if isinstance(here, list) else here.get(key)) is None:
            here[key] = [] if isinstance(following, int) else {}
        here = here[key]


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's descriptions of tensors; refuses every other class and function.

    torch's restricted unpickler does not know the protocol that DCP writes ``.metadata`` in.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._named: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A file may assign to attributes of what it names: these live as long as the unpickler."""
        if (module, name) not in self._named:
            found = self._allowed(module, name)
            if module != "torch":  # whose dtypes and Size nobody can change
                is_base = isinstance(found, type) and not issubclass(found, Enum)
                found = type(name, (found,), {}) if is_base else partial(found)
            self._named[module, name] = found
        return self._named[module, name]

    def _allowed(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath  # where the folder was
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not part of a description of tensors")
        return getattr(importlib.import_module(module), name)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``state.<fqn>.<kind>`` and ``param_groups.<fqn>.<key>`` as a ``state_dict``: one group for equal values."""
    state: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        owner, _, rest = name.partition(".")
        fqn, _, kind = rest.rpartition(".")
        if fqn:
            (state if owner == "state" else values).setdefault(fqn, {})[kind] = value
    groups: dict[str, dict[str, Any]] = {}
    for fqn, its in values.items():
        groups.setdefault(repr(sorted(its.items())), {**its, "params": []})["params"].append(fqn)
    return {"state": state, "param_groups": list(groups.values())}


def _with_numbers(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """DCP makes texts of the numbers of parameters."""
    state = {int(key) if str(key).isdecimal() else key: each for key, each in optimizer["state"].items()}
    return {**optimizer, "state": state}


def _write(run: RunState, target: Path, prefix: str) -> Files:
    """A folder for ``dcp.load``: what a file of torch.save has, the optimizer by name."""
    if run.optimizer is not None and run.optimizer.is_by_position:
        raise ConfigurationError(
            "the optimizer's parameters have only positions, as imported; DCP needs names, which the first "
            "checkpoint of a run that resumes here has"
        )
    optimizer = None if run.optimizer is None else run.optimizer.state_dict(lambda name: f"{prefix}{name}")
    content = dict_of_run(run, prefix, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves
        dcp_save(content, checkpoint_id=target, no_dist=True)
    return sorted(target.iterdir()), run.further_schedulers()


DCP = Program("Distributed Checkpoint (DCP)", is_at=lambda path: (path / _METADATA).is_file(), read=_read, write=_write)
