"""Trainer: builds the parts of a run from a model, its data, its optimizer and its callbacks, and trains it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dalsegno.args import TrainingArguments, answers
from dalsegno.data import EvalLoader, ResumableLoader, TrainingData
from dalsegno.data.build import (
    Collator,
    EvaluationSet,
    PaddedRows,
    eval_batches,
    evaluation_sets_from_args,
    train_loader_from_args,
)
from dalsegno.data.step_batch import LossWeight
from dalsegno.distributed.layout import build_layout
from dalsegno.distributed.modes import STAGES, modes_of, parts_of_batch
from dalsegno.distributed.parallel import FusedBackward, Pipelined
from dalsegno.distributed.parallel.base import autocast_dtype
from dalsegno.distributed.parallel.torchrun import init_distributed
from dalsegno.errors import ConfigurationError, expect_known, no_attribute
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import Context
from dalsegno.events.registration import check_callbacks, instances
from dalsegno.events.table import Event
from dalsegno.state import TrainerState
from dalsegno.stateful.annotations import ConstructorSignature
from dalsegno.stateful.component import Stateful, stateful_behind
from dalsegno.system.tracebacks import short_traceback

from . import loop
from .checkpoint_contents import UserSupplied
from .chosen_start import ResumeOptions
from .evaluation import LossEvaluation, joined_outputs
from .learning_rate import PlateauStep, StepPlan, build_schedulers
from .lifecycle import OfRun, RunLifecycle, check_given
from .prepared_model import PreparedModel, prepare_model
from .result import Prediction, TrainResult
from .run_parts import Comparison, RunParts
from .train_step import (
    Accumulation,
    AgreedGradScaler,
    BatchSignature,
    EvaluationForward,
    ForwardPass,
    LossFunction,
    MicrobatchAccumulation,
    PipelinedAccumulation,
    PipelinedForward,
    TrainStep,
)


class Trainer(OfRun):
    """Trains ``model`` with the settings ``args``, and resumes the run in ``args.output_dir``.

    Args:
        model: called with each batch, ``model(**batch)`` for a mapping, of which it gets the columns that its
            ``forward`` takes; returns the loss as a 0-dim tensor, as ``.loss`` or as ``["loss"]``.
        args: the settings of the run.
        train_dataset: map or iterable dataset; or pass your own ``train_dataloader``, which is used as it is.
        eval_dataset: the same for evaluation; the sets of a dict are evaluated one by one, under their names.
        loss_fn: ``loss_fn(outputs, batch)``, for models that return no loss. Batches ``(x, y)`` are split if it is one
            of torch's losses, or the model takes ``x`` only: ``model(x)``, then ``loss_fn(outputs, y)``. If it is a
            module, it is moved to the model's device, its parameters are trained with the model's, and all its tensors
            are saved. Of this and the next two, an object with ``state_dict`` and ``load_state_dict`` is saved.
        loss_weight: weight of a batch's mean loss within its step, a function of the batch, say its number of tokens;
            None: its number of samples. On several ranks it costs a small collective per step.
        data_collator: makes a batch from a list of samples; None: torch's own, which also takes rows of lists, as
            Hugging Face's datasets have them, and pads them as ``processing_class`` does.
        optimizer: built on ``model`` (and ``loss_fn``); None: AdamW from ``args``.
        lr_scheduler: one or a list, each stepped after every step (a ``ReduceLROnPlateau`` after every evaluation,
            with ``metric_for_best_model``); None: warm-up and decay from ``args``.
        callbacks: called in this order, after the default ones; those of other libraries work too.
        processing_class: tokenizer or processor; pads rows of lists, and is passed to callbacks.

    Raises:
        ConfigurationError: if parts are missing, or do not fit together.
    """

    __signature__ = ConstructorSignature()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        unused = _NEVER_CALLED | {event.handler: "the same method of a callback in callbacks=[…]" for event in Event}
        overridden = [name for name in unused if getattr(cls, name, None) is not getattr(Trainer, name, None)]
        if overridden:
            raise ConfigurationError(
                f"class {cls.__name__}: training never calls these methods of a Trainer's subclass; use instead\n"
                + "\n".join(f"  of {name}(): {unused[name]}" for name in overridden)
            )

    def __new__(cls, *args: Any, **named: Any) -> Trainer:
        known = [*inspect.signature(cls).parameters]
        if not {*named} <= {*known}:
            settings = {each: f"use TrainingArguments({each}=…)" for each in TrainingArguments.__dataclass_fields__}
            advice = settings | answers(known, "TrainingArguments")
            expect_known(f"argument of {cls.__name__}", named, known, advice)
        return super().__new__(cls)

    @short_traceback
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
        callbacks = instances(callbacks)
        _check_arguments(model, args, callbacks, loss_fn=loss_fn, loss_weight=loss_weight, data_collator=data_collator)
        self.model, self.args, self._collator = model, args, data_collator or PaddedRows(processing_class)
        device = init_distributed(args.use_cpu)
        layout = build_layout(args.parallel, device)
        loader = train_loader_from_args(args, layout, train_dataset, train_dataloader, self._collator)
        prepared = prepare_model(model, loss_fn, optimizer, args, device, layout)
        sets = evaluation_sets_from_args(args, layout, eval_dataset, eval_dataloader, self._collator)
        _check_best(args, [each.name for each in sets])
        schedulers = build_schedulers(lr_scheduler, prepared.optimizer, args, plan := StepPlan(args, loader))
        context_fields = {
            "processing_class": processing_class,
            "train_dataloader": loader if train_dataloader is None else train_dataloader,
            "eval_dataloader": eval_batches(sets, device) if eval_dataloader is None else eval_dataloader,
            "trainer": self,
        }
        self._parts = _build_parts(args, prepared, schedulers, loader, plan, callbacks, context_fields)
        functions = {"loss_fn": None if prepared.loss_module else loss_fn, "loss_weight": loss_weight}
        handed_in = {name: each for name in functions if (each := stateful_behind(functions[name])) is not None}
        self._train_step, self._evaluation = build_step(self._parts, prepared, loss_weight, [*handed_in.values()])
        self._lifecycle = RunLifecycle(
            self._parts,
            evaluations=[self._evaluation(*each) for each in sets],
            data=TrainingData.of_loader(train_dataloader)
            if train_dataset is None
            else TrainingData(train_dataset, None, data_collator, args.dataloader_num_workers),
            supplied=UserSupplied(
                optimizer is not None, lr_scheduler is not None, train_dataloader is not None, loop=False
            ),
            others={**self._train_step.stateful, **handed_in},
            functions=functions,
        )
        self._parts.dispatcher.init_end.fire_with()

    def __getattr__(self, name: str) -> Any:
        places = {
            "trainer": dir(type(self)),
            "trainer.state": TrainerState.__dataclass_fields__,
            "trainer.args": TrainingArguments.__dataclass_fields__,
        }
        in_callback = f"ctx.{name} in a callback" if name in Context.__dataclass_fields__ else None
        raise no_attribute(self, name, places, _ELSEWHERE.get(name, in_callback))

    @short_traceback
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
        """Train the run in ``output_dir`` to its end; a run that is finished already is not trained.

        Args:
            resume_from_checkpoint: True: resume from the newest checkpoint whose every byte verifies, or start if there
                is none. A path: resume from that checkpoint; what came later moves into ``rewound/``. False: move all
                of ``output_dir`` into ``rewound/``, and start anew.
            strict: raise if the newest checkpoint is damaged, instead of using an older one.
            strict_callbacks: raise if a saved callback is missing here, or one here was not saved.
            allow_changes: what may differ from the checkpoint without an error: ``"dataset"``, ``"model"``,
                ``"optimizer"``. The error names the difference and its consequence.
            load_components: load only these, say ``("model",)``, and begin a new run with them: from another run's
                checkpoint at the path or, for the model, a file or folder of safetensors there. Once this run has
                checkpoints, it resumes from the newest of them.
            continue_stopped: continue a run that a callback has ended (early stopping, a divergence). Otherwise such a
                run resumes only if ``max_steps`` or ``num_train_epochs`` was raised.

        Raises:
            UnknownName: for an unknown name in ``allow_changes`` or ``load_components``.
            Locked: if another live process trains in this ``output_dir``.
            LeaseLost: if another process takes the run over meanwhile. Nothing is written from then on.
            NotFound: if there is no checkpoint at the path.
            DamagedCheckpoint: if the checkpoint at the path is damaged, or no checkpoint verifies.
            StateMismatch: before anything is changed, if a saved state does not fit its object here.
            EmptyDataset: if the training data contains no batch.
        """
        options = ResumeOptions(
            resume_from_checkpoint, strict, strict_callbacks, allow_changes, load_components, continue_stopped
        )
        with self._lifecycle.leg(options) as begun:
            if isinstance(begun, TrainResult):
                return begun
            with self._train_step.leg():
                return loop.train(begun, self._train_step)

    @short_traceback
    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Evaluate the model as it is on each evaluation set. Collective.

        Args:
            eval_dataset: one set, or a dict of several, instead of the trainer's.

        Raises:
            ConfigurationError: if there is no evaluation set.
        """
        evaluations = self._lifecycle.boundary.evaluations
        if eval_dataset is None and not evaluations.has_sets:
            raise ConfigurationError(
                "trainer.evaluate(): there is no evaluation set; pass eval_dataset= or eval_dataloader= to the "
                "trainer, or use trainer.predict(dataset)"
            )
        if eval_dataset is None:
            return evaluations.evaluate()
        return evaluations.evaluate([self._evaluation(*each) for each in self._sets_of(eval_dataset)])

    def _sets_of(self, dataset: Any) -> list[EvaluationSet]:
        if dataset is None:
            raise ConfigurationError("None has no samples to evaluate; pass a dataset, or a dict of several")
        return evaluation_sets_from_args(self.args, self._parts.layout, dataset, None, self._collator)

    @short_traceback
    def predict(self, test_dataset: Any, *, outputs: bool = False) -> Prediction:
        """Measure the present model on other data: ``test_loss`` and so on. Collective.

        ``on_prediction_step`` receives the outputs of each batch, ``on_predict`` the metrics.

        Args:
            test_dataset: one set, or a dict of several.
            outputs: also keep what the model returns, of all samples in the dataset's order, on every rank: the result
                is a dict of metrics with the attribute ``outputs``.
        """
        if outputs and STAGES in self._parts.layout.dimensions:
            raise ConfigurationError(
                "predict(outputs=True): not under a pipeline; use on_prediction_step of a callback"
            )
        found, by_name = Prediction(), {}
        for name, prefix, loader in self._sets_of(test_dataset):
            evaluation, kept = self._evaluation(name, prefix.replace("eval", "test", 1), loader), list[Any]()
            found |= evaluation(self._lifecycle.boundary.evaluations.between_batches, kept if outputs else None)
            by_name[name] = joined_outputs(kept, self._parts.layout) if outputs else None
        found.outputs = by_name if outputs and isinstance(test_dataset, dict) else next(iter(by_name.values()), None)
        self._parts.dispatcher.predict.fire_with(found)
        return found

    @short_traceback
    def add_callback(self, callback: object) -> None:
        """Add a callback, or an instance of its class; it is called after the others."""
        self._parts.callbacks.add(callback)

    @short_traceback
    def remove_callback(self, callback: object) -> Callback:
        """Remove a callback, given itself, its key or its class (the first of that class), and return it. An event that
        is being handled still reaches it.

        Raises:
            UnknownName: if there is none; the message suggests the nearest key.
        """
        return self._parts.callbacks.remove(callback)

    @short_traceback
    def pop_callback(self, callback: object) -> object:
        """Like :meth:`remove_callback`, but return another library's callback without its adapter, as it was given."""
        return inspect.unwrap(self._parts.callbacks.remove(callback))  # type: ignore[arg-type]


def _check_arguments(model: object, args: object, callbacks: Sequence[object], **functions: object) -> None:
    if not (isinstance(model, nn.Module) and isinstance(args, TrainingArguments)):
        raise ConfigurationError(
            f"Trainer({type(model).__name__}, {type(args).__name__}, …); it takes the model, a torch.nn.Module, "
            "and TrainingArguments, in this order"
        )
    check_callbacks(callbacks)
    check_given(args, model, **functions)


def _check_best(args: TrainingArguments, sets: Sequence[str]) -> None:
    if not args.load_best_model_at_end or args.metric_for_best_model is not None:
        return
    if not sets:
        raise ConfigurationError("load_best_model_at_end=True needs eval_dataset= or eval_dataloader=")
    if sets != ["eval"]:
        names = ", ".join(f"eval_{name}_loss" for name in sets)
        raise ConfigurationError(f"load_best_model_at_end=True: set metric_for_best_model to one of {names}")


def _build_parts(
    args: TrainingArguments,
    prepared: PreparedModel,
    schedulers: Sequence[Any],
    loader: ResumableLoader,
    plan: StepPlan,
    callbacks: Sequence[object],
    context_fields: Mapping[str, Any],
) -> RunParts:
    has_plateau = any(isinstance(each, ReduceLROnPlateau) for each in schedulers)
    unsupported = _UNSUPPORTED_IF_FUSED if args.fuse_optim_with_backward else {}
    return RunParts(
        args,
        layout=prepared.layout,
        model=prepared.model,
        loss_fn=prepared.loss_module,
        optimizer=prepared.optimizer,
        schedulers=schedulers,
        loader=loader,
        plan=plan,
        callbacks=callbacks,
        core=[PlateauStep(schedulers, args.best_metric_name)] if has_plateau else [],
        **context_fields,
        unsupported_events=_UNSUPPORTED_IF_PIPELINED if isinstance(prepared.parallel, Pipelined) else unsupported,
        comparison=Comparison.NEVER if modes_of(args.parallel) else Comparison.FROM_FIRST_STEP,
    )


_BUILT_LOADER = "train_dataloader= or eval_dataloader=, a loader that you build; or data_collator="
_BUILT_OPTIMIZER = "optimizer=, which you build on the model"
_BUILT_SCHEDULE = "lr_scheduler=, which you build on the optimizer; or the settings learning_rate, lr_scheduler_type, …"
_METRICS = "callbacks=[ModelEvalMetrics(…)] for metrics, on_prediction_step or on_evaluate of a callback"
_ON_SAVE = "on_save of a callback, which gets the checkpoint's path"
_OWN_STEP = "loss_fn=, a callback (on_before_forward, on_before_backward, …), or a loop of your own around dalsegno.Run"

_NEVER_CALLED = {
    "compute_loss": "loss_fn=, a function of the model's outputs and the batch",
    **dict.fromkeys(["training_step", "get_batch_samples", "compute_loss_context_manager"], _OWN_STEP),
    **dict.fromkeys(["_prepare_inputs", "_prepare_input"], "data_collator=, or on_before_forward of a callback"),
    "create_optimizer": _BUILT_OPTIMIZER,
    "get_optimizer_cls_and_kwargs": _BUILT_OPTIMIZER,
    "get_decay_parameter_names": _BUILT_OPTIMIZER,
    "create_scheduler": _BUILT_SCHEDULE,
    "create_optimizer_and_scheduler": f"{_BUILT_OPTIMIZER}; {_BUILT_SCHEDULE}",
    **dict.fromkeys(["get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"], _BUILT_LOADER),
    **dict.fromkeys(["_get_train_sampler", "_get_eval_sampler"], _BUILT_LOADER),
    **dict.fromkeys(["evaluate", "evaluation_loop", "prediction_step", "validation_step"], _METRICS),
    "log": "on_log_step of a callback, which may add to every record",
    **dict.fromkeys(["save", "save_model", "_save", "_save_checkpoint"], _ON_SAVE),
    "stop": "on_train_end of a callback, which gets the reason",
    "_load_from_checkpoint": "on_load of a callback, or its load_state_dict",
    "_load_best_model": "on_train_end of a callback",
}
"""Methods that another library's loop calls, or that the user calls in this one, and what to use instead."""

_ELSEWHERE = _NEVER_CALLED | {
    "fit": "trainer.train()",
    "resume": "trainer.train(), which resumes by itself",
    "test": "trainer.predict(dataset)",
    "validate": "trainer.evaluate()",
    "save_checkpoint": "trainer.save()",
    "save_model": "dalsegno.export_model(checkpoint, folder), or trainer.save() for a checkpoint",
    "save_state": "trainer.save()",
    "log_metrics": "trainer.log(metrics)",
    "should_stop": "trainer.control.should_training_stop, or trainer.stop()",
}
"""Attributes of other libraries' trainers."""

_UNSUPPORTED_IF_FUSED = dict.fromkeys(
    [Event.GRADIENTS_READY, Event.PRE_OPTIMIZER_STEP],
    "fuse_optim_with_backward=True cannot fire, since not all gradients exist at any one time; remove one of the two",
)
_UNSUPPORTED_IF_PIPELINED = dict.fromkeys(
    [Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD],
    "a pipeline cannot fire: no rank runs the whole forward or backward pass of a micro-batch, and the passes of "
    "several micro-batches alternate; use on_microbatch_end, or another parallel mode",
)


MakeEvaluation = Callable[[str, str, EvalLoader], LossEvaluation]
"""``(name, prefix, loader)``"""


def build_step(
    parts: RunParts, prepared: PreparedModel, loss_weight: LossWeight | None, affected: Sequence[Stateful] = ()
) -> tuple[TrainStep, MakeEvaluation]:
    """The train step, and what makes evaluations, which may change the state of ``affected`` objects."""
    args, device, parallel, dispatcher = parts.args, prepared.device, prepared.parallel, parts.dispatcher

    def wants_norm() -> bool:
        return bool(args.max_grad_norm) or parts.state.will_log or dispatcher.listens_anywhere(Event.TRAIN_METRICS)

    if isinstance(parallel, Pipelined):
        for accumulated in sorted({*args.accumulation.values.values()}):
            parallel.runner.check(accumulated * parts_of_batch(args.parallel))
        for name in ("torch_compile", "fuse_optim_with_backward"):
            if getattr(args, name):
                raise ConfigurationError(
                    f"{name}=True does not work with parallel={args.parallel}: no rank has the whole model; set it to "
                    "False"
                )
    if args.fuse_optim_with_backward:
        parallel = FusedBackward(parallel, parts.model, parts.optimizer, wants_norm)
    forward = ForwardPass(
        dispatcher,
        parallel.module,
        prepared.loss_fn,
        device,
        autocast_dtype(bf16=args.bf16, fp16=args.fp16),
        args.torch_compile,
        BatchSignature(parts.model, prepared.loss_module or prepared.loss_fn),
    )
    scaler = None
    if args.fp16:
        scaler = (AgreedGradScaler if prepared.layout.sharing > 1 else torch.amp.GradScaler)(device.type)
    accumulate: Accumulation
    evaluated: EvaluationForward = forward
    size = parts.layout.data_size
    if isinstance(parallel, Pipelined):
        accumulate = PipelinedAccumulation(forward, parallel, size, scaler)
        evaluated = PipelinedForward(forward, parallel.runner)
    else:
        accumulate = MicrobatchAccumulation(forward, parallel, size, scaler)
    evaluation = partial(
        LossEvaluation, parts=parts, forward=evaluated, device=device, loss_weight=loss_weight, affected=affected
    )
    return TrainStep(parts, accumulate, parallel, wants_norm, scaler=scaler), evaluation
