"""CheckpointContents: everything that a checkpoint of the run stores; RecordedSettings: the run's settings among it.

Two checks belong to it. Every parameter that the optimizer trains must be in the checkpoint, else a resumed run would
differ. And the ranks must have equal models where a checkpoint contains one for all of them.

Settings are saved so that a later leg can compare its own.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from dalsegno.checkpoint import CALLBACKS, LOSS, SETTINGS, LoadReport, ModelState, OptimizerState, ShardedState
from dalsegno.checkpoint.compatibility import END_OF_SCHEDULE, SCHEDULE, compare, reasons_to_differ
from dalsegno.checkpoint.export import expect_pretrained, peft_configurations, pretrained_files
from dalsegno.checkpoint.names import ADAPTERS
from dalsegno.data import NOT_EXACT, TrainingData
from dalsegno.data.digests import digest
from dalsegno.data.step_batch import agreed_position
from dalsegno.distributed import collectives
from dalsegno.distributed.layout import environment_of
from dalsegno.distributed.modes import modes_of
from dalsegno.distributed.parallel.base import gathered_dtype
from dalsegno.distributed.sharded_tensors import device_of, strip_wrappers
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave, ConfigurationError, UnknownName, first_few
from dalsegno.events.callback import components_of
from dalsegno.logs.values import decode, encode
from dalsegno.stateful.component import Component, Stateful
from dalsegno.stateful.schema import Count, check

from .learning_rate import InitialHyperparameters, form_check, has_end
from .module_flags import sum_of_bytes
from .optimizers import takes_adam_settings
from .run_parts import Comparison, RunParts

logger = logging.getLogger("dalsegno")

PROGRESS = ("trainer", "clock", "loader", "rng", "meter", SETTINGS)
"""Keys of the components that record how far a run is: ``load_components`` never loads them into another run."""

_SCHEDULER = "scheduler."


class CheckpointContents:
    """Sharded states (model, loss function, optimizer, tensors of callbacks) and components (everything else): the
    run's own, and ``others`` of the user's, by key. ``settings`` are saved to compare with those of a later leg."""

    def __init__(self, parts: RunParts, settings: RecordedSettings, others: Mapping[str, Stateful]) -> None:
        self._parts = parts
        _check_saveable(parts)
        self.model = ModelState(parts.model)
        if parts.args.saving:
            captured = self.model.capture()  # raises before hours of work on tensors that no checkpoint can contain
            if parts.args.saving_pretrained:
                saves_frozen = parts.args.save_frozen != "never"
                expect_pretrained(parts.model, captured, adapter_settings(parts.model), saves_frozen=saves_frozen)
        loss = [] if parts.loss_fn is None else [ModelState(parts.loss_fn, key=LOSS, apart_from=parts.model)]
        self._loss = [each for each in loss if not each.is_empty()]  # else all its tensors are the model's
        own: dict[str, Stateful] = {
            SETTINGS: settings,
            "trainer": parts.state,
            "clock": parts.state.clock,
            "loader": parts.loader,
            "rng": parts.random_state,
            "meter": parts.metrics,
            "flags": parts.flags,
        }
        _check_state(others, reserved=[self.model.key, OptimizerState.key, *own])
        names = names_of_others(parts.optimizer, self.model, self._loss, others)
        for name, each in others.items():
            if isinstance(each, Optimizer):
                names_of_others(each, self.model, self._loss, others, f"state={{{name!r}: …}}")
        self._optimizer = OptimizerState(parts.model, parts.optimizer, parts.loss_fn, names)
        own |= {f"{_SCHEDULER}{index}": each for index, each in enumerate(parts.schedulers)}
        self._targets = {**own, **others}
        parts.flags.add(others)

    def sharded(self) -> list[ShardedState]:
        """State that is sharded over the ranks."""
        return [self.model, *self._loss, self._optimizer, *self._parts.callbacks.tensors]

    def evaluated(self) -> list[ShardedState]:
        """State that an evaluation measures: the weights, and the averages that callbacks put in their place."""
        return [self.model, *self._loss, *self._parts.callbacks.tensors]

    def expect_equal_ranks(self) -> None:
        """Raises CannotSave on every rank, if their models differ, which nothing is known to keep equal. Collective."""
        if self._parts.comparison is not Comparison.NEVER:
            expect_equal_ranks(self.sharded())

    def components(self) -> list[Component]:
        """All other state."""
        own = [Component(key, target, form_check(target)) for key, target in self._targets.items()]
        return [*own, *components_of(self._parts.callbacks.bound)]

    def pretrained_files(self) -> dict[str, bytes]:
        """On rank 0, what ``from_pretrained`` needs beside the model's weights. Local."""
        parts = self._parts
        return pretrained_files(parts.model, parts.processing_class) if collectives.rank() == 0 else {}

    def loadable(self) -> list[Component]:
        """The components that may be loaded into another run."""
        return [component for component in self.components() if component.key not in PROGRESS]

    def key_of(self, name: str) -> str:
        """The key that ``name`` in ``load_components`` stands for; a callback's may lack the prefix ``callbacks.``."""
        known = [*(each.key for each in self.sharded()), *(each.key for each in self.loadable())]
        key = next((key for key in (name, f"{CALLBACKS}{name}") if key in known), None)
        if key is None:
            raise UnknownName("component in load_components", name, [each.removeprefix(CALLBACKS) for each in known])
        return key


def _check_saveable(parts: RunParts) -> None:
    for each in parts.schedulers:
        if isinstance(each, str):
            raise ConfigurationError(f"lr_scheduler={each!r}; name it in TrainingArguments(lr_scheduler_type={each!r})")
        if isinstance(each, type):
            raise ConfigurationError(
                f"lr_scheduler: {each.__name__} is a class; give an instance: {each.__name__}(optimizer, …)"
            )
        if not isinstance(each, Stateful):
            raise ConfigurationError(
                f"lr_scheduler: a {type(each).__name__} has no state_dict and load_state_dict, so a resumed run would "
                "begin its schedule anew; give it both, or derive it from torch.optim.lr_scheduler.LRScheduler"
            )


def _check_state(others: Mapping[str, object], *, reserved: Sequence[str]) -> None:
    taken = (CALLBACKS, _SCHEDULER, *(f"{each}." for each in [*reserved, *others]))
    for name, thing in others.items():
        if not isinstance(name, str) or name in reserved or name.startswith(taken):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: choose another name, a string; a run reserves {', '.join(reserved)}, "
                f"{_SCHEDULER}… and {CALLBACKS}… for its own state, and 'a.b' stands for the part b of a state 'a'"
            )
        if not isinstance(thing, Stateful):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: a {type(thing).__name__} has no state_dict and load_state_dict, so it could "
                "not be restored; give the object's class both, or keep a value in a dict that the loop reads: "
                f"state={{'kept': {{{name!r}: …}}}}"
            )


def names_of_others(
    optimizer: Optimizer,
    model: ModelState,
    loss_fn: Sequence[ModelState],
    others: Mapping[str, Stateful],
    argument: str = "optimizer",
) -> dict[int, str]:
    """Names of the parameters that are neither the model's nor the loss function's, but in ``others``, by ``id``:
    ``head/layer.weight``. Raises ConfigurationError if the optimizer, which is given as ``argument``, trains a
    parameter that none of these contains; or none of the model's, if it is the run's own."""
    of_model = model.held()
    known = of_model | {each for state in loss_fn for each in state.held()}
    foreign = {
        f"group {number}, parameter {position}, of shape {list(parameter.shape)}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in known
    }
    names = {
        id(parameter): f"{key}/{name}"
        for key, each in others.items()
        for name, parameter in parameters_of(each, [*foreign.values()])
    }
    unsaved = [place for place, parameter in foreign.items() if id(parameter) not in names]
    is_built_on_model = any(id(each) in of_model for group in optimizer.param_groups for each in group["params"])
    is_own = argument == "optimizer"
    if is_own and model.is_trained() and not is_built_on_model and len(unsaved) == len(foreign):
        raise ConfigurationError(
            f"optimizer: none of the parameters of this {type(optimizer).__name__} is the model's, so the model would "
            "not be trained; build it on model.parameters(), after whatever replaces them (fully_shard, a new head)"
        )
    if unsaved:
        remedy = (
            "If the model has replaced that parameter, build the optimizer afterwards. Else a Trainer saves the model "
            "and, if it is a module, loss_fn=: put the parameter into one of them; dalsegno.Run also saves "
            'state={"name": module}'
            if is_own
            else "Pass its module, too, or a dict with the tensor: state={…, 'name': module, 'kept': {'name': tensor}}"
        )
        raise ConfigurationError(
            f"{argument}: it trains what no checkpoint of this run would contain ({first_few(unsaved)}). {remedy}"
        )
    return names


def parameters_of(thing: Stateful, foreign: Sequence[Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Name and parameter of a module; of anything else, those of ``foreign`` in the memory of its state dict."""
    if isinstance(thing, nn.Module):
        return thing.named_parameters()
    leaves, _ = tree_flatten_with_path(thing.state_dict() if foreign else None)
    return [
        (keystr(path).strip("."), parameter)
        for path, leaf in leaves
        for parameter in foreign
        if isinstance(leaf, Tensor)
        and not isinstance(leaf, DTensor)
        and not isinstance(parameter, DTensor)
        and parameter.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() != 0
    ]


def expect_equal_ranks(states: Iterable[ShardedState]) -> None:
    """Raises CannotSave on every rank, if a tensor that is not sharded differs between the ranks. Collective: one small
    reduction, if all are equal."""
    if collectives.world_size() == 1:
        return

    @torch.no_grad()
    def sums() -> dict[str, int]:
        found = {
            f"{state.key}: {name}": sum_of_bytes(tensor)
            for state in states
            for name, tensor in state.capture().tensors.items()
            if not isinstance(tensor, DTensor) and place_of(tensor) is None
        }
        return {name: int(each) for name, each in found.items()}

    found, are_equal = collectives.run_and_compare(sums, lambda found: found)
    if are_equal:
        return
    of_ranks = collectives.gather(found, "tensors that differ between the ranks")
    name = next(name for each in of_ranks for name in each if len({its.get(name) for its in of_ranks}) > 1)
    odd = [rank for rank, its in enumerate(of_ranks) if its.get(name) != of_ranks[0].get(name)]
    raise CannotSave(
        f"{name}: differs between rank 0 and rank {', '.join(map(str, odd))}. A checkpoint contains one model, with "
        "which all ranks of a resumed run would continue. Average the gradients: parallel='ddp', or in a loop of your "
        "own DistributedDataParallel or an all_reduce; or average the weights before each save. To train several "
        "models, start a job of one rank for each, with its own output_dir"
    )


# --- the settings -----------------------------------------------------------------------------------------------------


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

_SINCE = "steps planned since"
"""``StepPlan.since``, if it is not the start of the run."""
_PLANNED_BY = {
    "samples per step",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_accumulation_schedule",
}
"""Settings of which an epoch's number of steps depends."""


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
        self._saved_end: Any = None  # END_OF_SCHEDULE in the checkpoint that was loaded

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
        former, self._planned_steps = self._planned_steps, self._parts.plan()
        self._parts.state.max_steps = self._planned_steps
        if former not in (-1, self._planned_steps) and not self._supplied.schedule:
            self.initial.reapply_schedule()

    @property
    def sets_learning_rate(self) -> bool:
        """Whether ``learning_rate`` has an effect; otherwise the user's optimizer and schedule determine the rate."""
        return self._has_effect("learning_rate")

    def before_load(self) -> dict[str, Any]:
        """What is compared with the checkpoint's settings before a load; the rest depends on what is loaded."""
        return {name: value for name, value in self.state_dict().items() if name not in (END_OF_SCHEDULE, _SINCE)}

    def apply_overrides(self, report: LoadReport) -> None:
        """After a load: plan the steps that are left, and set the hyperparameters that the user has changed since the
        save; loading the optimizer restored the old. Collective if the ranks' loaders do not run in lockstep."""
        parts = self._parts
        reads_others = any(change.setting in _PLANNED_BY for change in report.changes)
        if not parts.loader.lockstep:  # perhaps on some ranks only
            reads_others = any(collectives.all_reduce_max([reads_others], "whether steps read other samples"))
        if reads_others:
            parts.plan.since = parts.state.global_step, agreed_position(parts.loader, parts.layout)
        saved = {} if self._saved_end is None else {END_OF_SCHEDULE: self._saved_end}
        report.changes.extend(compare(saved, self._recorded()))
        parts.state.max_steps = parts.plan()
        changes = report.changes
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
            values[END_OF_SCHEDULE] = self._parts.plan()
        elif args.max_steps > 0:
            values["max_steps"] = args.max_steps
        else:
            values["num_train_epochs"] = args.num_train_epochs
        if self._parts.plan.since != (0, 0.0):
            values[_SINCE] = [*self._parts.plan.since]
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
        """Load what the steps that are left are planned from; all else was compared before anything was loaded."""
        step, position = check(tuple(state.get(_SINCE, (0, 0.0))), tuple[Count, float], f"settings.{_SINCE}")
        self._parts.plan.since = step, position
        self._saved_end = state.get(END_OF_SCHEDULE)

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
