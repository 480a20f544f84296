"""Adapters of peft (LoRA, DoRA, IA³, …): export as a folder for ``PeftModel``.

A checkpoint has the adapters' tensors under the names of the whole model, and their configuration among the run's
settings. peft's own files have neither the adapter's name in their tensors' names nor the base::

    adapter_config.json
    adapter_model.safetensors
    other/…                      a further adapter, by its name
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalsegno.checkpoint.format.index import Index
from dalsegno.checkpoint.format.keys import ADAPTERS, MODEL, SETTINGS
from dalsegno.checkpoint.format.manifest import Checkpoint
from dalsegno.checkpoint.format.stored_tensors import StoredTensor
from dalsegno.checkpoint.load.states import SavedStates
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, NotFound
from dalsegno.system import filesystem

from .export import Exported, averages, check_types, checkpoint_to_export, size_of, tensor_file

CONFIGURATION = "adapter_config.json"
TENSORS = "adapter_model.safetensors"

_DEFAULT = "default"
_ROOT = "base_model.model."
"""Prefix of all names in peft's files."""
_OF_TRAINED_MODULE = "modules_to_save"
_MAGNITUDE = "lora_magnitude_vector"
"""DoRA's vector, whose name in peft's files ends here."""
_PREFIXES = ("lora_", "hada_", "trainable_tokens_", _OF_TRAINED_MODULE)
"""Of the modules that contain an adapter under its name; besides them, a tuner's own are prefixed with its type."""


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
        ConfigurationError: if a folder to write contains an adapter, or a configuration trains biases (``bias="all"``).
        CannotSave: if a tensor has a dtype that safetensors lacks.
    """
    target = Path(folder)
    _check_free(target)
    source = checkpoint_to_export(checkpoint, best=best)
    index, saved = Index.of_checkpoint(source), SavedStates(source)
    stored = index.of(MODEL) | (averages(index, average) if average is not None else {})
    configurations = _configurations(saved.state(SETTINGS) if SETTINGS in saved else {})
    if not configurations:
        raise NotFound(f"{source.path}: has no adapters: its settings contain no configuration of peft")
    planned = []
    for adapter, configuration in configurations.items():
        place = _place_of(adapter, target, source)
        _check_free(place)
        if configuration.get("bias", "none") != "none":
            raise ConfigurationError(
                f"adapter {adapter}: bias={configuration['bias']!r} trains biases of the base model, which an adapter "
                "folder has no unique names for; export the whole model instead"
            )
        tensors = _tensors_of(adapter, configuration, stored)
        if not tensors:
            raise NotFound(f"{source.path}: contains no tensors of the adapter {adapter!r}")
        check_types(source, tensors)
        planned.append((place, configuration, tensors))
    files, size, count = [], 0, 0
    for place, configuration, tensors in planned:
        filesystem.make_directory(place)
        filesystem.replace_durably_in_pieces(place / TENSORS, tensor_file(tensors, {}, source))
        text = json.dumps({**configuration, "inference_mode": True}, indent=2, sort_keys=True)
        filesystem.replace_durably(place / CONFIGURATION, text.encode())
        files += [place / TENSORS, place / CONFIGURATION]
        size, count = size + sum(map(size_of, tensors.values())), count + len(tensors)
    return Exported(source.path, files, size, count, {}, [], [])


def _check_free(place: Path) -> None:
    if present := [name for name in (CONFIGURATION, TENSORS) if (place / name).exists()]:
        raise ConfigurationError(f"{place}: contains {present[0]} already; choose another directory")


def _place_of(adapter: str, target: Path, source: Checkpoint) -> Path:
    """Folder that an adapter is written to: never outside ``target``, whatever name the checkpoint's settings have."""
    if adapter in ("", ".", "..") or set(adapter) & set("/\\\0"):
        raise DamagedCheckpoint(f"{source.path}: {adapter!r} is not a name that an adapter's folder can have")
    return target if adapter == _DEFAULT else target / adapter


def _configurations(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configuration of each adapter, from a run's settings."""
    found: dict[str, dict[str, Any]] = {}
    for setting, value in settings.items():
        if setting.startswith(ADAPTERS):
            adapter, _, name = setting.removeprefix(ADAPTERS).partition(".")
            found.setdefault(adapter, {})[name] = value
    return found


def _tensors_of(
    adapter: str, configuration: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """An adapter's tensors, by their names in peft's file."""
    prefixes = (*_PREFIXES, f"{configuration.get('peft_type')}_".lower())
    named = ((_exported_name(name, adapter, prefixes), each) for name, each in stored.items())
    return {name: each for name, each in named if name is not None}


def _exported_name(name: str, adapter: str, prefixes: tuple[str, ...]) -> str | None:
    """``base_model.model.q_proj.lora_A.weight`` for ``q_proj.lora_A.default.weight``, whatever the model is part of.

    None for a tensor that is not the adapter's: modules of the model may have the adapter's name, too.
    """
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
