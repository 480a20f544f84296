"""Names of the files and directories of checkpoints. No other module spells one. Needs no torch.

::

    <output_dir>/checkpoints/
      step-00000500/                            a published checkpoint
        manifest.json                           written last: what it does not name is not part of the checkpoint
        index.json                              every sharded tensor, and which ranks have written it
        model/shard-00000.safetensors           one directory per sharded component, one file per writing rank
        model/frozen-00000.safetensors          parameters that are not trained, in files of their own: hard links to
                                                those of the checkpoint before, if unchanged
        model/frozen-00000.json                 checksums of those that are not saved (save_frozen="never")
        shared.json, shared.safetensors         sidecar: state that all ranks share
        rank-00000.json, rank-00000.safetensors sidecar: state of one rank
        config.json, model.safetensors …        what from_pretrained reads (save_pretrained=True)
      step-00000600.partial/                    being written or deleted; the rename to and from this name is atomic
      step-00000400.damaged/                    failed verification
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Directory of a run's checkpoints, in its ``output_dir``."""

MANIFEST = "manifest.json"
INDEX = "index.json"
SHARED = "shared"
"""Sidecar of the state that all ranks share."""

PARTIAL = ".partial"
DAMAGED = ".damaged"

_FINGERPRINTS = re.compile(r"[^/]+/frozen-\d{5,}\.json")
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-\d{8,}\.partial")
_DAMAGED = re.compile(r"step-(\d{8,})\.damaged(\.\d{4,})?")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Path of the checkpoint of ``step`` in ``directory``, whether it exists or not."""
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Step of a published checkpoint, by its name."""
    name = _STEP.fullmatch(path.name)
    return int(name[1]) if name else None


def partial_path(checkpoint: Path) -> Path:
    """Path at which ``checkpoint`` is written or deleted."""
    return checkpoint.with_name(checkpoint.name + PARTIAL)


def is_partial(path: Path) -> bool:
    return _PARTIAL.fullmatch(path.name) is not None


def quarantined_step_of(path: Path) -> int | None:
    """Step of a checkpoint that failed verification, by its name."""
    name = _DAMAGED.fullmatch(path.name)
    return int(name[1]) if name else None


def component_and_name(full_name: str) -> tuple[str, str]:
    """Component of a tensor, and its name within it. A callback's component contains a dot: ``callbacks.EMA``."""
    component, _, name = full_name.partition(".")
    if component == "callbacks":
        own, _, name = name.partition(".")
        component = f"{component}.{own}"
    return component, name


def shard(component: str, rank: int, *, is_frozen: bool = False) -> str:
    """File of the tensors of ``component`` that ``rank`` writes; of frozen parameters, or of all others."""
    return f"{component}/{'frozen' if is_frozen else 'shard'}-{rank:05d}.safetensors"


def fingerprints(component: str, rank: int) -> str:
    """File of the checksums that ``rank`` writes of frozen parameters of ``component`` that are not saved."""
    return f"{component}/frozen-{rank:05d}.json"


def fingerprints_among(files: Iterable[str]) -> list[str]:
    return sorted(name for name in files if _FINGERPRINTS.fullmatch(name))


def rank_sidecar(rank: int) -> str:
    return f"rank-{rank:05d}"


def sidecar_states(sidecar: str) -> str:
    return f"{sidecar}.json"


def sidecar_tensors(sidecar: str) -> str:
    return f"{sidecar}.safetensors"


def sidecars_among(files: Iterable[str]) -> list[str]:
    """The sidecars' files of states among a checkpoint's ``files``: the shared one, then by rank."""
    shared = sidecar_states(SHARED)
    found = [name for name in files if name == shared or (name.startswith("rank-") and name.endswith(".json"))]
    return sorted(found, key=lambda name: (name != shared, name))


CALLBACKS = "callbacks."
"""Prefix of the keys of callbacks."""

MODEL = "model"
"""Key of the model."""

LOSS = "loss_fn"
"""Key of a loss function with tensors."""

SETTINGS = "settings"
"""Key of the run's settings."""

ADAPTERS = "adapters."
"""Prefix of the settings that have the configurations of a model's adapters: ``adapters.<adapter>.<name>``."""
