"""Settings: what a run is trained with, kept in each checkpoint, so that a later leg can say what has changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dalsegno.checkpoint.load.compatibility import END_OF_SCHEDULE, Change
from dalsegno.data import NOT_EXACT, TrainingData
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of

from .optim import InitialHyperparameters
from .parts import RunParts
from .schedule import planned_steps

logger = logging.getLogger("dalsegno")

_OF_OPTIMIZER = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
"""Settings of the default optimizer, and the names by which it knows them itself."""

_OF_SCHEDULE = {"lr_scheduler_type", "warmup_steps"}
_OF_LOADER = {"per_device_train_batch_size"}  # and all that begins with dataloader_
_OF_LOOP = {
    "per_device_eval_batch_size",
    "max_grad_norm",
    "bf16",
    "fp16",
    "fuse_optim_with_backward",
    "torch_compile",
    "torch_compile_backend",
    "parallel",
    "use_cpu",
}
_OF_NOBODY = {
    "output_dir",
    "local_dir",
    "take_over_lock",
    "run_name",
    "disable_tqdm",
    "max_seconds",
    "max_steps",
    "num_train_epochs",
}
"""What names the run or is for the eye; and the length of the run, which is kept by another name."""


@dataclass(frozen=True, slots=True)
class UserSupplied:
    """Which parts the user brings along, so that the settings that describe the default ones have no effect."""

    optimizer: bool = True
    schedule: bool = True
    loader: bool = True
    loop: bool = True


class RecordedSettings:
    """Plain values by name: the component ``settings``.

    Args:
        parts: of the run. Only settings that have an effect are recorded.
        supplied: the parts that the user brings along.
        data: the training data, for its fingerprint.
    """

    state_compared = False  # only rank 0 fingerprints the data of a loader of the user's own

    def __init__(self, parts: RunParts, supplied: UserSupplied, data: TrainingData) -> None:
        self._args = parts.args
        self._supplied = supplied
        self._initial = InitialHyperparameters(parts.optimizer, parts.schedulers)
        self._schedulers = [type(each).__name__ for each in parts.schedulers]
        self._loader = parts.loader
        self._data = data
        self._device = device_of(parts.model)
        self._fingerprint: dict[str, Any] | None = None
        self._planned_steps = -1

    def begin_session(self) -> None:
        """A leg begins. Look at the data, once in this process, before training does. Collective.

        Raises:
            ConfigurationError: if the ranks are given different datasets.
        """
        former, self._planned_steps = self._planned_steps, planned_steps(self._args, self._loader)
        if former not in (-1, self._planned_steps) and not self._supplied.schedule:
            self._initial.reapply_schedule()
        if self._fingerprint is None:
            self._fingerprint, doubts = self._data.examine()
            if doubts and self._args.saving and collectives.rank() == 0:
                said = "a resumed run will not read what an uninterrupted one does:\n  " + "\n  ".join(doubts)
                logger.warning("%s", said, extra={NOT_EXACT: True})

    def apply_overrides(self, changes: Iterable[Change]) -> None:
        """What a checkpoint has brought back with the optimizer, and the user has changed meanwhile, is the user's."""
        changed = {change.setting for change in changes}
        names = {_OF_OPTIMIZER[setting] for setting in changed & _OF_OPTIMIZER.keys()}
        if "optimizer" in changed or "lr" in names:
            self._initial.restore_lrs()
        elif changed & {*_OF_SCHEDULE, END_OF_SCHEDULE}:
            self._initial.reapply_schedule()
        self._initial.restore(*(names - {"lr"}))

    def restore_lrs(self) -> None:
        """The learning rates of this run, where only the optimizer's state is another's."""
        self._initial.restore_lrs()

    def state_dict(self) -> dict[str, Any]:
        return {**self._given(), **self._environment(), "dataset": self._fingerprint}

    def _given(self) -> dict[str, Any]:
        args, supplied = self._args, self._supplied
        values = {name: value for name, value in args.to_dict().items() if self._has_effect(name)}
        if not supplied.schedule and args.lr_scheduler_type != "constant":
            values[END_OF_SCHEDULE] = planned_steps(args, self._loader)
        elif args.max_steps > 0:
            values["max_steps"] = args.max_steps
        else:
            values["num_train_epochs"] = args.num_train_epochs
        if supplied.schedule:
            values["lr_scheduler"] = self._schedulers
        if supplied.optimizer or supplied.schedule:
            values |= {f"optimizer.{name}": value for name, value in self._initial.values().items()}
        samples = self._loader.samples_per_microbatch()
        if samples is not None:
            values["samples per step"] = samples * args.gradient_accumulation_steps
        return values

    def _environment(self) -> dict[str, Any]:
        """What decides about the order in which sums are taken, and so about the last bits, without being a setting."""
        values = {"world_size": collectives.world_size(), "torch": str(torch.__version__)}
        if self._device.type == "cuda":
            return {**values, "processor": torch.cuda.get_device_name(self._device)}
        return {**values, "processor": _processor(), "threads": torch.get_num_threads()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """They are as they are now: what they were has been compared before."""

    def _has_effect(self, name: str) -> bool:
        supplied = self._supplied
        if name in _OF_OPTIMIZER:
            return not (supplied.optimizer or supplied.schedule)
        if name in _OF_SCHEDULE:
            return not supplied.schedule
        if name in _OF_LOADER or name.startswith("dataloader_"):
            return not supplied.loader
        return name not in _OF_NOBODY and not (supplied.loop and name in _OF_LOOP)


def _processor() -> str:
    """The instructions for which torch chooses its kernels: ``AVX2``, ``AVX512``, …"""
    return str(torch.backends.cpu.get_cpu_capability())
