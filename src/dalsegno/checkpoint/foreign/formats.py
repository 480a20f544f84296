"""The files of each program: how they are recognized, read and written. No program needs to be installed."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dalsegno.checkpoint.export import SHARD_INDEX, SINGLE_FILE
from dalsegno.checkpoint.foreign import pickles
from dalsegno.checkpoint.foreign.run_state import Found, Place, RunState, at_step
from dalsegno.checkpoint.sharding import Box
from dalsegno.checkpoint.tensor_files import as_bytes
from dalsegno.checkpoint.tensor_reader import part
from dalsegno.checkpoint.weights import Weights
from dalsegno.errors import ConfigurationError, DamagedCheckpoint
from dalsegno.system import filesystem


@dataclass(frozen=True, slots=True)
class Program:
    """
    Attributes:
        name: in messages.
        is_at: whether a path is such a checkpoint, by names of files only.
        read: read everything that a run here can use.
        write: write what the program resumes from, with a prefix before the names of tensors; returns the files. The
            target does not exist, or contains the model as safetensors.
        has_safetensors: whether the model is in files of safetensors, as ``export_model`` writes them.
        has_all_schedules: whether there is a place for more than one.
        left_out: what else has no place in the files, with the reason.
    """

    name: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], Found]
    write: Callable[[RunState, Path, str], list[Path]]
    has_safetensors: bool = False
    has_all_schedules: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


# --- folders of Hugging Face's Trainer (checkpoint-500), and of Accelerate's save_state -----------------------------
#
# model.safetensors, or several with model.safetensors.index.json    (pytorch_model.bin in older ones)
# optimizer.pt   scheduler.pt   trainer_state.json                   of the Trainer: state_dicts, pickled; progress
# optimizer.bin  scheduler.bin  scaler.pt  random_states_0.pkl …     of Accelerate; the last ones of each rank

_STATE = "trainer_state.json"
_SETTINGS = {
    "max_steps": "max_steps of the schedule",
    "train_batch_size": "per_device_train_batch_size",
    **{name: name for name in ("logging_steps", "eval_steps", "save_steps")},
}
"""Those in its state, which win over the arguments of a trainer that resumes, by their names here. Hugging Face's
trainer divides by them: 0, which turns a schedule off here, is left out."""
_RANDOM = "random_states_"
_SCALER = "scaler.pt"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_ADAPTER = "adapter_model.safetensors"


def _read_trainer(folder: Path) -> Found:
    path = folder / _STATE
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
    known = ("model.", "model-", _PICKLED_WEIGHTS, "optimizer.bin", "scheduler.bin", _RANDOM, _SCALER)
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
    if (folder / _ADAPTER).is_file():
        raise ConfigurationError(
            f"{folder}: contains only the weights of an adapter ({_ADAPTER}), and no whole model; merge the adapter "
            "into its base model first, or begin a new run with the merged weights"
        )
    raise ConfigurationError(
        f"{folder}: contains neither {SINGLE_FILE} nor {SHARD_INDEX} nor {_PICKLED_WEIGHTS}; weights that DeepSpeed "
        "or FSDP has sharded are not read: convert them first with that program's own tool"
    )


def _write_trainer(run: RunState, target: Path, prefix: str) -> list[Path]:
    """The folder from which a trainer with the same parameter groups resumes (``resume_from_checkpoint=``)."""
    progress = {
        "global_step": run.step,
        "epoch": run.place.position,
        **{theirs: run.settings[ours] for theirs, ours in _SETTINGS.items() if run.settings.get(ours)},
        # Its next save replaces the first, and appends to the second; it raises KeyError for one that is not there.
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}, "EarlyStoppingCallback": []},
    }
    files = _write_folder(HUGGING_FACE.name, run, target, "pt")
    filesystem.replace_durably(target / _STATE, json.dumps(progress, indent=2).encode())
    return [*files, target / _STATE]


def _write_accelerate(run: RunState, target: Path, prefix: str) -> list[Path]:
    """The folder that ``accelerator.load_state`` loads, with as many processes as the run had: each of them advances a
    schedule of a function once in a step."""
    schedulers = [at_step(each.get("last_epoch", 0) * run.world_size, each) for each in run.schedulers]
    files = _write_folder(ACCELERATE.name, replace(run, schedulers=schedulers), target, "bin")
    scaler = torch.amp.GradScaler("cpu").state_dict()  # which fp16 asks for
    return [*files, pickles.save(scaler, target / _SCALER)]


def _write_folder(program: str, run: RunState, target: Path, suffix: str) -> list[Path]:
    files = [pickles.save(run.expect_optimizer(program).numbered(), target / f"optimizer.{suffix}")]
    if run.schedulers:
        files.append(pickles.save(run.schedulers[0], target / f"scheduler.{suffix}"))
    return files


HUGGING_FACE = Program(
    "Hugging Face Trainer",
    is_at=lambda path: (path / _STATE).is_file(),
    read=_read_trainer,
    write=_write_trainer,
    has_safetensors=True,
)
ACCELERATE = Program(
    "Accelerate",
    is_at=lambda path: (path / f"{_RANDOM}0.pkl").is_file() or (path / "optimizer.bin").is_file(),
    read=_read_accelerate,
    write=_write_accelerate,
    has_safetensors=True,
    left_out={"step, epoch and place in the data": "no file for it: your loop counts them"},
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

    key, optimizer, scheduler, epoch = (
        found(_MODEL),
        found(_OPTIMIZER),
        found(_SCHEDULER),
        found(("epoch",), int | float),
    )
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


def _dict_of(run: RunState, prefix: str, optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "model": run.state_dict(prefix),
        "step": run.step,
        "epoch": run.place.position,
        **({"lr_scheduler": dict(run.schedulers[0])} if run.schedulers else {}),
        **({"optimizer": optimizer} if optimizer is not None else {}),
    }


def _write_torch(run: RunState, target: Path, prefix: str) -> list[Path]:
    optimizer = None if run.optimizer is None else run.optimizer.numbered()
    return [pickles.save(_dict_of(run, prefix, optimizer), target)]


TORCH = Program(
    "torch.save",
    is_at=lambda path: path.is_file() and path.suffix != ".safetensors",
    read=lambda path: _read_dict(pickles.load(path), path),
    write=_write_torch,
)

# --- files .ckpt of Lightning ---------------------------------------------------------------------------------------
#
# state_dict: of the LightningModule: a model in its attribute net has names that begin with net.

_VERSION = "pytorch-lightning_version"
_LAYOUT = "2.0.0"
"""The version since which the layout is this one."""
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


def _write_lightning(run: RunState, target: Path, prefix: str) -> list[Path]:
    """The file from which ``trainer.fit(module, ckpt_path=…)`` resumes."""
    content = {
        "epoch": run.place.epoch,
        "global_step": run.step,
        _VERSION: _LAYOUT,
        "state_dict": run.state_dict(prefix),
        "loops": {"fit_loop": _progress_of(run)},
        "callbacks": {},
        "optimizer_states": [run.expect_optimizer(LIGHTNING.name).numbered()],
        "lr_schedulers": [dict(each) for each in run.schedulers],
    }
    return [pickles.save(content, target)]


def _progress_of(run: RunState) -> dict[str, Any]:
    """Counts of the loops. Lightning takes its ``global_step`` from the optimizer's."""
    steps = {"ready": run.step, "completed": run.step}
    both = {"total": steps, "current": steps}
    batches = dict.fromkeys(("ready", "completed", "started", "processed"), run.place.microbatches or 0)
    done = run.place.epoch
    epochs = {"ready": done + 1, "completed": done, "started": done + 1, "processed": done}
    gradients = {**steps, "started": run.step}
    return {
        "epoch_progress": {"total": epochs, "current": epochs},
        "epoch_loop.state_dict": {"_batches_that_stepped": run.step},
        "epoch_loop.batch_progress": {"total": batches, "current": batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": both,
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": both, "zero_grad": {"total": gradients, "current": gradients}}
        },
    }


LIGHTNING = Program(
    "Lightning",
    is_at=lambda path: path.is_file() and path.suffix == ".ckpt",
    read=_read_lightning,
    write=_write_lightning,
    has_all_schedules=True,
)

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


def _write_dcp(run: RunState, target: Path, prefix: str) -> list[Path]:
    """A folder for ``dcp.load``: what a file of torch.save has, the optimizer by name."""
    if run.optimizer is not None and run.optimizer.is_by_position:
        raise ConfigurationError(
            "the optimizer's parameters have only positions, as imported; DCP needs names, which the first "
            "checkpoint of a run that resumes here has"
        )
    optimizer = None if run.optimizer is None else run.optimizer.state_dict(lambda name: f"{prefix}{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves
        dcp_save(_dict_of(run, prefix, optimizer), checkpoint_id=target, no_dist=True)
    return sorted(target.iterdir())


DCP = Program(
    "Distributed Checkpoint (DCP)",
    is_at=lambda path: (path / _METADATA).is_file(),
    read=_read_dcp,
    write=_write_dcp,
)

PROGRAMS: Mapping[str, Program] = {
    "hf": HUGGING_FACE,
    "accelerate": ACCELERATE,
    "dcp": DCP,
    "lightning": LIGHTNING,
    "torch": TORCH,
}
"""By key; in the order in which a folder is recognized."""
