"""Run around a loop of one's own: the same events, state and checkpoints, without the Trainer.

::

    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=[JsonLogger()]) as run:
        for batch in run.batches():
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)

With several batches in a step (``gradient_accumulation_steps``), the run says which is its last::

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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.data import TrainingData, resumable_loader
from dalsegno.data.step_batch import StepBatch
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of, expect_materialized
from dalsegno.errors import ConfigurationError
from dalsegno.events.table import Event
from dalsegno.state import TrainerControl, TrainerState

from .evaluation import BetweenBatches
from .lifecycle import RunLifecycle
from .parts import build_parts
from .result import TrainResult
from .resume import ResumeOptions
from .session import Session
from .settings import UserSupplied

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
    "a loop around dalsegno.Run cannot fire; use dalsegno.Trainer for it, or another callback",
)
"""What happens inside a loop that is not ours. A callback that needs one of them is refused when it is given."""


class Run:
    """Brings the run in ``args.output_dir`` to its end, with a hand-written loop inside ``with``.

    Entering restores everything, from the newest verified checkpoint if there is one; if the run is finished, there
    are no batches. The optimizer's own hooks fire on_pre_optimizer_step and on_optimizer_step.

    Args:
        args: the settings; those of the update itself (clipping, precision, schedule) are the loop's own affair.
        model: as the loop calls it, or what is inside of it. On several ranks its persistent buffers (running
            statistics) are rank 0's on every rank at each step's end.
        optimizer: the one that the loop steps.
        loader: yields the batches. One with ``state_dict`` goes on by itself, another is read again up to its place.
        lr_scheduler: whose state is saved too; one, or a list. The loop steps it.
        callbacks: as for the Trainer.
        evaluate: called when an evaluation is due, on all ranks; returns the metrics by name, reduced already:
            ``{"eval_loss": 0.7}``.
        state: whatever else has ``state_dict`` and ``load_state_dict``, by a name that is not one of the run's own.
        resume_from_checkpoint: as in ``Trainer.train``, like the next five.
        strict: whether a damaged newest checkpoint is an error.
        strict_callbacks: whether a callback that came or went is an error.
        allow_changes: what may differ from what was saved.
        load_components: what to begin a new run with, from the path.
        continue_stopped: whether to go on although a callback has judged the training to be over.

    Raises:
        EventNotFired: for a callback that needs an event which a hand-written loop cannot fire.
        ConfigurationError: for a name in ``state`` that the run itself saves something under; or if the optimizer
            trains what is neither the model's nor in ``state``, or nothing of the model.
    """

    def __init__(
        self,
        args: TrainingArguments,
        *,
        model: nn.Module,
        optimizer: Optimizer,
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
        expect_materialized(model)
        schedulers = lr_scheduler if isinstance(lr_scheduler, (list, tuple)) else [lr_scheduler] if lr_scheduler else []
        self.args = args
        self.resumed_from: Path | None = None
        """The checkpoint that this leg resumed from."""
        self._model = model
        self._optimizer = optimizer
        self._options = ResumeOptions(
            resume_from_checkpoint, strict, strict_callbacks, allow_changes, load_components, continue_stopped
        )
        self._parts = build_parts(
            args,
            model=unwrapped(model),
            optimizer=optimizer,
            schedulers=schedulers,
            loader=resumable_loader(loader, seed=args.shuffle_seed, world_size=collectives.world_size()),
            callbacks=callbacks,
            context_fields={
                "processing_class": None,
                "train_dataloader": loader,
                "eval_dataloader": None,
                "trainer": self,
            },
            unsupported_events=UNSUPPORTED_EVENTS,
        )
        self._dispatcher = self._parts.dispatcher
        self._lifecycle = RunLifecycle(
            self._parts,
            evaluations=[] if evaluate is None else [_UserEvaluation(evaluate)],
            data=TrainingData.of_loader(loader),
            supplied=UserSupplied(),
            others=state or {},
        )
        self._world_size = collectives.world_size()
        self._is_inside = False  # the ``with`` block
        self._session: Session | None = None  # of the newest leg; None if the run was finished before it
        self._finished: TrainResult | None = None
        self._index = 0  # of the present micro-batch in its step
        self._lr: float | torch.Tensor | None = None  # that the newest update used
        self._held = ExitStack()
        if self._dispatcher.init_end:
            self._dispatcher.init_end.fire()

    @property
    def state(self) -> TrainerState:
        return self._parts.state

    @property
    def control(self) -> TrainerControl:
        return self._parts.control

    @property
    def result(self) -> TrainResult | None:
        """How the run ended; None until it has."""
        return self._finished if self._session is None else self._session.result

    def __enter__(self) -> Self:
        lifecycle = self._lifecycle
        with ExitStack() as held:
            held.enter_context(lifecycle.lock_run_dir())
            self._session = None
            self.resumed_from = lifecycle.restore(self._options)
            self._finished = lifecycle.finished_result(self._options)
            if self._finished is None:
                lifecycle.mark_started()
                self._session = lifecycle.session(self.resumed_from)
                held.enter_context(self._session)
                held.callback(self._optimizer.register_step_pre_hook(self._before_update).remove)
                held.callback(self._optimizer.register_step_post_hook(self._after_update).remove)
            self._held = held.pop_all()
        self._is_inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        self._held.__exit__(kind, error, trace)
        if error is None and self.result is not None:
            self._lifecycle.mark_finished(self.result)

    def batches(self) -> Iterator[Any]:
        """The batches of the steps that are left to do. :meth:`step_end` is due after each step's last one.

        Raises:
            ConfigurationError: outside of ``with``; or if a step's last batch is behind, and it did not end.
        """
        if not self._is_inside:
            raise ConfigurationError(
                "ds.Run restores when it is entered, and saves and ends the run when it is left: with ds.Run(…) as "
                "run: for batch in run.batches(): …"
            )
        if self._session is None:
            return
        microbatch_begin = self._dispatcher.microbatch_begin
        for step_batch in self._session.steps():
            for self._index, microbatch in enumerate(step_batch.microbatches):
                if microbatch_begin:
                    microbatch_begin.fill(microbatch.batch, self._index, microbatch.samples)
                    microbatch_begin.fire()
                yield microbatch.batch

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the step ends with the present batch: step the optimizer, and call :meth:`step_end`.

        Without ``gradient_accumulation_steps`` that is each. At an epoch's end a step may have fewer than the others.
        """
        return self._index == len(self._present("is_last_microbatch").microbatches) - 1

    @property
    def microbatch_weight(self) -> float:
        """By what to multiply the present batch's mean loss before ``backward``, so that the step's is the mean over
        its samples, on all ranks: 1 / n for one of n that are equally large, less for a smaller one, and 0 for one
        that only pads, on a rank that has run out of data while another has not. DDP and FSDP2 average over the ranks;
        that is allowed for.
        """
        return self._present("microbatch_weight").share(self._index) * self._world_size

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around forward and backward of each batch: gradients are reduced over the ranks in the step's last one only.

        What DDP's ``no_sync()`` and FSDP2's ``set_requires_gradient_sync()`` are for. Where nothing is reduced it
        does nothing.

        Args:
            models: as the loop calls them; the one that the run was given, if none.
        """
        with ExitStack() as held:
            if not self.is_last_microbatch:
                for model in models or (self._model,):
                    _accumulate(model, held)
            yield

    @property
    def _step_batch(self) -> StepBatch | None:
        return None if self._session is None else self._session.step_batch

    def _present(self, what: str) -> StepBatch:
        if self._step_batch is None:
            raise ConfigurationError(f"run.{what}: there is no batch just now; it is known from a batch to step_end()")
        return self._step_batch

    def step_end(
        self,
        loss: torch.Tensor | float,
        *,
        grad_norm: torch.Tensor | float | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        """The weights are updated: count the step, and do whatever is due.

        Args:
            loss: the step's mean loss on this rank; what is logged is the mean over the ranks. A tensor on the device
                is not waited for; ``loss.item()`` is.
            grad_norm: total L2 norm before clipping, if the loop knows it.
            lr: the learning rate that was used; None: what the optimizer's first group had when it stepped.

        Raises:
            ConfigurationError: if no step has begun, or this one has further batches; or for what is no number.
        """
        step_batch = self._step_batch
        if self._session is None or step_batch is None:
            raise ConfigurationError("run.step_end(): no step has begun; take a batch from the run first")
        if not self.is_last_microbatch:
            of = f"{self._index + 1} of the {len(step_batch.microbatches)} batches of this step"
            raise ConfigurationError(
                f"run.step_end() after {of} (gradient_accumulation_steps={self.args.gradient_accumulation_steps}); "
                "update the weights and call it only if run.is_last_microbatch"
            )
        self._session.step_end(
            self._number("loss", loss) / self._world_size,
            grad_norm=None if grad_norm is None else self._number("grad_norm", grad_norm),
            lr=self._lr if lr is None else lr,
        )

    def _number(self, name: str, given: object) -> torch.Tensor:
        """It as a 0-dim tensor, detached; where it lies, or with the model."""
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

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Hand a record of your own to every logger (kind ``user``). On all ranks, with the same values."""
        self._lifecycle.boundary.recorder.log(dict(metrics), "user")

    def stop(self, reason: str = "run.stop() was called", *, save: bool = True) -> None:
        """Ask for the end of training at this step's end; on any rank."""
        self.control.stop(reason, save=save)

    def save(self) -> None:
        """Ask for a checkpoint at this step's end; on any rank."""
        self.control.should_save = True

    def skip_samples(self, samples: int) -> int:
        """Read past so many samples (on all ranks together) of the epoch that begins, in whole batches.

        To be called in on_epoch_begin, on all ranks alike; gives how many that were.
        """
        return self._parts.loader.skip(samples)

    def between_batches(self) -> None:
        """To be called in ``evaluate``, between two batches and equally often on all ranks: where a signal or the
        clock ends the run, this leads out of the evaluation, which the next leg then does from its beginning."""
        self._lifecycle.boundary.evaluations.between_batches()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        lr = optimizer.param_groups[0]["lr"]
        self._lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        if self._dispatcher.pre_optimizer_step:
            self._dispatcher.pre_optimizer_step.fill(None)
            self._dispatcher.pre_optimizer_step.fire()

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._dispatcher.optimizer_step:
            self._dispatcher.optimizer_step.fire()


def _accumulate(model: nn.Module, held: ExitStack) -> None:
    """Keep the gradients of a model's backward passes on this rank, until ``held`` closes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        held.callback(model.set_requires_gradient_sync, True)
    elif callable(no_sync := getattr(model, "no_sync", None)):
        held.enter_context(no_sync())


class _UserEvaluation:
    """A function of the user's, as an evaluation set."""

    name = "eval"

    def __init__(self, function: Callable[[], Mapping[str, float]]) -> None:
        self._function = function

    def __call__(self, between_batches: BetweenBatches) -> dict[str, float]:
        """``between_batches`` is not called here: the function calls ``run.between_batches()``.

        Raises:
            ConfigurationError: if it returns something else than numbers by name.
        """
        metrics: Any = self._function()
        try:
            return {str(name): _plain(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f'evaluate= returned {metrics!r}; needs the metrics by name, each a number: {{"eval_loss": 0.7}}'
            ) from error


def _plain(value: Any) -> float:
    """A number as Python has it; it may be a tensor or an array of one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, (int, float)):
        raise TypeError(f"{number!r} is not a number")
    return number
