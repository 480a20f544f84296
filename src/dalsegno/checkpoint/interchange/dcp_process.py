"""The process that reads folders of PyTorch's Distributed Checkpoint (DCP): nested dicts of full tensors and values.

``.metadata`` is a pickle, and so is each item. The first is read by an unpickler that knows DCP's own descriptions and
nothing else, the items by torch's restricted one. Everything else is as in ``pickle_process.py``, which needs less of
torch.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dalsegno.checkpoint.format.layout import as_bytes
from dalsegno.checkpoint.format.sharding import Box
from dalsegno.checkpoint.format.stored_tensors import part

from .pickle_process import main

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
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}


def load_folder(folder: Path) -> dict[str, Any]:
    """
    Raises:
        UnpicklingError: if ``.metadata`` or an item names anything that is not data.
        ValueError: if the folder is not DCP's, or stores its items in another way.
    """
    with (folder / _METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{_METADATA} describes no checkpoint")
    nested: dict[str, Any] = {}
    first: dict[object, torch.Tensor] = {}
    paths = metadata.planner_data or {}
    for name, description in metadata.state_dict_metadata.items():
        if isinstance(description, TensorStorageMetadata):
            value = _tensor(folder, metadata, name, description)
            value = first.setdefault(_content(value, name), value)
        else:
            value = _item(folder, metadata.storage_data[MetadataIndex(name)])
        _place(nested, paths.get(name, (name,)), value)
    return nested


def _tensor(folder: Path, metadata: Metadata, name: str, description: TensorStorageMetadata) -> torch.Tensor:
    full = torch.empty(description.size, dtype=description.properties.dtype)
    for chunk in description.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        part(full, box).copy_(_item(folder, metadata.storage_data[MetadataIndex(name, chunk.offsets)]))
    return full


def _content(tensor: torch.Tensor, name: str) -> object:
    """Equal for matrices with equal bits: tied ones, of which DCP saves one for each name. Vectors may be constants."""
    if tensor.dim() < 2:
        return name
    return tensor.dtype, tuple(tensor.shape), xxhash.xxh3_128_digest(as_bytes(tensor).numpy().data)


def _item(folder: Path, stored: Any) -> Any:
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"items are stored as {', '.join(stored.transform_descriptors)}, which is not supported")
    path = folder / stored.relative_path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"names {stored.relative_path}, which is outside of the folder")
    with path.open("rb") as file:
        file.seek(stored.offset)
        return torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True)


def _place(nested: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put ``value`` at ``path``: keys of dicts, and an ``int`` for an index of a list."""
    here: Any = nested
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(here, list):
            here.extend([None] * (step + 1 - len(here)))
        is_missing = here[step] is None if isinstance(here, list) else step not in here
        if following is None:
            here[step] = value
        elif is_missing:
            here[step] = [] if isinstance(following, int) else {}
        here = here[step]


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's descriptions of tensors; refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath  # where the folder was
        if name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not part of a description of tensors")
        home: Any = {"torch": torch, "torch.serialization": torch.serialization}.get(module, descriptions)
        if module.endswith(".filesystem"):
            home = torch.distributed.checkpoint.filesystem
        return getattr(home, name)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), load_folder))
