"""RecordedSettings: the settings of a run, saved in each checkpoint, so that a later leg can compare its own."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dalsegno.checkpoint.compatibility import END_OF_SCHEDULE, SCHEDULE, Change, reasons_to_differ
from dalsegno.checkpoint.export import peft_configurations
from dalsegno.checkpoint.names import ADAPTERS
from dalsegno.data import NOT_EXACT, TrainingData
from dalsegno.data.digests import digest
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import environment_of
from dalsegno.distributed.modes import modes_of
from dalsegno.distributed.parallel.base import gathered_dtype
from dalsegno.distributed.sharded_tensors import device_of, strip_wrappers
from dalsegno.logs.values import decode, encode

from .learning_rate import InitialHyperparameters, has_end, planned_steps
from .optimizers import takes_adam_settings
from .parts import RunParts

logger = logging.getLogger("dalsegno")

_OPTIMIZER_SETTINGS = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
"""Settings of the default optimizer, and its own names for them."""

_ADAM_SETTINGS = {name for name in _OPTIMIZER_SETTINGS if name.startswith("adam_")}
_OF_OPTIMIZER = {"optim", "optim_args"}
_LOADER_SETTINGS = {"per_device_train_batch_size"}  # and every name that begins with dataloader_
_LOOP_SETTINGS = {
    "per_device_eval_batch_size",
    "max_grad_norm",
    "bf16",
    "fp16",
    "fuse_optim_with_backward",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "parallel",
    "use_cpu",
}
_NOT_RECORDED = {
    "output_dir",
    "local_dir",
    "take_over_lock",
    "on_resume",
    "run_name",
    "report_to",
    "save_pretrained",
    "disable_tqdm",
    "max_seconds",
    "requeue",
    "max_steps",
    "num_train_epochs",
}
"""Settings without an effect on the result; and the length of the run, which is recorded under another name."""


@dataclass(frozen=True, slots=True)
class UserSupplied:
    """Parts that the user supplies: the settings of the default ones then have no effect."""

    optimizer: bool = True
    schedule: bool = True
    loader: bool = True
    loop: bool = True


class RecordedSettings:
    """The component ``settings``: plain values, by name, of the settings that have an effect; and the fingerprint of
    the training ``data``."""

    state_compared = False  # only rank 0 fingerprints the data of a loader of the user's own

    def __init__(self, parts: RunParts, supplied: UserSupplied, data: TrainingData) -> None:
        self._args = parts.args
        self._parts = parts
        self._supplied = supplied
        self.initial = InitialHyperparameters(parts.optimizer, parts.schedulers)
        self._schedulers = [type(each).__name__ for each in parts.schedulers]
        self._loader = parts.loader
        self._data = data
        self._adapters = adapter_settings(parts.model)
        self._order = _order(parts)
        self._fingerprint: dict[str, Any] | None = None
        self._planned_steps = -1

    def begin_session(self) -> None:
        """Fingerprint the training data, once in this process. Collective: raises ConfigurationError if the ranks have
        different datasets."""
        if self._fingerprint is None:
            self._fingerprint, doubts = self._data.examine()
            if doubts and self._args.saving and collectives.rank() == 0:
                text = "a resumed run will not read what an uninterrupted one does:\n  " + "\n  ".join(doubts)
                logger.warning("%s", text, extra={NOT_EXACT: True})

    def plan_steps(self) -> None:
        """Set ``state.max_steps``, and apply a changed end of the schedule."""
        former, self._planned_steps = self._planned_steps, planned_steps(self._args, self._loader)
        self._parts.state.max_steps = self._planned_steps
        if former not in (-1, self._planned_steps) and not self._supplied.schedule:
            self.initial.reapply_schedule()

    @property
    def sets_learning_rate(self) -> bool:
        """Whether ``learning_rate`` has an effect; otherwise the user's optimizer and schedule determine the rate."""
        return self._has_effect("learning_rate")

    def apply_overrides(self, changes: Iterable[Change]) -> None:
        """Set the hyperparameters that the user has changed since the save: loading the optimizer restored the old."""
        if self.initial.follow_groups() and self._supplied.schedule and collectives.rank() == 0:
            logger.warning(
                "lr_scheduler: the checkpoint has a parameter group that the training has added, and no functions; its "
                "factors are those of the group before. If your callback has appended another function, pass the "
                "schedule one for each group from the beginning"
            )
        changed = {change.setting for change in changes}
        names = {_OPTIMIZER_SETTINGS[setting] for setting in changed & _OPTIMIZER_SETTINGS.keys()}
        if "optim_args" in changed:
            names |= self.initial.values().keys() - {"lr"}
        if "optimizer" in changed or "lr" in names:
            self.initial.restore_lrs()
        elif changed & {*SCHEDULE, END_OF_SCHEDULE}:
            self.initial.reapply_schedule()
        self.initial.restore(*(names - {"lr"}))

    def differences_from(self, recorded: Mapping[str, Any]) -> list[str]:
        """Reasons why steps differ from those of a leg with the settings ``recorded``."""
        return reasons_to_differ(recorded, decode(encode(self.state_dict())))

    def state_dict(self) -> dict[str, Any]:
        environment = environment_of(device_of(self._parts.model), self._parts.layout)
        return {**self._recorded(), **self._adapters, **environment, "dataset": self._fingerprint}

    def _recorded(self) -> dict[str, Any]:
        args, supplied = self._args, self._supplied
        values = {name: value for name, value in args.to_dict().items() if self._has_effect(name)}
        if not supplied.schedule and has_end(args):
            values[END_OF_SCHEDULE] = planned_steps(args, self._loader)
        elif args.max_steps > 0:
            values["max_steps"] = args.max_steps
        else:
            values["num_train_epochs"] = args.num_train_epochs
        if supplied.schedule:
            values["lr_scheduler"] = self._schedulers
        if supplied.optimizer or supplied.schedule:
            values |= {f"optimizer.{name}": value for name, value in self.initial.values().items()}
        samples = self._loader.samples_per_microbatch()
        gathered = gathered_dtype(self._parts.model, modes_of(args.parallel), bf16=args.bf16)
        if gathered is not None and not supplied.loop and collectives.world_size() > 1:
            values["gathered_dtype"] = str(gathered)
        if not supplied.loop:
            values["order of parameters"] = self._order
        if samples is not None:
            sizes = {step: samples * count for step, count in args.accumulation.values.items()}
            values["samples per step"] = sizes[0] if len(sizes) == 1 else str(sizes)
        return values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the saved settings are compared before anything is loaded."""

    def _has_effect(self, name: str) -> bool:
        supplied = self._supplied
        if name in _ADAM_SETTINGS and not takes_adam_settings(self._args):
            return False
        if name in _OF_OPTIMIZER:
            return not supplied.optimizer
        if name in _OPTIMIZER_SETTINGS:
            return not (supplied.optimizer or supplied.schedule)
        if name in SCHEDULE:
            return not supplied.schedule
        if name in _LOADER_SETTINGS or name.startswith("dataloader_"):
            return not supplied.loader
        return name not in _NOT_RECORDED and not (supplied.loop and name in _LOOP_SETTINGS)


def _order(parts: RunParts) -> str:
    """The order of the optimizer's parameters, in which the squares of their gradients are added."""
    modules = parts.modules.values()
    names = {id(each): strip_wrappers(name) for module in modules for name, each in module.named_parameters()}
    order = [names.get(id(each), "") for group in parts.optimizer.param_groups for each in group["params"]]
    return f"{order[0]} … {order[-1]} ({digest(order)[:8]})"


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """Configuration of each of peft's adapters in a model, as plain values by ``adapters.<adapter>.<name>``."""
    return {
        f"{ADAPTERS}{adapter}.{name}": _plain(value)
        for adapter, configuration in peft_configurations(model).items()
        for name, value in configuration.to_dict().items()
    }


def _plain(value: Any) -> Any:
    """A configuration value as JSON; None if it cannot be represented."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return str(value) if isinstance(value, torch.dtype) else None
