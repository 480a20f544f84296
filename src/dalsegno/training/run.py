"""Run: events, state and checkpoints around a hand-written training loop, without the Trainer.

::

    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=[JsonLogger()]) as run:
        for batch in run.batches():
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)

With several batches in a step (``gradient_accumulation_steps``), the run marks the last one::

        for batch in run.batches():
            with run.accumulate(model):
                loss = compute(model, batch) * run.microbatch_weight
                loss.backward()
            total += loss.detach()
            if run.is_last_microbatch:
                optimizer.step()
                optimizer.zero_grad()
                run.step_end(loss=total)
                total = 0.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.data import TrainingData, resumable_loader
from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed.layout import layout_of_own_loop
from dalsegno.distributed.parallel.ddp import rebuilds_buckets
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events.registration import instances
from dalsegno.events.table import Event
from dalsegno.stateful.component import is_stateful
from dalsegno.system.tracebacks import short_traceback

from .checkpoint_contents import UserSupplied
from .chosen_start import ResumeOptions
from .evaluation import UserEvaluation
from .learning_rate import copied, several
from .lifecycle import OfRun, RunLifecycle, check_given
from .loop_checks import LoopChecks, warn_of_the_forgotten
from .optimizers import expect_hooks, expect_optimizer, unwrapped_optimizer
from .result import TrainResult
from .run_parts import Comparison, RunParts
from .session import Session
from .variables import CONTAINERS, Variables

logger = logging.getLogger("dalsegno")

UNSUPPORTED_EVENTS = dict.fromkeys(
    [
        Event.BEFORE_FORWARD,
        Event.AFTER_FORWARD,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
        Event.MICROBATCH_END,
        Event.GRADIENTS_READY,
        Event.STEP_SKIPPED,
        Event.BEFORE_ZERO_GRAD,
        Event.AFTER_ZERO_GRAD,
        Event.BEFORE_SCHEDULER_STEP,
        Event.AFTER_SCHEDULER_STEP,
        Event.PREDICTION_STEP,
        Event.PREDICT,
    ],
    "a loop around dalsegno.Run cannot fire; use dalsegno.Trainer, or another callback",
)
"""Events inside a hand-written loop. A callback that handles one of them raises EventNotFired when it is added."""


class Run(OfRun):
    """Trains the run in ``args.output_dir`` to its end, with a hand-written loop inside ``with``.

    Entering restores everything, from the newest verified checkpoint if there is one; a finished run yields no batches.
    The optimizer's own hooks fire on_pre_optimizer_step and on_optimizer_step.

    Args:
        args: the settings; those of the update itself (clipping, precision, schedule) are left to the loop.
        model: as the loop calls it, wrapped or not. On several ranks, rank 0's persistent buffers (running statistics)
            are copied to every rank at each step's end.
        optimizer: one or a list, stepped by the loop. The first one's step fires the events, and gives the learning
            rate that is logged; its groups are those that commands and changed settings change.
        loader: yields the batches. One with ``state_dict`` resumes by itself, another is read again up to its place.
        lr_scheduler: one or a list, saved too; stepped by the loop.
        callbacks: as for the Trainer.
        evaluate: called on all ranks when an evaluation is due; returns metrics of all ranks: ``{"eval_loss": 0.7}``.
        state: further objects with ``state_dict`` and ``load_state_dict``, such as a ``GradScaler``, by names that are
            not reserved; or dicts, lists and deques, in which the loop keeps what outlives a step. What is loaded is
            put into these, and into lists, dicts, arrays and tensors in them, unless their shape is another.
        resume_from_checkpoint: as in ``Trainer.train``, like the next five.
        strict: whether a damaged newest checkpoint raises.
        strict_callbacks: whether a saved callback that is missing here, or the reverse, raises.
        allow_changes: what may differ from the checkpoint.
        load_components: what a new run begins with, from the path.
        continue_stopped: whether to train on although a callback has judged the training to be over.

    Raises:
        EventNotFired: for a callback that handles an event which a hand-written loop cannot fire.
        ConfigurationError: for a reserved name in ``state``; or if the optimizer trains parameters that are neither the
            model's nor in ``state``, or none of the model's.
    """

    @short_traceback
    def __init__(
        self,
        args: TrainingArguments,
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: Iterable[Any],
        lr_scheduler: Any = None,
        callbacks: Sequence[object] = (),
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        state: Mapping[str, Any] | None = None,
        resume_from_checkpoint: bool | str | Path = True,
        strict: bool = False,
        strict_callbacks: bool = False,
        allow_changes: Collection[str] = (),
        load_components: Collection[str] = (),
        continue_stopped: bool = False,
    ) -> None:
        if not (isinstance(model, nn.Module) and isinstance(args, TrainingArguments)):
            given = f"Run({type(args).__name__}, model={type(model).__name__}, …)"
            raise ConfigurationError(f"{given}; it takes TrainingArguments, and the model, a torch.nn.Module")
        if not isinstance(state, Mapping | None):
            raise ConfigurationError(f"state={state!r}; needs a dict of the objects to save, by name")
        check_given(args, model, evaluate=evaluate)
        self.args = args
        self._model = model
        self._options = ResumeOptions(
            resume_from_checkpoint, strict, strict_callbacks, allow_changes, load_components, continue_stopped
        )
        optimizers = [unwrapped_optimizer(each) for each in several(optimizer)]
        if not optimizers:
            raise ConfigurationError(
                f"optimizer={optimizer}: your loop steps it, so pass the one that you have built, or a list of several"
            )
        self._optimizer = expect_optimizer(optimizers[0])
        expect_hooks(self._optimizer)
        self._others = {
            name: Variables(each) if isinstance(each, CONTAINERS) and not is_stateful(each) else each
            for name, each in (state or {}).items()
        }
        for number, each in enumerate(optimizers[1:], 1):
            if self._others.setdefault(name := f"optimizer_{number}", each) is not each:
                raise ConfigurationError(f"state={{{name!r}: …}}: choose another name; the optimizers' list takes it")
        layout = layout_of_own_loop(args.parallel)
        is_averaged = any(isinstance(each, DistributedDataParallel) for each in model.modules())
        self._parts = RunParts(
            args,
            layout=layout,
            model=unwrapped(model),
            optimizer=self._optimizer,
            schedulers=several(lr_scheduler),
            loader=resumable_loader(loader, seed=args.shuffle_seed, world_size=layout.data_size),
            callbacks=instances(callbacks),
            trainer=self,
            train_dataloader=loader,
            unsupported_events=UNSUPPORTED_EVENTS,
            comparison=Comparison.NEVER if is_averaged else Comparison.AT_SAVES,
        )
        self._dispatcher = self._parts.dispatcher
        self._lifecycle = RunLifecycle(
            self._parts,
            evaluations=[] if evaluate is None else [UserEvaluation(lambda: self._checks.evaluated(evaluate))],
            data=TrainingData.of_loader(loader),
            supplied=UserSupplied(),
            others=self._others,
            functions={"evaluate": evaluate},
        )
        self._data_size = layout.data_size
        self._session: Session | None = None  # of the newest leg; None if the run was finished before it
        self._finished: TrainResult | None = None
        self._has_ended = False  # a pass over the batches, with the last one
        self._index = 0  # of the current micro-batch in its step
        self._lr: float | torch.Tensor | None = None  # that the newest update used
        self._held: ExitStack | None = None  # inside the ``with`` block
        self._update = ExitStack()  # around the optimizer's own step
        warn_of_the_forgotten(self._parts, self._others)
        self._dispatcher.init_end.fire_with()

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint that this leg resumed from."""
        return self._lifecycle.resumed_from

    @property
    def result(self) -> TrainResult | None:
        """How the run ended; None until it has."""
        return self._finished if self._session is None else self._session.result

    @short_traceback
    def __enter__(self) -> Self:
        if self._held is None:  # otherwise the lock refuses this leg, and the one around it continues
            self._session, self._finished, self._has_ended = None, None, False
        with ExitStack() as held:
            begun = held.enter_context(self._lifecycle.leg(self._options))
            self._session, self._finished = (None, begun) if isinstance(begun, TrainResult) else (begun, None)
            if self._session is not None:
                held.enter_context(self._session)
                self._expect_other_rounding()
                self._checks = LoopChecks(self._parts, self._model, self._others)
                held.push(self._checks.close)
                held.callback(register_optimizer_step_post_hook(self._after_any_update).remove)
                held.callback(self._update.close)
                held.callback(self._optimizer.register_step_pre_hook(self._before_update).remove)
                held.callback(self._optimizer.register_step_post_hook(self._after_update).remove)
            self._held = held.pop_all()
        return self

    def _expect_other_rounding(self) -> None:
        if self.resumed_from is None or not rebuilds_buckets(self._model):
            return
        self._parts.witness.expect_difference("DistributedDataParallel rounds the first step after a resume otherwise")
        if self.state.is_world_process_zero:
            logger.warning(
                "DistributedDataParallel rounds the first step after a resume otherwise than the others: weights will "
                "differ in the last bits from those of an uninterrupted run; find_unused_parameters=True avoids that"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        assert held is not None, "left only once it was entered"
        held.__exit__(kind, error, trace)

    def batches(self) -> Iterator[Any]:
        """The batches of all remaining steps, of all epochs. Call :meth:`step_end` after each step's last batch.

        Raises:
            ConfigurationError: outside of ``with``; or if :meth:`step_end` was not called after a step's last batch.
        """
        if self._held is None:
            raise ConfigurationError(
                "ds.Run restores the run when its with block begins, and saves it when the block ends: with ds.Run(…) "
                "as run: for batch in run.batches(): …"
            )
        if self._session is None:
            return
        if self._has_ended and self.state.is_world_process_zero:
            logger.warning(
                "run.batches(): no batch is left: one pass has the batches of all epochs, and the one before ended "
                "behind step %d; leave out the loop over epochs around it, and set num_train_epochs= or max_steps=",
                self.state.global_step,
            )
        microbatch_begin = self._dispatcher.microbatch_begin
        for step_batch in chain.from_iterable(self._session.timelines()):
            for self._index, microbatch in enumerate(step_batch.microbatches):
                if microbatch_begin:
                    microbatch_begin.fill(microbatch.batch, self._index, microbatch.samples)
                    microbatch_begin.fire()
                yield microbatch.batch
                if self._checks.is_behind:
                    self._checks.end_pause()
        self._has_ended = True

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the step ends with the current batch: step the optimizer, and call :meth:`step_end`.

        Without ``gradient_accumulation_steps`` every batch is. An epoch's last step may have fewer than the others.
        """
        return self._index == len(self._current("is_last_microbatch").microbatches) - 1

    @property
    def microbatch_weight(self) -> float:
        """Factor for the current batch's mean loss before ``backward``, so that the step's loss is the mean over its
        samples on all ranks: 1 / n for one of n equally large batches, less for a smaller one, and 0 for padding, on a
        rank that has run out of data before the others. Compensates for DDP and FSDP2, which average over the ranks.
        """
        return self._current("microbatch_weight").share(self._index) * self._data_size

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around forward and backward of each batch: reduces gradients over the ranks only in the step's last batch.

        Uses DDP's ``no_sync()`` and FSDP2's ``set_requires_gradient_sync()``; does nothing to other models.

        Args:
            models: as the loop calls them; none: the run's own.
        """
        with ExitStack() as held:
            if not self.is_last_microbatch:
                for model in models or (self._model,):
                    if isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(False)
                        held.callback(model.set_requires_gradient_sync, True)
                    elif callable(no_sync := getattr(model, "no_sync", None)):
                        held.enter_context(no_sync())
            yield

    @property
    def _step_batch(self) -> StepBatch | None:
        return None if self._session is None else self._session.step_batch

    def _current(self, what: str) -> StepBatch:
        if self._step_batch is None:
            raise ConfigurationError(f"run.{what}: no step is in progress; it is known between a batch and step_end()")
        return self._step_batch

    def step_end(
        self,
        loss: torch.Tensor | float,
        *,
        grad_norm: torch.Tensor | float | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        """Count the step, whose update is done, and log, evaluate, save or stop if due.

        Args:
            loss: the step's mean loss on this rank; the mean over the ranks is logged. A tensor on the device causes no
                sync; ``loss.item()`` does.
            grad_norm: total L2 norm before clipping, if the loop computes it.
            lr: learning rate of the update; None: that of the optimizer's first group when it stepped.

        Raises:
            ConfigurationError: if no step has begun, the step has further batches, or a value is not a number.
        """
        step_batch = self._step_batch
        if self._session is None or step_batch is None:
            raise ConfigurationError("run.step_end(): no step has begun; take a batch from the run first")
        if not self.is_last_microbatch:
            of = f"{self._index + 1} of the {len(step_batch.microbatches)} batches of this step"
            size = self.args.accumulation.at(self.state.global_step)
            raise ConfigurationError(
                f"run.step_end() after {of} (gradient_accumulation_steps={size}); "
                "update the weights and call it only if run.is_last_microbatch"
            )
        self._session.step_end(
            self._number("loss", loss) / self._data_size,
            grad_norm=None if grad_norm is None else self._number("grad_norm", grad_norm),
            lr=self._lr if lr is None else lr,
        )
        step = self.state.global_step
        self._checks.end_step(step, is_captured=self._lifecycle.boundary.saves.captured_step == step)

    def _number(self, name: str, given: object) -> torch.Tensor:
        """``given`` as a 0-dim tensor, detached; a float goes to the model's device."""
        if isinstance(given, DTensor):
            given = given.full_tensor()
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            return given.detach().reshape(())
        if isinstance(given, (int, float)):
            return torch.tensor(float(given), device=device_of(self._model))
        shown = f"a tensor of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        raise ConfigurationError(
            f"run.step_end({name}=…): {shown}; needs one number: a tensor of one element, or a float"
        )

    def log(self, metrics: Mapping[str, Any], kind: str = "user") -> None:
        """Log a record of your own, of any kind. To be called on all ranks, with the same values."""
        if self._session is not None:
            self._checks.note_log()
        super().log(metrics, kind)

    def between_batches(self) -> None:
        """To be called in ``evaluate``, between two batches and equally often on all ranks: if a signal or the clock
        ends the leg, it interrupts the evaluation, and the next leg repeats that from its first batch."""
        self._lifecycle.boundary.evaluations.between_batches()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._update.enter_context(self._parts.rollback_effects.scaled_rates(self.state.global_step))
        self._lr = copied(optimizer.param_groups[0]["lr"])
        self._checks.before_update()
        if self._dispatcher.pre_optimizer_step:
            self._dispatcher.pre_optimizer_step.fill(None)
            self._dispatcher.pre_optimizer_step.fire()

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._update.close()
        if self._dispatcher.optimizer_step:
            self._dispatcher.optimizer_step.fire()

    def _after_any_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._checks.note_update(optimizer, in_step=self._step_batch is not None)
