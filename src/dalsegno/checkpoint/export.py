"""Export a checkpoint's model for other programs, or its adapters alone, as safetensors; or save it with a checkpoint.

Full tensors are assembled from the shards of all ranks, one at a time in memory. File names, index and split size are
those of Hugging Face's ``save_pretrained``, so that ``from_pretrained`` finds them. Tied tensors are written once,
under the first of their names; the metadata has the others as ``safetensors.torch.save_model`` writes them and
``load_model`` reads them.

Adapters are those of peft (LoRA, DoRA, IA³, …), written as a folder for ``PeftModel``. A checkpoint has their tensors
under the names of the whole model, and their configuration among the run's settings. The names in peft's own files
contain neither the adapter's name nor the base's::

    adapter_config.json
    adapter_model.safetensors
    other/…                      a further adapter, by its name

With ``save_pretrained=True`` a checkpoint's own directory is such a folder, too: :class:`PretrainedDirectory` adds the
files before it is published. A file of the checkpoint that has whole tensors only gets a second name.
"""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dalsegno.checkpoint import listing
from dalsegno.checkpoint.async_save import NewDirectory
from dalsegno.checkpoint.contract import Captured
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.file_writing import Advance, LinkableFiles, UnchangedFile, write_hashed
from dalsegno.checkpoint.index import Index, StoredTensor
from dalsegno.checkpoint.manifest import Checkpoint, Manifest, is_safe_name
from dalsegno.checkpoint.names import ADAPTERS, CALLBACKS, MODEL, SETTINGS, checkpoint_path
from dalsegno.checkpoint.sidecar import SavedStates
from dalsegno.checkpoint.tensor_files import SAFETENSORS_NAMES, FileLayout, TensorChunk, byte_count, name_of
from dalsegno.checkpoint.tensor_reader import ChunkReader
from dalsegno.errors import CannotSave, ConfigurationError, DamagedCheckpoint, NotFound, UnknownName
from dalsegno.stateful.annotations import check_types
from dalsegno.stateful.component import class_name_of
from dalsegno.system import filesystem
from dalsegno.system.machine import free_disk
from dalsegno.system.progress import format_bytes, parse_bytes

SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"
LARGEST_SHARD = "5GB"

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
_ADAPTER_CONFIGURATION = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
_DEFAULT_ADAPTER = "default"
_ROOT = "base_model.model."
"""Prefix of all names in peft's files."""
_OF_TRAINED_MODULE = "modules_to_save"
_MAGNITUDE = "lora_magnitude_vector"
"""DoRA's vector, whose name in peft's files ends here."""
_ADAPTER_PREFIXES = ("lora_", "hada_", "trainable_tokens_", _OF_TRAINED_MODULE)
"""Of the modules that contain an adapter under its name; besides them, a tuner's own are prefixed with its type."""


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
        adapters: names of the adapters in the model, of which all tensors have peft's names.
    """

    checkpoint: Path
    files: list[Path]
    size: int
    tensors: int
    tied: Mapping[str, str]
    left_out: list[str]
    copied: list[Path]
    wrapped: Collection[str] = ()
    adapters: Collection[str] = ()


@check_types
def export_model(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    max_shard_size: int | str = LARGEST_SHARD,
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
        ConfigurationError: if ``max_shard_size`` is not a size, or ``folder`` contains a model; or for ``config_from``
            with a model with adapters, whose names ``from_pretrained`` does not find.
        CannotSave: if a tensor has a dtype that safetensors lacks, such as complex, or the disk has too little space.
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
    index = Index.of_checkpoint(source)
    stored = _stored(index, average)
    expect_all_saved(source, index.known_of(MODEL), stored)
    saved = SavedStates(source)
    rest, adapters = saved.state(MODEL), _adapter_configurations(_settings_in(saved)).keys()
    if adapters and configuration:
        raise ConfigurationError(
            f"{source.path}: the model has adapters ({', '.join(adapters)}), so its tensors have peft's names, and "
            "from_pretrained would begin with random weights; export the adapters (--adapters), which "
            "PeftModel.from_pretrained adds to the base model, or leave config_from= (--config-from) out"
        )
    _check_types(source, stored)
    filesystem.make_directory(target)
    written = _write_model(source, target, stored, rest["tied"], limit)
    return Exported(
        source.path,
        [target / name for name in written],
        sum(map(_size, stored.values())),
        len(stored),
        rest["tied"],
        sorted(rest["extra"]),
        [Path(shutil.copy2(path, target / path.name)) for path in configuration],
        rest.get("wrapped", {}).keys(),
        adapters,
    )


@check_types
def export_adapters(
    checkpoint: str | Path, folder: str | Path, *, average: str | None = None, best: bool = False
) -> Exported:
    """Write the adapters of a checkpoint for ``PeftModel.from_pretrained(base_model, folder)``. In one process.

    Verifies the checkpoint first. The adapter named ``default`` is in ``folder`` itself, each other one in a folder of
    its name there, as ``PeftModel.save_pretrained`` writes them. Modules that are trained besides
    (``modules_to_save``) belong to their adapter.

    Args:
        checkpoint: a checkpoint, or a run, whose newest valid checkpoint is exported.
        folder: destination; created if needed. It must not contain an adapter.
        average: key of an ``EMA`` or ``ModelMerge`` callback, to export its averages instead of the trained weights.
        best: export the run's checkpoint with the best evaluation instead of the newest one.

    Raises:
        NotFound: if there is no such checkpoint, no best one, or no adapter in it.
        UnknownName: if the checkpoint has no such averages; the message suggests the nearest name.
        DamagedCheckpoint: if its bytes do not match its manifest, or an adapter's name cannot name a folder.
        ConfigurationError: if a folder to write contains an adapter, a configuration trains biases (``bias="all"``), or
            ``save_frozen="never"`` has left out tensors of an adapter.
        CannotSave: if a tensor has a dtype that safetensors lacks.
    """
    target = Path(folder)
    _expect_no_adapter(target)
    source = checkpoint_to_export(checkpoint, best=best)
    index, saved = Index.of_checkpoint(source), SavedStates(source)
    stored = _stored(index, average)
    adapters = _adapters(f"{source.path}", _adapter_configurations(_settings_in(saved)), index.known_of(MODEL))
    if not adapters:
        raise NotFound(f"{source.path}: has no adapters: its settings contain no configuration of peft")
    expect_all_saved(source, {name for each in adapters for name in each.names.values()}, stored, instead="")
    for each in adapters:
        _expect_no_adapter(target / each.folder)
        _check_types(source, each.of(stored))
    written = [_write_adapter(source, target, each, stored) for each in adapters]
    tensors = [tensor for each in adapters for tensor in each.of(stored).values()]
    files = [target / name for names in written for name in names]
    return Exported(source.path, files, sum(map(_size, tensors)), len(tensors), {}, [], [])


# --- Hugging Face's format in a checkpoint's own directory ----------------------------------------------------------


class PretrainedDirectory(NewDirectory):
    """The directory of a new checkpoint that ``from_pretrained`` loads, too; ``files``: of :func:`pretrained_files`."""

    def __init__(self, path: Path, files: Mapping[str, bytes]) -> None:
        super().__init__(path)
        self._files = files

    def publish(self, manifest: Manifest, advance: Advance) -> None:
        source = Checkpoint(self.partial, manifest)
        added = write_pretrained(source, self.partial, self._files, advance)
        super().publish(replace(manifest, files={**manifest.files, **added}), advance)


def write_pretrained(
    source: Checkpoint, folder: Path, files: Mapping[str, bytes], advance: Advance = lambda count: None
) -> dict[str, FileRecord]:
    """Write the model of ``source``, which may not be verified, and ``files`` of :func:`pretrained_files` for
    ``from_pretrained(folder)``: its adapters alone, if it has any. Returns the record of each file."""
    index, saved = Index.of_checkpoint(source), SavedStates(source)
    stored = index.of(MODEL)
    written: dict[str, FileRecord] = {}
    adapters = _adapters(f"{source.path}", _adapter_configurations(_settings_in(saved)), stored)
    for each in adapters:
        written |= _write_adapter(source, folder, each, stored, advance)
    if not adapters:
        expect_all_saved(source, index.known_of(MODEL), stored)
        _check_types(source, stored)
        tied, limit = saved.state(MODEL)["tied"], parse_bytes(LARGEST_SHARD)
        written |= _write_model(source, folder, stored, tied, limit, advance)
    for name, data in files.items():
        filesystem.make_directory((folder / name).parent)
        written[name] = write_hashed(folder / name, [data], advance)
    return written


def pretrained_files(model: nn.Module, processing_class: Any) -> dict[str, bytes]:
    """The files other than weights of a model of transformers, by name: of its configuration, unless it has adapters,
    and of the tokenizer or processor, if there is one."""
    configuration: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if peft_configurations(model):
        configuration = generation = None  # transformers would look for the whole model beside them
    elif _is_of_transformers(model):
        configuration = copy.deepcopy(configuration)
        configuration.architectures = [type(model).__name__.removeprefix("FSDP")]  # which FSDP2 adds
        configuration.dtype = name_of(model.dtype)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        if configuration is not None and getattr(model, "is_remote_code", bool)():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, folder, config=configuration)  # its modules lie beside the weights
        for part in (configuration, generation, processing_class):
            if callable(save := getattr(part, "save_pretrained", None)):
                save(folder)
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    if odd := [name for name in files if not is_safe_name(name)]:
        raise ConfigurationError(f"save_pretrained() writes {odd[0]!r}, which no file of a checkpoint can be named")
    return files


def expect_pretrained(model: nn.Module, captured: Captured, settings: Mapping[str, Any], *, saves_frozen: bool) -> None:
    """Raises ConfigurationError for a model that ``from_pretrained`` cannot load from what :func:`write_pretrained`
    makes of its checkpoints. ``saves_frozen``: whether these contain the values of frozen parameters."""
    configurations, setting = _adapter_configurations(settings), "save_pretrained=True"
    if configurations:
        try:
            adapters = _adapters(setting, configurations, captured.tensors)
        except (NotFound, DamagedCheckpoint) as error:
            raise ConfigurationError(f"{error}; leave {setting} out") from error
        if odd := [each.folder for each in adapters if not is_safe_name(f"{each.folder}/x".lstrip("/"))]:
            raise ConfigurationError(f"{setting}: rename the adapter {odd[0]!r}; use letters, digits, '.', '_', '-'")
        frozen = [each.folder or _DEFAULT_ADAPTER for each in adapters if {*each.names.values()} & {*captured.frozen}]
        if frozen and not saves_frozen:
            raise ConfigurationError(f'{setting}: save_frozen="never" leaves out frozen weights of adapter {frozen[0]}')
        return
    reasons = {
        f"a {class_name_of(model)} is neither a model of transformers nor one with adapters of peft": (
            not _is_of_transformers(model)
        ),
        "from_pretrained cannot build the quantized weights of this model again": bool(captured.rest.get("wrapped")),
        'save_frozen="never" leaves out frozen weights of this model, which from_pretrained needs': (
            not saves_frozen and bool(captured.frozen)
        ),
        "safetensors lacks the dtype of a tensor of this model": any(
            each.dtype not in SAFETENSORS_NAMES for each in captured.tensors.values()
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{setting}: {reason}; leave it out, and export the weights of a checkpoint")


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


def expect_all_saved(
    source: Checkpoint,
    names: Collection[str],
    stored: Collection[str],
    instead: str = "export the adapters (--adapters), or ",
) -> None:
    """Raises ConfigurationError if of the model's tensors ``names`` some are not ``stored``."""
    if absent := sorted({*names} - {*stored}):
        more = ", …" if absent[1:] else ""
        raise ConfigurationError(
            f"{source.path}: contains no values of {len(absent)} frozen parameters ({absent[0]}{more}), which "
            f'save_frozen="never" left out; {instead}resume the run with save_frozen="once" and export its next '
            "checkpoint"
        )


def _stored(index: Index, average: str | None) -> dict[str, StoredTensor]:
    """The model's tensors, with the averages of the callback ``average`` in place of those that it averages."""
    model = index.of(MODEL)
    if average is None:
        return model
    averages = {name: each for name, each in index.of(f"{CALLBACKS}{average}").items() if name in model}
    if not averages:
        known = sorted(key.removeprefix(CALLBACKS) for key in index.tensors if key.startswith(CALLBACKS))
        raise UnknownName("average", average, known)
    return model | averages


def _configuration(folder: Path) -> list[Path]:
    found = sorted({path for pattern in _CONFIGURATION for path in folder.glob(pattern) if path.is_file()})
    if not found:
        raise NotFound(f"config_from={str(folder)!r}: there is no config.json or tokenizer")
    return found


def _check_types(source: Checkpoint, stored: Mapping[str, StoredTensor]) -> None:
    if not stored:
        raise NotFound(f"{source.path}: contains no model")
    for name, each in stored.items():
        if each.dtype not in SAFETENSORS_NAMES:
            raise CannotSave(f"{MODEL}.{name}: safetensors has no {name_of(each.dtype)}; it cannot be exported")


def _write_model(
    source: Checkpoint,
    target: Path,
    stored: Mapping[str, StoredTensor],
    tied: Mapping[str, str],
    limit: int,
    advance: Advance = lambda count: None,
) -> dict[str, FileRecord]:
    """Write the tensors ``stored``, and the index if there are several files. In the directory of ``source`` itself,
    files that have nothing else become links; elsewhere, another program may write to what it finds."""
    of_file = _whole_files(stored) if target == source.path else {}
    linked = {name for names in of_file.values() for name in names}
    shards = [*of_file.values(), *_shards({name: each for name, each in stored.items() if name not in linked}, limit)]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(shards) > 1 else [SINGLE_FILE]
    needed, free = sum(_size(stored[each]) for shard in shards[len(of_file) :] for each in shard), free_disk(target)
    if needed > free:
        raise CannotSave(
            f"{target}: the model takes {format_bytes(needed)}, and {format_bytes(free)} are free on this disk"
        )
    written = {}
    former = LinkableFiles(source.path, source.manifest.files)
    for name, file in zip(names, of_file, strict=False):
        link = UnchangedFile(name, source.manifest.files[file], source.file(file), former)
        written[name] = link.write_to(target, advance)
    for name, shard in list(zip(names, shards, strict=True))[len(of_file) :]:
        pieces = _tensor_file({each: stored[each] for each in shard}, tied, source)
        written[name] = write_hashed(target / name, pieces, advance)
    # A reader that takes every file of safetensors would take those of the checkpoint's other states, too.
    if len(shards) > 1 or target == source.path:
        where = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
        content = {"metadata": {"total_size": sum(map(_size, stored.values()))}, "weight_map": where}
        written[SHARD_INDEX] = write_hashed(target / SHARD_INDEX, [json.dumps(content, indent=2).encode()], advance)
    return written


def _whole_files(stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """The files that have these tensors whole, and no part of another; each with its tensors."""
    found: dict[str, list[str]] = {}
    torn = set()
    for name, each in stored.items():
        for chunk in each.chunks:
            found.setdefault(chunk.file, []).append(name)
            if chunk.box.shape != each.shape:
                torn.add(chunk.file)
    return {file: found[file] for file in sorted(found.keys() - torn)}


def _shards(stored: Mapping[str, StoredTensor], limit: int) -> list[list[str]]:
    """Names in order, split where the next tensor would exceed ``limit``."""
    shards: list[list[str]] = []
    room = 0
    for name, each in stored.items():
        if not shards or (shards[-1] and _size(each) > room):
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _size(each)
    return shards


def _size(stored: StoredTensor) -> int:
    return byte_count(stored.shape, stored.dtype)


def _tensor_file(
    stored: Mapping[str, StoredTensor], tied: Mapping[str, str], source: Checkpoint
) -> Iterator[filesystem.Buffer]:
    """A file of safetensors in pieces; ``tied``: further names, for its metadata."""
    chunks = [
        TensorChunk(name, each.dtype, each.shape, (0,) * len(each.shape), each.shape) for name, each in stored.items()
    ]
    layout = FileLayout.of(chunks, {alias: name for alias, name in tied.items() if name in stored})
    yield layout.header
    reader = ChunkReader(source)
    for number in layout.order:
        yield reader.full_tensor(stored[chunks[number].name]).reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter: its folder, ``""`` if it is the default one; its configuration; and the names of its tensors in the
    model, by those in peft's file."""

    folder: str
    configuration: Mapping[str, Any]
    names: Mapping[str, str]

    def of(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Its tensors, by their names in peft's file."""
        return {name: stored[each] for name, each in self.names.items()}


def _adapters(where: str, configurations: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> list[_Adapter]:
    """The adapters in a model whose tensors have these ``names``; errors are those of :func:`export_adapters`."""
    adapters = []
    for adapter, configuration in configurations.items():
        # The folder is never outside target, whatever name the checkpoint's settings have.
        if adapter in ("", ".", "..") or set(adapter) & set("/\\\0"):
            raise DamagedCheckpoint(f"{where}: {adapter!r} is not a name that an adapter's folder can have")
        if configuration.get("bias", "none") != "none":
            raise ConfigurationError(
                f"{where}: adapter {adapter}: bias={configuration['bias']!r} trains biases of the base model, which an "
                "adapter folder has no unique names for; export the whole model instead"
            )
        prefixes = (*_ADAPTER_PREFIXES, f"{configuration.get('peft_type')}_".lower())
        found = {each: name for name in names if (each := _name_in_adapter(name, adapter, prefixes)) is not None}
        if not found:
            raise NotFound(f"{where}: contains no tensors of the adapter {adapter!r}")
        adapters.append(_Adapter("" if adapter == _DEFAULT_ADAPTER else adapter, configuration, found))
    return adapters


def _write_adapter(
    source: Checkpoint,
    target: Path,
    adapter: _Adapter,
    stored: Mapping[str, StoredTensor],
    advance: Advance = lambda count: None,
) -> dict[str, FileRecord]:
    text = json.dumps({**adapter.configuration, "inference_mode": True}, indent=2, sort_keys=True)
    contents: dict[str, Iterable[filesystem.Buffer]] = {
        ADAPTER_TENSORS: _tensor_file(adapter.of(stored), {}, source),
        _ADAPTER_CONFIGURATION: [text.encode()],
    }
    place = Path(adapter.folder)
    filesystem.make_directory(target / place)
    return {
        (place / name).as_posix(): write_hashed(target / place / name, pieces, advance)
        for name, pieces in contents.items()
    }


def _expect_no_adapter(place: Path) -> None:
    if present := [name for name in (_ADAPTER_CONFIGURATION, ADAPTER_TENSORS) if (place / name).exists()]:
        raise ConfigurationError(f"{place}: contains {present[0]} already; choose another directory")


def peft_configurations(model: nn.Module) -> Mapping[str, Any]:
    """Those of the adapters in a model, by the adapter; none, if there is no adapter of peft."""
    found = next((found for each in model.modules() if (found := getattr(each, "peft_config", None))), None)
    return found if isinstance(found, Mapping) else {}


def _is_of_transformers(model: nn.Module) -> bool:
    classes = [(each.__module__.partition(".")[0], each.__name__) for each in type(model).__mro__]
    return ("transformers", "PreTrainedModel") in classes


def _settings_in(saved: SavedStates) -> Mapping[str, Any]:
    return saved.state(SETTINGS) if SETTINGS in saved else {}


def _adapter_configurations(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for setting, value in settings.items():
        if setting.startswith(ADAPTERS):
            adapter, _, name = setting.removeprefix(ADAPTERS).partition(".")
            found.setdefault(adapter, {})[name] = value
    return found


def _name_in_adapter(name: str, adapter: str, prefixes: tuple[str, ...]) -> str | None:
    """``base_model.model.q_proj.lora_A.weight`` for ``q_proj.lora_A.default.weight``, whatever the model is part of.
    None for a tensor that is not the adapter's: modules of the model may have the adapter's name, too."""
    parts = name[name.find(_ROOT) + len(_ROOT) :].split(".") if _ROOT in name else name.split(".")
    pairs = enumerate(itertools.pairwise(parts), start=1)
    position = next((at for at, (owner, part) in pairs if part == adapter and owner.startswith(prefixes)), None)
    if position is None:
        return None
    before, after = parts[:position], parts[position + 1 :]
    if before[-1] == _OF_TRAINED_MODULE:
        before = before[:-1]
    if before[-1] == _MAGNITUDE:
        after = []
    return _ROOT + ".".join([*before, *after])
