"""The files of each program: how they are recognized, and what they contain. No program needs to be installed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from dalsegno.checkpoint.export import ADAPTER_TENSORS, SHARD_INDEX, SINGLE_FILE
from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import as_bytes, part
from dalsegno.checkpoint.weights import Weights
from dalsegno.errors import ConfigurationError, DamagedCheckpoint


@dataclass(frozen=True, slots=True)
class Place:
    """Position in the data. Within the epoch it is known as a fraction, as a number of micro-batches, or not at all."""

    epoch: int = 0
    """Finished epochs."""
    fraction: float | None = None
    """Consumed micro-batches of the epoch, as a fraction of all."""
    microbatches: int | None = None
    """Consumed micro-batches of the epoch, on each rank."""

    @classmethod
    def at(cls, position: float) -> Place:
        """Passes over the data, such as 1.25."""
        finished = math.floor(position + 1e-9)
        return cls(finished, max(0.0, position - finished))

    @property
    def is_known(self) -> bool:
        return self.fraction is not None or self.microbatches is not None

    @property
    def position(self) -> float:
        """Passes over the data, as far as known."""
        return self.epoch + (self.fraction or 0.0)


@dataclass(frozen=True, slots=True)
class Found:
    """What the files of a program contain: the model's tensors by their names there, beside values that are not
    tensors; the ``optimizer``'s ``state_dict`` and its place, for messages; ``step`` and ``place``, if saved.
    ``processes``: that each advance a schedule of a function once in a step. ``program``: if the files are of another
    one than usual."""

    tensors: Mapping[str, Any]
    optimizer: tuple[Any, str]
    step: object = None
    place: Place = Place()
    schedulers: Sequence[Mapping[str, Any]] = ()
    processes: int = 1
    unknown: Iterable[object] = ()
    callbacks: Iterable[object] = ()
    program: str | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """``is_at``: whether a path is such a checkpoint, by names of files only."""

    name: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], Found]


# --- folders of Hugging Face's Trainer (checkpoint-500), and of Accelerate's save_state -----------------------------
#
# model.safetensors, or several with model.safetensors.index.json    (pytorch_model.bin in older ones)
# optimizer.pt   scheduler.pt   trainer_state.json                   of the Trainer: state_dicts, pickled; progress
# optimizer.bin  scheduler.bin  scaler.pt  random_states_0.pkl …     of Accelerate; the last ones of each rank

TRAINER_STATE = "trainer_state.json"
_RANDOM = "random_states_"
_PICKLED_WEIGHTS = "pytorch_model.bin"


def _read_trainer(folder: Path) -> Found:
    path = folder / TRAINER_STATE
    try:
        state = json.loads(path.read_text())  # may contain NaN
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: is not JSON ({error})") from error
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise DamagedCheckpoint(f"{path}: has no global_step")
    return replace(
        _read_folder(folder, "pt"),
        step=state["global_step"],
        place=Place.at(float(state.get("epoch") or 0.0)),
        callbacks=state.get("stateful_callbacks") or (),
    )


def _read_accelerate(folder: Path) -> Found:
    known = ("model.", "model-", _PICKLED_WEIGHTS, "optimizer.bin", "scheduler.bin", _RANDOM, "scaler.pt")
    names = sorted(each.name for each in folder.iterdir())
    return replace(
        _read_folder(folder, "bin"),
        unknown=[name for name in names if not name.startswith(known)],
        processes=sum(name.startswith(_RANDOM) for name in names),
    )


def _read_folder(folder: Path, suffix: str) -> Found:
    optimizer, scheduler = (folder / f"{name}.{suffix}" for name in ("optimizer", "scheduler"))
    states = pickles.load(optimizer) if optimizer.is_file() else None
    schedulers = [pickles.load(scheduler)] if scheduler.is_file() else []
    return Found(_weights(folder), (states, str(optimizer)), schedulers=schedulers)


def _weights(folder: Path) -> Mapping[str, Any]:
    """The model's tensors, as safetensors or else pickled. Raises ConfigurationError if there is no whole model."""
    if (folder / SINGLE_FILE).is_file() or (folder / SHARD_INDEX).is_file():
        return Weights.open(folder).read_all()
    if (folder / _PICKLED_WEIGHTS).is_file():
        tensors: Mapping[str, Any] = pickles.load(folder / _PICKLED_WEIGHTS)
        return tensors
    if (folder / ADAPTER_TENSORS).is_file():
        raise ConfigurationError(
            f"{folder}: contains only the weights of an adapter ({ADAPTER_TENSORS}), and no whole model; merge the "
            "adapter into its base model first, or begin a new run with the merged weights"
        )
    raise ConfigurationError(
        f"{folder}: contains neither {SINGLE_FILE} nor {SHARD_INDEX} nor {_PICKLED_WEIGHTS}; weights that DeepSpeed "
        "or FSDP has sharded are not read: convert them first with that program's own tool"
    )


# --- files of torch.save: a dict with the states of model and optimizer, under the names that people give them; or the
# model's state_dict itself ------------------------------------------------------------------------------------------

_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict", "opt")
_SCHEDULER = ("lr_scheduler", "scheduler", "lr_scheduler_state_dict", "scheduler_state_dict", "sched")
_STEP = ("global_step", "step", "iteration", "iter_num", "iter", "steps")
_KNOWN = {*_MODEL, *_OPTIMIZER, *_SCHEDULER, *_STEP, "epoch"}


def _read_dict(content: Any, path: Path) -> Found:
    if not isinstance(content, Mapping):
        raise ConfigurationError(f"{path}: contains a {type(content).__name__}, not a dict with a model's state")

    def found(keys: tuple[str, ...], kind: Any = Mapping) -> str | None:
        return next((key for key in keys if isinstance(content.get(key), kind)), None)

    key, optimizer, scheduler = found(_MODEL), found(_OPTIMIZER), found(_SCHEDULER)
    epoch = found(("epoch",), int | float)
    tensors = content if key is None else content[key]
    names = {name for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    if not names:
        keys = ", ".join(map(str, content))
        raise ConfigurationError(f"{path}: contains no model's state_dict; its keys are {keys}")
    return Found(
        tensors,
        (content.get(optimizer), f"{path}: {optimizer}"),
        step=content.get(found(_STEP, int | torch.Tensor)),
        place=Place.at(content[epoch]) if epoch else Place(),
        schedulers=[content[scheduler]] if scheduler else [],
        unknown=[name for name in content if name not in _KNOWN | names],
    )


# --- files .ckpt of Lightning ---------------------------------------------------------------------------------------
#
# state_dict: of the LightningModule: a model in its attribute net has names that begin with net.

_VERSION = "pytorch-lightning_version"
_PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops", "callbacks", _VERSION)


def _read_lightning(path: Path) -> Found:
    content = pickles.load(path)
    if not isinstance(content, Mapping) or _VERSION not in content:
        raise ConfigurationError(f"{path}: has no {_VERSION}, so Lightning did not write it; try program='torch'")
    optimizers = content.get("optimizer_states") or [None]
    if len(optimizers) > 1:
        raise ConfigurationError(f"{path}: contains {len(optimizers)} optimizers; a run here has one")
    return Found(
        content["state_dict"],
        (optimizers[0], f"{path}: optimizer_states[0]"),
        step=content.get("global_step"),
        place=_place_of(content),
        schedulers=content.get("lr_schedulers") or [],
        unknown=[name for name in content if name not in _PARTS],
        callbacks=content.get("callbacks") or (),
    )


def _place_of(content: Mapping[str, Any]) -> Place:
    """From the progress of the loops. A run that has ended counts an epoch as completed that it left in the middle."""
    loops = content.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in loops:
        return Place(int(content.get("epoch") or 0))
    begun, batches = loops["epoch_progress"]["current"]["ready"], loops["epoch_loop.batch_progress"]
    if batches["is_last_batch"] or not begun:
        return Place(begun, 0.0)
    return Place(begun - 1, microbatches=batches["current"]["processed"])


# --- folders of PyTorch's Distributed Checkpoint (DCP), such as torchtitan's step-500 -------------------------------
#
# .metadata                        a pickle: names, shapes, and where each chunk is
# __0_0.distcp  __1_0.distcp  …    chunks and other items, each a pickle of torch.save
#
# torchtitan saves the model's tensors under their own names, beside optimizer, lr_scheduler, dataloader, train_state;
# other programs as they like, mostly model and optimizer.

_METADATA = ".metadata"


def _read_dcp(folder: Path) -> Found:
    with pickles.refusal(folder):
        content = _items_of(folder)
    if isinstance(optimizer := content.get("optimizer"), Mapping):
        content["optimizer"] = _nested(optimizer) if "state" not in optimizer else _with_numbers(optimizer)
    if isinstance(progress := content.pop("train_state", None), Mapping):
        return replace(_read_dict(content | {"step": int(progress["step"])}, folder), program="torchtitan")
    return _read_dict(content, folder)


def _items_of(folder: Path) -> dict[str, Any]:
    with (folder / _METADATA).open("rb") as file:
        metadata = pickles.MetadataUnpickler(file).load()
    if not hasattr(metadata, "state_dict_metadata"):
        raise ValueError(f"{_METADATA} describes no checkpoint")
    content: dict[str, Any] = {}
    first: dict[object, torch.Tensor] = {}
    paths = metadata.planner_data or {}
    stored = {(key.fqn, getattr(key, "offset", None)): each for key, each in metadata.storage_data.items()}
    for name, description in metadata.state_dict_metadata.items():
        if hasattr(description, "chunks"):
            value = torch.empty(description.size, dtype=description.properties.dtype)
            if sum(math.prod(chunk.sizes) for chunk in description.chunks) != value.numel():
                raise ValueError(f"the chunks of {name} are not the whole tensor")
            for chunk in description.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                part(value, box).copy_(_item(folder, stored[name, chunk.offsets]))
            value = first.setdefault(_identity(value, name), value)
        else:
            value = _item(folder, stored[name, None])
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


# --------------------------------------------------------------------------------------------------------------------

PROGRAMS: Mapping[str, Program] = {
    "hf": Program("Hugging Face Trainer", lambda path: (path / TRAINER_STATE).is_file(), _read_trainer),
    "accelerate": Program(
        "Accelerate",
        lambda path: (path / f"{_RANDOM}0.pkl").is_file() or (path / "optimizer.bin").is_file(),
        _read_accelerate,
    ),
    "dcp": Program("Distributed Checkpoint (DCP)", lambda path: (path / _METADATA).is_file(), _read_dcp),
    "lightning": Program("Lightning", lambda path: path.is_file() and path.suffix == ".ckpt", _read_lightning),
    "torch": Program(
        "torch.save",
        lambda path: path.is_file() and path.suffix != ".safetensors",
        lambda path: _read_dict(pickles.load(path), path),
    ),
}
"""By key; in the order in which a checkpoint is recognized."""
