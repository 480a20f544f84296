"""A checkpoint's model as other programs read models: ``model.safetensors``, or several with an index.

Whole tensors, put together from the pieces of all ranks, one after the other: memory holds one at a time. The names of
files and index, and the size at which a file is split, are those of Hugging Face's ``save_pretrained``, so that
``from_pretrained`` finds them. Of tensors that are tied each is written once, under the first of its names; the others
stand in the file's metadata as ``safetensors.torch.save_model`` writes them, and ``load_model`` reads them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dalsegno.checkpoint import listing
from dalsegno.checkpoint.checkpoint_dir import path_of
from dalsegno.checkpoint.format import index
from dalsegno.checkpoint.format.index import Index, StoredTensor
from dalsegno.checkpoint.format.keys import CALLBACKS, MODEL
from dalsegno.checkpoint.format.layout import SAFETENSORS_NAMES, StoredFile, byte_count, name_of
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.errors import CannotSave, ConfigurationError, NotFound, UnknownName
from dalsegno.system import filesystem

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BESIDE = (
    "config.json",
    "generation_config.json",
    "chat_template.*",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has written.

    Attributes:
        checkpoint: where from.
        files: the files of tensors, in order, and the index if there is one.
        size: bytes of all tensors.
        tensors: how many.
        tied: further name of a tensor to the one that it is written under.
        left_out: names of the model's state that is no tensor (``get_extra_state``).
        copied: what was copied from ``config_from``.
    """

    checkpoint: Path
    files: list[Path]
    size: int
    tensors: int
    tied: Mapping[str, str]
    left_out: list[str]
    copied: list[Path]


def export_model(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    config_from: str | Path | None = None,
    average: str | None = None,
    best: bool = False,
) -> Exported:
    """Write the model of a checkpoint as plain safetensors, for inference or other programs. In one process.

    The checkpoint is verified first. Files appear under their names once they are whole, the index last.

    Args:
        checkpoint: a checkpoint, or a run: then its newest checkpoint that verifies.
        folder: where to; created if need be. It must not hold a model yet.
        max_shard_size: bytes, or a text such as ``"5GB"``, ``"200MB"``, ``"1GiB"``. A larger model is written as
            ``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``. Only a tensor that
            is larger by itself makes a larger file.
        config_from: copy configuration and tokenizer (``config.json``, ``tokenizer.json`` …) from this folder, so that
            ``from_pretrained(folder)`` needs nothing else.
        best: of a run, the checkpoint with the best evaluation so far, not the newest one.
        average: the key of an ``EMA`` or a ``ModelMerge``, whose averages take the place of the trained weights.

    Raises:
        NotFound: if there is no such checkpoint, none of the best evaluation, or no ``config_from``.
        UnknownName: if the checkpoint has no such averages; the message names the nearest.
        DamagedCheckpoint: if its bytes are not what its manifest says.
        ConfigurationError: if ``max_shard_size`` is no size, or there is a model in ``folder`` already.
        CannotSave: if a tensor has an element type that plain safetensors lacks, such as complex numbers.
    """
    limit = byte_size(max_shard_size)
    target = Path(folder)
    beside = _configuration(Path(config_from)) if config_from is not None else []
    if target.is_dir() and (present := sorted(target.glob("model*.safetensors*"))):
        raise ConfigurationError(f"{target}: holds {present[0].name} already; name another folder")
    source = listing.verified(Path(checkpoint))
    if best:
        source = _best(source)
    everything = Index.read(source.file(index.FILE_NAME))
    stored = everything.of(MODEL)
    if average is not None:
        stored |= _averages(everything, average, stored)
    rest = SavedStates(source).state(MODEL)
    _check_types(source, stored)
    shards = _shards(stored, limit)
    names = _file_names(len(shards))
    filesystem.make_directory(target)
    for name, shard in zip(names, shards, strict=True):
        pieces = _pieces({each: stored[each] for each in shard}, rest["tied"], source)
        filesystem.replace_durably_in_pieces(target / name, pieces)
    size = sum(_size(each) for each in stored.values())
    if len(names) > 1:
        where = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
        content = {"metadata": {"total_size": size}, "weight_map": where}
        filesystem.replace_durably(target / INDEX, json.dumps(content, indent=2).encode())
        names.append(INDEX)
    copied = [Path(shutil.copy2(path, target / path.name)) for path in beside]
    return Exported(
        source.path, [target / name for name in names], size, len(stored), rest["tied"], sorted(rest["extra"]), copied
    )


def _best(newest: Checkpoint) -> Checkpoint:
    """The checkpoint of the best evaluation that ``newest`` knows of."""
    if newest.manifest.best:
        return newest
    state = SavedStates(newest).state("trainer")
    if state["best_metric"] is None:
        raise NotFound(f"{newest.path}: the run had no evaluation until then that could tell which checkpoint is best")
    path = path_of(newest.path.parent, state["best_global_step"])
    if not path.is_dir():
        raise NotFound(
            f"{path}: that would be the best evaluation's ({state['best_metric']:g}), but it was not saved, or not "
            "kept; save=OnBest() and keep=Best() see to that"
        )
    return listing.verified(path)


def byte_size(value: int | str) -> int:
    """A number of bytes from ``"5GB"``, ``"200 MB"``, ``"1GiB"`` or a plain number.

    Raises:
        ConfigurationError: if it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get(found[2].upper() or "B") if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ConfigurationError(f"max_shard_size={value!r}; needs a number of bytes, or a text like '5GB' or '200MB'")
    return int(float(found[1]) * unit)


def assembled(name: str, stored: StoredTensor, checkpoint: Checkpoint) -> torch.Tensor:
    """A whole tensor from its pieces; each file is open only while its piece is copied.

    Raises:
        DamagedCheckpoint: if a piece does not lie where the index says.
    """
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for piece in stored.pieces:
        box = whole
        for dimension, (begin, length) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
            box = box.narrow(dimension, begin, length)
        all_of_it = [(0, length) for length in piece.shape]
        StoredFile(checkpoint.file(piece.file)).fill(box, piece.span, stored.dtype, piece.shape, all_of_it)
    return whole


def _averages(everything: Index, name: str, model: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of the callback with that key, of the tensors that are the model's."""
    found = {tensor: each for tensor, each in everything.of(f"{CALLBACKS}{name}").items() if tensor in model}
    if not found:
        keys = {index.split(each)[0] for each in everything.tensors}
        known = sorted(key.removeprefix(CALLBACKS) for key in keys if key.startswith(CALLBACKS))
        raise UnknownName("average", name, known)
    return found


def _configuration(folder: Path) -> list[Path]:
    found = sorted({path for pattern in _BESIDE for path in folder.glob(pattern) if path.is_file()})
    if not found:
        raise NotFound(f"config_from={str(folder)!r}: there is no config.json or tokenizer")
    return found


def _check_types(source: Checkpoint, stored: Mapping[str, StoredTensor]) -> None:
    if not stored:
        raise NotFound(f"{source.path}: there is no model in it")
    for name, each in stored.items():
        if each.dtype not in SAFETENSORS_NAMES:
            raise CannotSave(f"{MODEL}.{name}: safetensors has no {name_of(each.dtype)}; it cannot be exported")


def _size(stored: StoredTensor) -> int:
    return byte_count(stored.shape, stored.dtype)


def _shards(stored: Mapping[str, StoredTensor], limit: int) -> list[list[str]]:
    """The names in their order, cut wherever the next tensor would exceed ``limit``."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, each in stored.items():
        if shards[-1] and _size(each) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _size(each)
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WHOLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _pieces(
    stored: Mapping[str, StoredTensor], tied: Mapping[str, str], source: Checkpoint
) -> Iterator[filesystem.Buffer]:
    # Wide element types first, so that each tensor lies aligned, as in every file of safetensors.
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    yield _header(stored, order, {alias: name for alias, name in tied.items() if name in stored})
    for name in order:
        yield assembled(name, stored[name], source).reshape(-1).view(torch.uint8).numpy().data


def _header(stored: Mapping[str, StoredTensor], order: Sequence[str], aliases: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name in order:
        begin, end = end, end + _size(stored[name])
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[stored[name].dtype],
            "shape": list(stored[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
