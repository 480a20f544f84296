"""Trainer: the composition root. It puts model, data, optimizer and callbacks together, and lets the loop run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dalsegno.args import TrainingArguments
from dalsegno.checkpoint import unwrapped
from dalsegno.data import ResumableLoader, TrainingData
from dalsegno.data.build import Collator, eval_batches, evaluation_sets_from_args, train_loader_from_args
from dalsegno.data.step_batch import LossWeight
from dalsegno.distributed.parallel import FusedBackward, parallelize
from dalsegno.distributed.parallel.torchrun import init_distributed
from dalsegno.distributed.precision import autocast_dtype
from dalsegno.distributed.sharded_tensors import expect_materialized
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events.adapters import adapt
from dalsegno.events.callback import Callback
from dalsegno.events.registration import check_callbacks
from dalsegno.events.table import Event
from dalsegno.state import TrainerControl, TrainerState

from . import loop
from .evaluation import LossEvaluation
from .forward import ForwardPass, LossFunction
from .lifecycle import RunLifecycle
from .optim import PlateauStep, default_optimizer, default_scheduler
from .result import TrainResult
from .resume import ResumeOptions
from .settings import UserSupplied, planned_steps
from .step import TrainStep

_MEANT = {
    "train_data": "train_dataset",
    "eval_data": "eval_dataset",
    "train_loader": "train_dataloader",
    "eval_loader": "eval_dataloader",
    "optimizers": "optimizer",
    "scheduler": "lr_scheduler",
    "tokenizer": "processing_class",
    "collate_fn": "data_collator",
}

_WITH_ALL_GRADIENTS = (Event.GRADIENTS_READY, Event.PRE_OPTIMIZER_STEP)
_FUSED = "fuse_optim_with_backward=True cannot fire: no moment has all gradients; do without one of the two"


class Trainer:
    """Trains ``model`` as ``args`` say, and goes on with the run that lies in ``args.output_dir``.

    Args:
        model: called with each batch, ``model(**batch)`` for a mapping; returns the loss as a 0-dim tensor, as
            ``.loss`` or as ``["loss"]``.
        args: the settings of the run.
        train_dataset: map or iterable dataset; or give a ``train_dataloader`` of your own, which is taken as it is.
        eval_dataset: the same for evaluation; a dict of several is evaluated one by one, under their names.
        loss_fn: ``loss_fn(outputs, batch)``, for models that return no loss. If it is a module, it is moved to the
            model's device, its parameters are trained with the model's, and all its tensors are saved.
        loss_weight: what a batch's mean loss counts for in its step, say its number of tokens; the number of its
            samples if None. Costs a small collective per step when there are several ranks.
        data_collator: makes a batch of a list of samples; torch's own if None.
        optimizer: built on ``model`` (and ``loss_fn``); None: AdamW from ``args``.
        lr_scheduler: one or a list, each stepped after every step (a ``ReduceLROnPlateau`` after every evaluation,
            with ``metric_for_best_model``); None: warm-up and decay from ``args``, or constant with your own optimizer
            if ``args`` say so.
        callbacks: in the order in which they are called, after the default ones; other libraries' too.
        processing_class: the tokenizer or the like; handed to callbacks.

    Raises:
        ConfigurationError: if parts are missing, or do not fit together.
    """

    def __new__(cls, *args: Any, **named: Any) -> Trainer:
        known = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in named:
            if name not in known:
                raise UnknownName(f"argument of {cls.__name__}", name, known, _MEANT)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        train_dataloader: Iterable[Any] | None = None,
        eval_dataloader: Any = None,
        loss_fn: LossFunction | None = None,
        loss_weight: LossWeight | None = None,
        data_collator: Collator | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        callbacks: Sequence[object] = (),
        processing_class: Any = None,
    ) -> None:
        if not (isinstance(model, nn.Module) and isinstance(args, TrainingArguments)):
            raise ConfigurationError(
                f"Trainer({type(model).__name__}, {type(args).__name__}, …); it takes the model, a torch.nn.Module, "
                "and TrainingArguments, in this order"
            )
        check_callbacks(callbacks)
        expect_materialized(model)
        self.model = model
        self.args = args
        device = init_distributed(args.use_cpu)
        _check_writable(args.directory)
        feed = train_loader_from_args(args, train_dataset, train_dataloader, data_collator)
        model.to(device)
        if args.torch_compile:
            model.compile(backend=args.torch_compile_backend)
        loss_module = unwrapped(loss_fn).to(device) if isinstance(loss_fn, nn.Module) else None
        parallel = parallelize(model, args.parallel, device, loss_module)
        is_own_optimizer = optimizer is not None
        if optimizer is None:
            optimizer = default_optimizer([model] if loss_module is None else [model, loss_module], args)
        else:
            _check_steps_alone(optimizer)
            parallel.rebind(optimizer)
        sets = evaluation_sets_from_args(args, eval_dataset, eval_dataloader, data_collator)
        schedulers = _schedulers(lr_scheduler, optimizer, args, feed)
        plateaus = [each for each in schedulers if isinstance(each, ReduceLROnPlateau)]
        scaler = torch.amp.GradScaler(device.type) if args.fp16 else None
        self._loss_weight = loss_weight
        self._assembly = RunLifecycle(
            args,
            model=model,
            loss_fn=loss_module,
            optimizer=optimizer,
            schedulers=schedulers,
            feed=feed,
            callbacks=callbacks,
            core=[PlateauStep(plateaus, args.best_metric_name)] if plateaus else [],
            others={} if scaler is None else {"scaler": scaler},
            data=TrainingData(train_dataset, None, data_collator, args.dataloader_num_workers)
            if train_dataset is not None
            else TrainingData.of_loader(train_dataloader),
            brought=UserSupplied(
                optimizer=is_own_optimizer,
                schedule=lr_scheduler is not None,
                loader=train_dataloader is not None,
                loop=False,
            ),
            context_fields={
                "processing_class": processing_class,
                "train_dataloader": train_dataloader if train_dataloader is not None else feed,
                "eval_dataloader": eval_dataloader if eval_dataloader is not None else eval_batches(sets, device),
                "trainer": self,
            },
            unsupported_events=dict.fromkeys(_WITH_ALL_GRADIENTS, _FUSED) if args.fuse_optim_with_backward else {},
        )
        on = self._assembly.dispatcher
        if args.fuse_optim_with_backward:
            parallel = FusedBackward(parallel, model, optimizer, lambda: self._update.wants_norm())
        autocast = autocast_dtype(bf16=args.bf16, fp16=args.fp16)
        loss_fn = parallel.loss_fn or loss_module or loss_fn
        forward = ForwardPass(on, parallel.module, loss_fn, device, autocast, is_compiled=args.torch_compile)
        self._update = TrainStep(
            on,
            self.state,
            forward,
            parallel,
            optimizer,
            [each for each in schedulers if each not in plateaus],
            scaler=scaler,
            max_grad_norm=args.max_grad_norm,
            device=device,
        )
        self._evaluation = partial(
            LossEvaluation,
            on=on,
            forward=forward,
            device=device,
            loss_weight=loss_weight,
            between_batches=self._assembly.boundary.between_batches,
        )
        self._collator = data_collator
        self._assembly.boundary.evaluations = [self._evaluation(*each) for each in sets]
        _check_best(args, [each.name for each in sets])
        if on.init_end:
            on.init_end.fire()

    @property
    def state(self) -> TrainerState:
        return self._assembly.state

    @property
    def control(self) -> TrainerControl:
        return self._assembly.control

    @property
    def callbacks(self) -> list[Callback]:
        """In the order in which they are called."""
        return self._assembly.dispatcher.callbacks

    def train(
        self,
        resume_from_checkpoint: bool | str | Path = True,
        *,
        strict: bool = False,
        strict_callbacks: bool = False,
        allow_changes: Collection[str] = (),
        load_components: Collection[str] = (),
        continue_stopped: bool = False,
    ) -> TrainResult:
        """Bring the run in ``output_dir`` to its end: nothing happens if it is there already.

        Args:
            resume_from_checkpoint: True: go on from the newest checkpoint whose every byte verifies, or start if there
                is none. A path: go on from that one; what came later is moved into ``rewound/``. False: move all that
                is in ``output_dir`` into ``rewound/``, and start anew.
            strict: if the newest checkpoint is damaged, that is an error: no older one is used in its place.
            strict_callbacks: a saved callback that is not here, or one here that was not saved, is an error.
            allow_changes: what may differ from what was saved, although it is an error else: ``"dataset"``,
                ``"model"``, ``"optimizer"``. The error says what differs, and what becomes of it.
            load_components: load only these, say ``("model",)``, and begin a new run with them: from the checkpoint of
                another run at the path or, the model, from a file or folder of safetensors there. Once this run has
                checkpoints of its own, it goes on from the newest of them.
            continue_stopped: go on although a callback has judged the training to be over (early stopping, a
                divergence). Without it, that is done only if ``max_steps`` or ``num_train_epochs`` has been raised.

        Raises:
            UnknownName: for another name in ``allow_changes``, or one in ``load_components`` that is not there.
            Locked: if another live process trains in this ``output_dir``.
            NotFound: if there is no checkpoint at the path.
            DamagedCheckpoint: if the one at the path is damaged, or there are some, but not one is whole.
            StateMismatch: if what was saved does not fit what is here; nothing has been changed then.
            EmptyDataset: if there is not a single batch.
        """
        resume = ResumeOptions(
            resume_from_checkpoint, strict, strict_callbacks, allow_changes, load_components, continue_stopped
        )
        assembly = self._assembly
        with assembly.lock_run_dir():
            resumed_from = assembly.restore(resume)
            finished = assembly.finished_result(resume)
            if finished is not None:
                return finished
            assembly.mark_started()
            with self._update.leg():
                return assembly.mark_finished(
                    loop.train(assembly.session(resumed_from, self._loss_weight), self._update)
                )

    def evaluate(self) -> dict[str, float]:
        """Measure the model as it is on each evaluation set. On all ranks.

        Raises:
            ConfigurationError: if there is none.
        """
        if not self._assembly.boundary.evaluations:
            raise ConfigurationError(
                "trainer.evaluate(): there is nothing to evaluate on; give the trainer eval_dataset= or "
                "eval_dataloader=, or use trainer.predict(dataset)"
            )
        return self._assembly.boundary.evaluate()

    def predict(self, test_dataset: Any) -> dict[str, float]:
        """The metrics of the model as it is on other data, as ``test_loss`` and so on. On all ranks.

        What the model says to each batch is handed to ``on_prediction_step``; ``on_predict`` gets the metrics.
        """
        metrics: dict[str, float] = {}
        for name, prefix, feed in evaluation_sets_from_args(self.args, test_dataset, None, self._collator):
            metrics |= self._evaluation(name, prefix.replace("eval", "test", 1), feed)()
        on = self._assembly.dispatcher
        if on.predict:
            on.predict.fill(metrics)
            on.predict.fire()
        return metrics

    def log(self, metrics: MutableMapping[str, Any]) -> None:
        """Hand a record of your own to every logger (kind ``user``). On all ranks, with the same values."""
        self._assembly.boundary.log(dict(metrics), "user")

    def stop(self, reason: str = "trainer.stop() was called", *, save: bool = True) -> None:
        """Ask for the end of training at this step's end; from any thread, on any rank."""
        self.control.stop(reason, save=save)

    def save(self) -> None:
        """Ask for a checkpoint at this step's end; from any thread, on any rank."""
        self.control.should_save = True

    def skip_samples(self, samples: int) -> int:
        """Pass over so many samples (on all ranks together) of the epoch that begins: see ``SkipSamples``.

        To be called in on_epoch_begin, on all ranks alike. Of a map dataset nothing is loaded; all else is read past,
        in whole micro-batches.

        Returns:
            How many that were: fewer where the epoch ends, more where the last micro-batch goes beyond.
        """
        return self._assembly.feed.skip(samples)

    def add_callback(self, callback: object) -> None:
        """Let one more callback listen, after the others."""
        self._assembly.set_callbacks([*self._assembly.user_callbacks, adapt(callback)])

    def remove_callback(self, callback: object) -> Callback:
        """Let a callback, or the one with that key, listen no longer; it is returned.

        Raises:
            UnknownName: if there is none; the message names the nearest.
        """
        gone = self._assembly.dispatcher.find(callback if isinstance(callback, str) else adapt(callback).key)
        self._assembly.set_callbacks([each for each in self._assembly.user_callbacks if each is not gone])
        return gone


def _check_writable(directory: Path) -> None:
    """
    Raises:
        ConfigurationError: if nothing can be written where the run shall live: now, not at the first checkpoint.
    """
    existing = next(path for path in [directory, *directory.absolute().parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"output_dir={str(directory)!r}: {existing} is not a folder that can be written to")


def _check_steps_alone(optimizer: Optimizer) -> None:
    """
    Raises:
        ConfigurationError: if the optimizer evaluates the model by itself, several times a step.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"optimizer: {type(optimizer).__name__}.step needs a closure, which only a loop of your own can give it"
        )


def _check_best(args: TrainingArguments, sets: Sequence[str]) -> None:
    """
    Raises:
        ConfigurationError: if no evaluation will ever say which model is the best.
    """
    if not args.load_best_model_at_end or args.metric_for_best_model is not None:
        return
    if not sets:
        raise ConfigurationError("load_best_model_at_end=True needs eval_dataset= or eval_dataloader=")
    if sets != ["eval"]:
        names = ", ".join(f"eval_{name}_loss" for name in sets)
        raise ConfigurationError(f"load_best_model_at_end=True: say by metric_for_best_model= which decides: {names}")


def _schedulers(given: Any, optimizer: Optimizer, args: TrainingArguments, feed: ResumableLoader) -> list[Any]:
    if given is None:
        if any(group["lr"] is None for group in optimizer.param_groups):
            raise ConfigurationError(
                f"optimizer: the learning rate of {type(optimizer).__name__} is None, since it makes its own, so there "
                "is nothing that a schedule could change; give an lr_scheduler= that only reports it, as transformers' "
                "AdafactorSchedule(optimizer), or build the optimizer with a learning rate"
            )
        return [default_scheduler(optimizer, args, lambda: planned_steps(args, feed))]
    schedulers = list(given) if isinstance(given, (list, tuple)) else [given]
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError("lr_scheduler: it is built on another optimizer than the one that is given")
    return schedulers
