"""CheckpointContents: everything that a checkpoint of the run stores.

Two checks belong to it. Every parameter that the optimizer trains must be in the checkpoint, else a resumed run would
differ. And the ranks must have equal models where a checkpoint contains one for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from dalsegno.checkpoint import CALLBACKS, LOSS, SETTINGS, ModelState, OptimizerState, ShardedState
from dalsegno.checkpoint.export import expect_pretrained, pretrained_files
from dalsegno.distributed import collectives
from dalsegno.distributed.stage_places import place_of
from dalsegno.errors import CannotSave, ConfigurationError, UnknownName
from dalsegno.events.callback import components_of
from dalsegno.stateful.component import Component, Stateful

from .learning_rate import form_check
from .module_flags import sum_of_bytes
from .parts import Comparison, RunParts
from .settings import RecordedSettings, adapter_settings

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
    for name, thing in others.items():
        if not isinstance(name, str) or name in reserved or name.startswith((CALLBACKS, _SCHEDULER)):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: choose another name, a string; a run reserves "
                f"{', '.join(reserved)}, {_SCHEDULER}… and {CALLBACKS}… for its own state"
            )
        if not isinstance(thing, Stateful):
            raise ConfigurationError(
                f"state={{{name!r}: …}}: a {type(thing).__name__} has no state_dict and load_state_dict, so there is "
                "nothing to save"
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
        more = f", and {len(unsaved) - 1} more" if unsaved[1:] else ""
        remedy = (
            "If the model has replaced that parameter, build the optimizer afterwards. Else a Trainer saves the model "
            "and, if it is a module, loss_fn=: put the parameter into one of them; dalsegno.Run also saves "
            'state={"name": module}'
            if is_own
            else "Pass the module with that parameter, too: state={…, 'name': module}"
        )
        raise ConfigurationError(
            f"{argument}: it trains what no checkpoint of this run would contain ({unsaved[0]}{more}). {remedy}"
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
