"""Load weights that other programs saved: one safetensors file, or several with an index. Never a pickle.

Reads files of Hugging Face's ``save_pretrained``, of ``safetensors.torch.save_model`` and of dalsegno's own export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dalsegno.checkpoint.compatibility import raise_if_incompatible
from dalsegno.checkpoint.file_reading import read_json
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.checkpoint.model_state import ModelState
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.restore import LoadReport, ShardedLoad, StoredTensors, find_mismatches
from dalsegno.checkpoint.sharding import Box, ListedChunks, StoredChunk
from dalsegno.checkpoint.tensor_files import StoredFile
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.distributed import collectives
from dalsegno.errors import DamagedCheckpoint, NotFound

from .export import SHARD_INDEX, SINGLE_FILE

_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Weights:
    """Full tensors of a model, each in one of ``paths``."""

    path: Path
    index: Index
    paths: Mapping[str, Path]

    def require(self, names: Collection[str]) -> None: ...

    def is_here(self, name: str) -> bool:
        return True

    def file(self, name: str) -> Path:
        return self.paths[name]

    @classmethod
    def open(cls, path: Path) -> Weights:
        """Read the headers at ``path``: a file, or a directory with one file, or with several and an index."""
        files, expected = _files_at(path)
        tensors: dict[str, StoredTensor] = {}
        for name, file in files.items():
            for tensor, (dtype, shape) in StoredFile(file).entries().items():
                chunk = StoredChunk(name, tensor, Box.whole(shape))
                tensors[tensor] = StoredTensor(dtype, shape, ListedChunks([chunk]))
        if expected is not None and expected != tensors.keys():
            odd = sorted(expected ^ tensors.keys())[0]
            raise DamagedCheckpoint(
                f"{path / SHARD_INDEX}: {odd} is not both in the index and in the files that it names"
            )
        return cls(path, Index({MODEL: tensors}), files)

    def read_all(self) -> dict[str, torch.Tensor]:
        reader = ChunkReader(self)
        return {name: reader.full_tensor(each) for name, each in self.index.of(MODEL).items()}

    def stored_for(self, model: ModelState) -> StoredTensors:
        """The stored state for ``model``. A tied tensor of the model may be stored under any of its names."""
        there = self.index.of(MODEL)
        tied: dict[str, str] = {}
        for names in model.tied_names():
            present = [name for name in names if name in there]
            for name in names:
                if present and name != present[0] and (name not in there or self._are_equal(present[0], name)):
                    tied[name] = present[0]
        return StoredTensors(self.path, self, self.index, {MODEL: {"tied": tied, "extra": {}}}, {})

    def _are_equal(self, one: str, other: str) -> bool:
        reader, tensors = ChunkReader(self), self.index.of(MODEL)
        first, second = (reader.full_tensor(tensors[name]) for name in (one, other))
        return torch.equal(first, second)


def load_weights(path: Path, model: ModelState, *, allowed: Collection[str] = ()) -> LoadReport:
    """Load a model from the safetensors at ``path``; each rank reads only its shard. Collective.

    Tensors of another dtype are cast, with a note in the report. Raises StateMismatch before anything is changed, if
    they do not fit; with ``"model"`` allowed, the others are loaded; NotFound, DamagedCheckpoint as
    :meth:`Weights.open` does."""
    weights, report = collectives.from_rank_zero(lambda: Weights.open(path)), LoadReport()

    def prepare() -> ShardedLoad:
        stored = weights.stored_for(model)
        hint = naming_hint(weights.index.of(MODEL).keys(), model.names())
        for change in find_mismatches(stored, [model], any_dtype=True):
            report.changes.append(replace(change, details=(*change.details, hint)) if hint else change)
        raise_if_incompatible(report.changes, allowed, path)
        return ShardedLoad(stored, [model])

    load = collectives.run_on_all_ranks(prepare)
    collectives.run_on_all_ranks(load.run)
    report.notes.extend(load.casts())
    report.restored.append(model.key)
    return report


def weights_are_at(path: Path) -> bool:
    there = path.suffix == _SUFFIX or (path / SINGLE_FILE).exists() or (path / SHARD_INDEX).exists()
    return there and not Checkpoint.is_at(path)


def naming_hint(there: Collection[str], here: Collection[str]) -> str | None:
    """Hint if the names differ by a prefix, as those of a model inside another module do."""
    for outer, inner, side in ((there, here, "there"), (here, there, "here")):
        prefixes = Counter(
            name[: -len(tail)] for name in outer for tail in _tails(name) if tail in inner and tail not in outer
        )
        if prefixes:
            prefix, count = prefixes.most_common(1)[0]
            return (
                f"{count} of {len(inner)} names would match with the prefix {prefix!r} that those {side} have: "
                "load into the module that has these names, or rename the tensors"
            )
    return None


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[number:]) for number in range(1, len(parts))]


def _files_at(path: Path) -> tuple[dict[str, Path], set[str] | None]:
    """The files by name, and the tensor names in their index, if there is one."""
    if path.is_file() and path.suffix == _SUFFIX:
        return {path.name: path.resolve()}, None
    if (path / SINGLE_FILE).is_file():
        return {SINGLE_FILE: (path / SINGLE_FILE).resolve()}, None
    if (path / SHARD_INDEX).is_file():
        where = _weight_map(path / SHARD_INDEX)
        return {name: (path / name).resolve() for name in sorted(set(where.values()))}, set(where)
    pickled = [each.name for each in path.glob("*") if each.suffix in _PICKLES] if path.is_dir() else []
    hint = f"; {pickled[0]} is a pickle, which dalsegno never reads: save it as safetensors first" if pickled else ""
    raise NotFound(
        f"{path}: not a checkpoint, not a {_SUFFIX} file, not a directory with {SINGLE_FILE} or {SHARD_INDEX}{hint}"
    )


def _weight_map(path: Path) -> dict[str, str]:
    content = read_json(path.resolve())  # a download cache contains links to files
    try:
        where: dict[Any, Any] = content["weight_map"]
        if not all(type(file) is str and "/" not in file and file.endswith(_SUFFIX) for file in where.values()):
            raise ValueError("it names a file that is not a safetensors file beside it")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not an index of safetensors ({error!r})") from error
    return where
