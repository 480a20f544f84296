"""LoopChecks: finds what a hand-written loop does that no checkpoint contains, and warns once of each.

A checkpoint is captured inside ``step_end``, of what the run was given. So it misses what the loop does behind
``step_end``, gradients that are kept for the next step, and objects of which the run does not know. These are looked
for where a checkpoint is captured; gradients behind a leg's first step too.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from dalsegno.args import TrainingArguments
from dalsegno.data import NOT_EXACT
from dalsegno.data.digests import batch_digest
from dalsegno.errors import first_few
from dalsegno.stateful.component import Stateful, is_stateful
from dalsegno.witness.rows import GENERATORS, generator_digests

from .checkpoint_contents import parameters_of
from .run_parts import RunParts

logger = logging.getLogger("dalsegno")

CHECKPOINTS = 3
"""Checkpoints of a leg behind which states are compared: what a loop does there, it does from the first one on."""


class LoopChecks:
    """Of one leg. ``model`` is as the loop calls it; ``others`` are further objects that are saved, by name. What
    callbacks hold counts as saved."""

    def __init__(self, parts: RunParts, model: nn.Module, others: Mapping[str, Stateful]) -> None:
        self.is_behind = False
        """Whether the loop runs behind a step's end, and before the next batch."""
        self._model = model
        self._optimizer = parts.optimizer
        named: dict[str, Stateful] = {
            f"lr_scheduler{f'[{index}]' if index else ''} ({type(each).__name__})": each
            for index, each in enumerate(parts.schedulers)
        }
        named |= {f'state["{name}"]': each for name, each in others.items()}
        self._compared = {name: each for name, each in named.items() if not isinstance(each, nn.Module | Optimizer)}
        self._saved: list[Stateful] = [model, parts.optimizer, *named.values()]
        self._callbacks = parts.callbacks
        self._warns = parts.state.is_world_process_zero
        self._said: set[str] = set()
        self._step = 0  # the last one that ended
        self._late: list[str] = []  # what the loop did behind its end
        self._captured: dict[str, str] | None = None  # states at its end, if a checkpoint was captured there
        self._left_to_compare = CHECKPOINTS
        self._foreign: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()  # first and last step
        self._carried: tuple[Tensor, Tensor] | None = None  # a parameter, and its gradient of an earlier step
        self._watches_gradients = True
        self._mode: bool | None = None  # of the model, before an evaluation whose next update is still to come
        # Objects with a state that nobody but the loop knows; optimizers are seen when they step.
        living = (each for each in gc.get_objects() if issubclass(type(each), _KINDS))
        self._unknown = WeakKeyDictionary({each: _progress(each) for each in living})

    # -- called by the run ----------------------------------------------------------------------------------------

    def end_step(self, step: int, *, is_captured: bool) -> None:
        """The engine has done all that is due after ``step``."""
        self._step, self.is_behind = step, True
        if is_captured:
            self._find_unknown()
            if self._left_to_compare:
                self._left_to_compare -= 1
                self._captured = self._states()
        if is_captured or self._watches_gradients:
            self._watches_gradients = False
            self._watch_gradients()

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end_pause()

    def end_pause(self) -> None:
        """The loop asks for the next batch, or is left."""
        self.is_behind = False
        captured, self._captured, late, self._late = self._captured, None, self._late, []
        if captured is None:
            return
        now = self._states()
        changed = [*dict.fromkeys(late), *(f"{name} changes" for name in captured if captured[name] != now[name])]
        if changed:
            self._warn(
                "behind",
                f"behind run.step_end() of step {self._step}, whose checkpoint contains the state before: "
                f"{', '.join(changed)}. A run that resumes from there differs; call run.step_end() last in a step, "
                "and pass an evaluation as evaluate=",
            )

    def note_log(self) -> None:
        if self.is_behind:
            self._late.append("run.log() is called")

    def note_update(self, optimizer: Optimizer, *, in_step: bool) -> None:
        """Any optimizer of this process has stepped."""
        if self.is_behind:
            self._late.append(f"{type(optimizer).__name__} steps")
        elif in_step and optimizer is not self._optimizer:
            self._foreign[optimizer] = self._foreign.get(optimizer, (self._step,))[0], self._step

    def before_update(self) -> None:
        carried, self._carried = self._carried, None
        if carried is not None and carried[0].grad is carried[1]:
            self._warn(
                "gradients",
                f"the gradients of step {self._step} are still there when step {self._step + 1} adds its own: no "
                "checkpoint contains gradients, so a run that resumes between these steps differs. Call "
                "optimizer.zero_grad() after optimizer.step(); to accumulate over batches, set "
                "gradient_accumulation_steps",
            )
        before, self._mode = self._mode, None
        if before is not None and self._model.training is not before:
            mode = "training" if self._model.training else "evaluation"
            self._warn(
                "mode",
                f"evaluate= has left the model in {mode} mode, and step {self._step + 1} is trained in it, with the "
                "dropout and normalization of that mode; restore it at the end of evaluate=",
            )

    def evaluated(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        self._mode = self._model.training
        return evaluate()

    # -- what is looked at ------------------------------------------------------------------------------------------

    def _states(self) -> dict[str, str]:
        generators = zip(GENERATORS, generator_digests().split(), strict=False)
        return {
            **{name: batch_digest(each.state_dict()) for name, each in self._compared.items()},
            **{f"the state of {whose} random generator": digest for whose, digest in generators},
        }

    def _watch_gradients(self) -> None:
        """See in the next backward pass whether a gradient is added to the one that is there now."""
        parameter = next(filter(_has_plain_gradient, _parameters(self._optimizer)), None)
        if parameter is None:
            return
        held = cast(Tensor, parameter.grad)

        def see(_: Tensor) -> None:
            handle.remove()
            if parameter.grad is held and bool(held.any()):
                self._carried = parameter, held

        handle = cast(RemovableHandle, cast(Any, parameter).register_hook(see))

    def _find_unknown(self) -> None:
        lasting = [each for each, (first, last) in self._foreign.items() if first < last]  # not made for one step
        found: list[Any] = [each for each in lasting if each.state or not self._has_parameters_of(each)]
        ours = {self._optimizer, *self._foreign}
        for each, before in self._unknown.items():
            if _progress(each) != before and (not isinstance(each, LRScheduler) or each.optimizer in ours):
                found.append(each)
        if found:
            held = {*_held([*self._saved, *self._callbacks.bound])}
            if names := sorted({type(each).__name__ for each in found if id(each) not in held}):
                self._warn(
                    "unknown",
                    f"this loop trains with {', '.join(names)}, which no checkpoint contains: a resumed run begins "
                    "with a new one, and differs. Pass a scheduler as lr_scheduler=, anything else as "
                    'state={"name": …}; an optimizer together with the module whose parameters it updates',
                )

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        updated = [*_parameters(optimizer)]
        saved = {id(parameter) for each in self._saved for _, parameter in parameters_of(each, updated)}
        return all(id(parameter) in saved for parameter in updated)

    def _warn(self, what: str, text: str) -> None:
        if what not in self._said and self._warns:
            logger.warning("%s", text, extra={NOT_EXACT: True})
        self._said.add(what)


def _has_plain_gradient(parameter: Tensor) -> bool:
    grad = parameter.grad
    return parameter.requires_grad and grad is not None and grad.layout == torch.strided and type(grad) is Tensor


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_KINDS = (LRScheduler, GradScaler, AveragedModel)


def _progress(thing: Any) -> Any:
    if isinstance(thing, LRScheduler):
        return thing.last_epoch
    return int(thing.n_averaged) if isinstance(thing, AveragedModel) else thing.state_dict()


def _held(roots: Iterable[object]) -> dict[int, object]:
    """By id: these objects, and those with a state in their attributes, which they save with their own."""
    waiting, held = list(roots), dict[int, object]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in held:
            continue
        held[id(thing)] = thing
        if isinstance(thing, nn.Module):
            continue
        for value in list(getattr(thing, "__dict__", {}).values()):
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            not_saved = Optimizer if isinstance(thing, LRScheduler) else ()
            waiting += [each for each in parts if is_stateful(each) and not isinstance(each, not_saved)]
    return held


_LEFT_TO_THE_LOOP = (
    "bf16",
    "fp16",
    "max_grad_norm",
    "torch_compile",
    "gradient_checkpointing",
    "fuse_optim_with_backward",
)


def warn_of_the_forgotten(parts: RunParts, others: Mapping[str, Stateful]) -> None:
    """Warn of what a run can see to be missing before its first step: an optimizer, a schedule, settings' effects."""
    held = _held([parts.optimizer, *parts.schedulers, *others.values(), *parts.callbacks.bound]).values()
    optimizers: list[Any] = [each for each in held if hasattr(each, "param_groups")]
    warnings = []
    stepped = {id(each) for optimizer in optimizers for each in _parameters(optimizer)}
    modules = {f"{name}.": each for name, each in others.items() if isinstance(each, nn.Module)}
    names = [
        f"{prefix}{name}"
        for prefix, module in {"": parts.model, **modules}.items()
        for name, each in module.named_parameters()
        if each.requires_grad and id(each) not in stepped and not isinstance(module, AveragedModel)
    ]
    if names:
        warnings.append(
            f"{first_few(names)}: trainable parameters that no optimizer of the run has. If another one updates them, "
            "a resumed run begins with a new one, and differs: pass optimizer=[a, b]. Else freeze them: "
            "requires_grad_(False)"
        )
    scheduled = [getattr(each, "optimizer", None) for each in held]
    for each in optimizers:
        if any("initial_lr" in group for group in each.param_groups) and each not in scheduled:
            warnings.append(
                f"{type(each).__name__} has a schedule (initial_lr in its groups), and the run does not: a resumed run "
                "begins with a new one, and differs. Pass it as lr_scheduler="
            )
    ignored = [name for name in _LEFT_TO_THE_LOOP if getattr(parts.args, name) != getattr(TrainingArguments, name)]
    if ignored:
        given = ", ".join(f"{name}={getattr(parts.args, name)}" for name in ignored)
        warnings.append(f"{given}: has no effect on a loop of your own unless it reads it; see docs/guides/own-loop.md")
    for text in warnings if parts.state.is_world_process_zero else ():
        logger.warning("%s", text)
