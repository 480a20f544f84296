"""Settings: what a run is trained with, kept in each checkpoint, so that a later leg can say what has changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint.load.compatibility import END_OF_SCHEDULE, Change
from dalsegno.data import NOT_EXACT, ResumableLoader, TrainingData
from dalsegno.distributed import collectives

from .optim import InitialHyperparameters

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
        args: the run's; only what has an effect is kept.
        brought: what the user brings along.
        built: the optimizer's hyperparameters, and the way back to them.
        schedulers: for their classes.
        feed: for the samples in a step.
        data: what is read.
        device: where the model is.
    """

    state_compared = False  # of loaders of the user's own, only rank 0 looks at the data

    def __init__(
        self,
        args: TrainingArguments,
        brought: UserSupplied,
        built: InitialHyperparameters,
        schedulers: Iterable[Any],
        feed: ResumableLoader,
        data: TrainingData,
        device: torch.device,
    ) -> None:
        self._args = args
        self._brought = brought
        self._built = built
        self._schedulers = [type(each).__name__ for each in schedulers]
        self._feed = feed
        self._data = data
        self._device = device
        self._fingerprint: dict[str, Any] | None = None
        self._planned = -1

    def begin_session(self) -> None:
        """A leg begins. Look at the data, once in this process, before training does. Collective.

        Raises:
            ConfigurationError: if the ranks are given different datasets.
        """
        former, self._planned = self._planned, planned_steps(self._args, self._feed)
        if former not in (-1, self._planned) and not self._brought.schedule:
            self._built.reapply_schedule()
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
            self._built.restore_lrs()
        elif changed & {*_OF_SCHEDULE, END_OF_SCHEDULE}:
            self._built.reapply_schedule()
        self._built.restore(*(names - {"lr"}))

    def restore_lrs(self) -> None:
        """The learning rates of this run, where only the optimizer's state is another's."""
        self._built.restore_lrs()

    def state_dict(self) -> dict[str, Any]:
        return {**self._given(), **self._surroundings(), "dataset": self._fingerprint}

    def _given(self) -> dict[str, Any]:
        args, brought = self._args, self._brought
        values = {name: value for name, value in args.to_dict().items() if self._has_effect(name)}
        if not brought.schedule and args.lr_scheduler_type != "constant":
            values[END_OF_SCHEDULE] = planned_steps(args, self._feed)
        elif args.max_steps > 0:
            values["max_steps"] = args.max_steps
        else:
            values["num_train_epochs"] = args.num_train_epochs
        if brought.schedule:
            values["lr_scheduler"] = self._schedulers
        if brought.optimizer or brought.schedule:
            values |= {f"optimizer.{name}": value for name, value in self._built.values().items()}
        samples = self._feed.samples_per_microbatch()
        if samples is not None:
            values["samples per step"] = samples * args.gradient_accumulation_steps
        return values

    def _surroundings(self) -> dict[str, Any]:
        """What decides about the order in which sums are taken, and so about the last bits, without being a setting."""
        values = {"world_size": collectives.world_size(), "torch": str(torch.__version__)}
        if self._device.type == "cuda":
            return {**values, "processor": torch.cuda.get_device_name(self._device)}
        return {**values, "processor": _processor(), "threads": torch.get_num_threads()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """They are as they are now: what they were has been compared before."""

    def _has_effect(self, name: str) -> bool:
        brought = self._brought
        if name in _OF_OPTIMIZER:
            return not (brought.optimizer or brought.schedule)
        if name in _OF_SCHEDULE:
            return not brought.schedule
        if name in _OF_LOADER or name.startswith("dataloader_"):
            return not brought.loader
        return name not in _OF_NOBODY and not (brought.loop and name in _OF_LOOP)


def _processor() -> str:
    """The instructions for which torch chooses its kernels: ``AVX2``, ``AVX512``, …"""
    return str(torch.backends.cpu.get_cpu_capability())


def planned_steps(args: TrainingArguments, feed: ResumableLoader) -> int:
    """The steps of the whole run; -1 where only the end of the data will tell."""
    if args.max_steps > 0:
        return args.max_steps
    microbatches = feed.microbatches_per_epoch()
    if microbatches is None:
        return -1
    return math.ceil(args.num_train_epochs * math.ceil(microbatches / args.gradient_accumulation_steps))
