"""Run around a loop of one's own: the same events, state and checkpoints, without the Trainer.

::

    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=[JsonLogger()]) as run:
        for batch in run.batches():
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from . import ranks, run
from .args import TrainingArguments
from .assembly import Assembly
from .beginning import Resume
from .checkpoint import unwrapped
from .data import TrainingData, loader_feed
from .draw import Draw
from .events import Event
from .settings import Brought

UNFIRED = dict.fromkeys(
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


class Run(run.Run):
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
        evaluate: called when an evaluation is due, on all ranks; returns the metrics, reduced already.
        state: whatever else has ``state_dict`` and ``load_state_dict``, by a name that is not one of the run's own.
        resume_from_checkpoint: as in ``Trainer.train``, like the next four.
        strict: whether a damaged newest checkpoint is an error.
        strict_callbacks: whether a callback that came or went is an error.
        allow_changes: what may differ from what was saved.
        load_components: what to begin a new run with, from the path.

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
    ) -> None:
        schedulers = lr_scheduler if isinstance(lr_scheduler, (list, tuple)) else [lr_scheduler] if lr_scheduler else []
        self._assembly = parts = Assembly(
            args,
            model=unwrapped(model),
            optimizer=optimizer,
            schedulers=schedulers,
            feed=loader_feed(loader, seed=args.shuffle_seed, world_size=ranks.world_size()),
            callbacks=callbacks,
            others=state or {},
            data=TrainingData.of_loader(loader),
            brought=Brought(),
            surroundings={
                "processing_class": None,
                "train_dataloader": loader,
                "eval_dataloader": None,
                "trainer": self,
            },
            unfired=UNFIRED,
        )
        if evaluate is not None:
            parts.boundary.evaluations = [_Evaluation(evaluate)]
        super().__init__(
            args,
            on=parts.on,
            state=parts.state,
            control=parts.control,
            feed=parts.feed,
            meter=parts.meter,
            boundary=parts.boundary,
            saver=parts,
            buffers=parts.buffers,
        )
        self._optimizer = optimizer
        self._lr: float | torch.Tensor | None = None  # that the newest update used
        self._resume = Resume(resume_from_checkpoint, strict, strict_callbacks, allow_changes, load_components)
        self._held = ExitStack()
        if self._on.init_end:
            self._on.init_end.fire()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            held.enter_context(self._assembly.opened())
            self.resumed_from = self._assembly.restore(self._resume)
            self.result = self._assembly.finished()
            if self.result is None:
                self._assembly.begun()
                super().__enter__()
                held.callback(self._optimizer.register_step_pre_hook(self._before_update).remove)
                held.callback(self._optimizer.register_step_post_hook(self._after_update).remove)
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self.result is None:
                super().__exit__(kind, error, trace)
            if error is None and self.result is not None:
                self._assembly.ended(self.result)

    def draws(self) -> Iterator[Draw]:
        """As :meth:`dalsegno.run.Run.draws`; none if the run is finished."""
        if self.result is None:
            yield from super().draws()

    def step_end(
        self,
        loss: torch.Tensor,
        *,
        grad_norm: torch.Tensor | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        """The weights are updated: count the step, and do whatever is due.

        Args:
            loss: the step's mean loss on this rank, 0-dim; what is logged is the mean over the ranks.
            grad_norm: total L2 norm before clipping, 0-dim, if the loop knows it.
            lr: the learning rate that was used; None: what the optimizer's first group had when it stepped.
        """
        share = loss.detach() / ranks.world_size()
        super().step_end(share, grad_norm=grad_norm, lr=self._lr if lr is None else lr)

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Hand a record of your own to every logger (kind ``user``). On all ranks, with the same values."""
        self._boundary.log(dict(metrics), "user")

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
        return self._feed.skip(samples)

    def between_batches(self) -> None:
        """To be called in ``evaluate``, between two batches and equally often on all ranks: where a signal or the
        clock ends the run, this leads out of the evaluation, which the next leg then does from its beginning."""
        self._boundary.between_batches()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        lr = optimizer.param_groups[0]["lr"]
        self._lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
        if self._on.pre_optimizer_step:
            self._on.pre_optimizer_step.fill(None)
            self._on.pre_optimizer_step.fire()

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._on.optimizer_step:
            self._on.optimizer_step.fire()


class _Evaluation:
    """A function of the user's, as an evaluation set."""

    name = "eval"

    def __init__(self, function: Callable[[], Mapping[str, float]]) -> None:
        self._function = function

    def __call__(self) -> dict[str, float]:
        return dict(self._function())
