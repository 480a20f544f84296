"""CheckpointContents: everything that a checkpoint of the run stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from dalsegno.checkpoint import CALLBACKS, LOSS, SETTINGS, ModelState, OptimizerState, ShardedState
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.stateful.component import Component, Stateful

from .equal_ranks import expect_equal_ranks
from .hyperparameters import form_check
from .optimizers import expect_optimizer
from .parts import Comparison, RunParts
from .settings import RecordedSettings
from .trained_parameters import names_of_others

PROGRESS = ("trainer", "clock", "loader", "rng", "meter", SETTINGS)
"""Keys of the components that record how far a run is: ``load_components`` never loads them into another run."""

_SCHEDULER = "scheduler."


class CheckpointContents:
    """Sharded states (model, loss function, optimizer, tensors of callbacks) and components (everything else).

    Args:
        settings: saved beside them, to compare with those of a later leg.
        others: further objects with a state, by the key under which each is saved.

    Raises:
        ConfigurationError: if a key in ``others`` is reserved, its object, a schedule or the optimizer has no state
            that can be saved, or the optimizer trains a parameter that no checkpoint would contain.
    """

    def __init__(self, parts: RunParts, settings: RecordedSettings, others: Mapping[str, Stateful]) -> None:
        self._callbacks, self._comparison = parts.callbacks, parts.comparison
        _check_saveable(parts)
        self.model = ModelState(parts.model)
        self._loss = _loss_states(parts.loss_fn, parts.model)
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
        self._optimizer = OptimizerState(parts.model, parts.optimizer, parts.loss_fn, names)
        own |= {f"{_SCHEDULER}{index}": each for index, each in enumerate(parts.schedulers)}
        self._targets = {**own, **others}

    def sharded(self) -> list[ShardedState]:
        """State that is sharded over the ranks."""
        return [self.model, *self._loss, self._optimizer, *self._callbacks.sharded_states()]

    def evaluated(self) -> list[ShardedState]:
        """State that an evaluation measures: the weights, and the averages that callbacks put in their place."""
        return [self.model, *self._loss, *self._callbacks.sharded_states()]

    def expect_equal_ranks(self) -> None:
        """Raises CannotSave on every rank, if their models differ, which nothing is known to keep equal. Collective."""
        if self._comparison is not Comparison.NEVER:
            expect_equal_ranks(self.sharded())

    def components(self) -> list[Component]:
        """All other state."""
        own = [Component(key, target, form_check(target)) for key, target in self._targets.items()]
        return [*own, *self._callbacks.components()]

    def loadable(self) -> list[Component]:
        """The components that may be loaded into another run."""
        return [component for component in self.components() if component.key not in PROGRESS]

    def key_of(self, name: str) -> str:
        """The key that ``name`` in ``load_components`` stands for; a callback's may lack the prefix ``callbacks.``.

        Raises:
            UnknownName: if no part of this run has it; the message suggests the nearest.
        """
        known = [*(each.key for each in self.sharded()), *(each.key for each in self.loadable())]
        key = next((key for key in (name, f"{CALLBACKS}{name}") if key in known), None)
        if key is None:
            raise UnknownName("component in load_components", name, [each.removeprefix(CALLBACKS) for each in known])
        return key


def _loss_states(loss_fn: nn.Module | None, model: nn.Module) -> list[ModelState]:
    """State of the loss function; none if all its tensors are the model's."""
    if loss_fn is None:
        return []
    state = ModelState(loss_fn, key=LOSS, apart_from=model)
    return [] if state.is_empty() else [state]


def _check_saveable(parts: RunParts) -> None:
    """Raises ConfigurationError if a schedule or the optimizer has no state that can be saved."""
    expect_optimizer(parts.optimizer)
    for each in parts.schedulers:
        if not isinstance(each, Stateful):
            raise ConfigurationError(
                f"lr_scheduler: a {type(each).__name__} has no state_dict and load_state_dict, so a resumed run would "
                "begin its schedule anew; give it both, or derive it from torch.optim.lr_scheduler.LRScheduler"
            )


def _check_state(others: Mapping[str, object], *, reserved: Sequence[str]) -> None:
    """Raises ConfigurationError if a key is reserved for the run's own state, or an object has no state to save."""
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
