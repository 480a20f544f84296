"""Export a checkpoint's model for other programs: ``model.safetensors``, or several files with an index.

Full tensors are assembled from the shards of all ranks, one at a time in memory. File names, index and split size are
those of Hugging Face's ``save_pretrained``, so that ``from_pretrained`` finds them. Tied tensors are written once,
under the first of their names; the metadata has the others as ``safetensors.torch.save_model`` writes them and
``load_model`` reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.keys import CALLBACKS, MODEL
from dalsegno.checkpoint.format.layout import SAFETENSORS_NAMES, byte_count, name_of
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.format.names import checkpoint_path, component_and_name
from dalsegno.checkpoint.format.stored_tensors import ChunkReader, StoredTensor
from dalsegno.checkpoint.inspect import listing
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.errors import CannotSave, ConfigurationError, NotFound, UnknownName
from dalsegno.system import filesystem
from dalsegno.system.byte_sizes import parse_bytes

SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"

_CONFIGURATION = (
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
    """Outcome of an export.

    Attributes:
        checkpoint: the exported checkpoint.
        files: the files of tensors, in order, and the index if there is one.
        size: bytes of all tensors.
        tensors: number of tensors.
        tied: further name of a tied tensor to the name that it is written under.
        left_out: names of the model's non-tensor state (``get_extra_state``).
        copied: files copied from ``config_from``.
        wrapped: names of quantized and wrapped tensors, which are written as the plain tensors inside them.
    """

    checkpoint: Path
    files: list[Path]
    size: int
    tensors: int
    tied: Mapping[str, str]
    left_out: list[str]
    copied: list[Path]
    wrapped: Collection[str] = ()


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

    Verifies the checkpoint first. Files appear under their names once they are complete, the index last. A quantized
    weight is written as the plain tensors inside it, from which other programs do not build it again.

    Args:
        checkpoint: a checkpoint, or a run, whose newest valid checkpoint is exported.
        folder: destination; created if needed. It must not contain a model.
        max_shard_size: bytes, or a text such as ``"5GB"``, ``"200MB"``, ``"1GiB"``. A larger model is split into
            ``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``. Only a
            single larger tensor makes a larger file.
        config_from: directory with configuration and tokenizer (``config.json``, ``tokenizer.json``, …), copied so
            that ``from_pretrained(folder)`` needs nothing else.
        best: export the run's checkpoint with the best evaluation instead of the newest one.
        average: key of an ``EMA`` or ``ModelMerge`` callback, to export its averages instead of the trained weights.

    Raises:
        NotFound: if there is no such checkpoint, no best one, or no configuration in ``config_from``.
        UnknownName: if the checkpoint has no such averages; the message suggests the nearest name.
        DamagedCheckpoint: if its bytes do not match its manifest.
        ConfigurationError: if ``max_shard_size`` is not a size, or ``folder`` contains a model.
        CannotSave: if a tensor has a dtype that safetensors lacks, such as complex.
    """
    try:
        limit = parse_bytes(str(max_shard_size))
    except ValueError as error:
        raise ConfigurationError(f"max_shard_size: {error}") from error
    target = Path(folder)
    configuration = _configuration(Path(config_from)) if config_from is not None else []
    if target.is_dir() and (present := sorted(target.glob("model*.safetensors*"))):
        raise ConfigurationError(f"{target}: contains {present[0].name} already; choose another directory")
    source = checkpoint_to_export(checkpoint, best=best)
    tensors = Index.of_checkpoint(source)
    stored = tensors.of(MODEL)
    if average is not None:
        stored |= averages(tensors, average)
    expect_all_saved(source, tensors, stored)
    rest = SavedStates(source).state(MODEL)
    check_types(source, stored)
    shards = _shards(stored, limit)
    files = _file_names(len(shards))
    filesystem.make_directory(target)
    for name, shard in zip(files, shards, strict=True):
        blocks = tensor_file({each: stored[each] for each in shard}, rest["tied"], source)
        filesystem.replace_durably_in_pieces(target / name, blocks)
    size = sum(size_of(each) for each in stored.values())
    if len(files) > 1:
        where = {each: name for name, shard in zip(files, shards, strict=True) for each in shard}
        content = {"metadata": {"total_size": size}, "weight_map": where}
        filesystem.replace_durably(target / SHARD_INDEX, json.dumps(content, indent=2).encode())
        files.append(SHARD_INDEX)
    copied = [Path(shutil.copy2(path, target / path.name)) for path in configuration]
    return Exported(
        source.path,
        [target / name for name in files],
        size,
        len(stored),
        rest["tied"],
        sorted(rest["extra"]),
        copied,
        rest.get("wrapped", {}).keys(),
    )


def expect_all_saved(source: Checkpoint, index: Index, found: Collection[str]) -> None:
    """Raises ConfigurationError if the model has tensors that were not saved, and whose values are not ``found``."""
    if absent := sorted(index.absent_of(MODEL).keys() - {*found}):
        more = ", …" if absent[1:] else ""
        raise ConfigurationError(
            f"{source.path}: contains no values of {len(absent)} frozen parameters ({absent[0]}{more}), which "
            'save_frozen="never" left out; export the adapters (--adapters), or resume the run with save_frozen="once" '
            "and export its next checkpoint"
        )


def checkpoint_to_export(place: str | Path, *, best: bool) -> Checkpoint:
    """The newest valid checkpoint at ``place``, or the one with the best evaluation up to it; verified."""
    newest = listing.newest_verified(Path(place))
    if not best or newest.manifest.best:
        return newest
    state = SavedStates(newest).state("trainer")
    if state["best_metric"] is None:
        raise NotFound(f"{newest.path}: the run had no evaluation until then that determines the best checkpoint")
    path = checkpoint_path(newest.path.parent, state["best_global_step"])
    if not path.is_dir():
        raise NotFound(
            f"{path}: the checkpoint of the best evaluation ({state['best_metric']:g}) was not saved or not kept; "
            "set save=OnBest() and keep=Best()"
        )
    return listing.newest_verified(path)


def averages(tensors: Index, name: str) -> dict[str, StoredTensor]:
    """Averages of the callback ``callbacks.<name>``, by the names of the model's tensors.

    Raises:
        UnknownName: if there are none; the message suggests the nearest name.
    """
    model = tensors.of(MODEL)
    found = {tensor: each for tensor, each in tensors.of(f"{CALLBACKS}{name}").items() if tensor in model}
    if not found:
        keys = {component_and_name(each)[0] for each in tensors.tensors}
        known = sorted(key.removeprefix(CALLBACKS) for key in keys if key.startswith(CALLBACKS))
        raise UnknownName("average", name, known)
    return found


def _configuration(folder: Path) -> list[Path]:
    found = sorted({path for pattern in _CONFIGURATION for path in folder.glob(pattern) if path.is_file()})
    if not found:
        raise NotFound(f"config_from={str(folder)!r}: there is no config.json or tokenizer")
    return found


def check_types(source: Checkpoint, stored: Mapping[str, StoredTensor]) -> None:
    """
    Raises:
        NotFound: if there are no tensors.
        CannotSave: if one has a dtype that safetensors lacks.
    """
    if not stored:
        raise NotFound(f"{source.path}: contains no model")
    for name, each in stored.items():
        if each.dtype not in SAFETENSORS_NAMES:
            raise CannotSave(f"{MODEL}.{name}: safetensors has no {name_of(each.dtype)}; it cannot be exported")


def size_of(stored: StoredTensor) -> int:
    """Bytes of its values."""
    return byte_count(stored.shape, stored.dtype)


def _shards(stored: Mapping[str, StoredTensor], limit: int) -> list[list[str]]:
    """Names in order, split where the next tensor would exceed ``limit``."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, each in stored.items():
        if shards[-1] and size_of(each) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size_of(each)
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def tensor_file(
    stored: Mapping[str, StoredTensor], tied: Mapping[str, str], source: Checkpoint
) -> Iterator[filesystem.Buffer]:
    """A file of tensors in pieces; ``tied``: further names, for its metadata."""
    # Wide dtypes first, so that each tensor is aligned, as in every safetensors file.
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    yield _header(stored, order, {alias: name for alias, name in tied.items() if name in stored})
    reader = ChunkReader(source)
    for name in order:
        yield reader.full_tensor(stored[name]).reshape(-1).view(torch.uint8).numpy().data


def _header(stored: Mapping[str, StoredTensor], order: Sequence[str], aliases: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name in order:
        begin, end = end, end + size_of(stored[name])
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[stored[name].dtype],
            "shape": list(stored[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
