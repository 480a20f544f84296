"""What Hugging Face's settings, progress and records are in dalsegno's terms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import transformers
from transformers.trainer_callback import DefaultFlowCallback

from dalsegno.args import TrainingArguments
from dalsegno.logs.repeats import RecordDifference
from dalsegno.policies.triggers import OnBest
from dalsegno.state import TrainerState
from dalsegno.witness import OnResume


def settings_of(args: Any, state: Any, on_resume: OnResume) -> TrainingArguments:
    """Hugging Face's settings as dalsegno's, as far as it has them."""
    same = (
        "output_dir",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "seed",
        "data_seed",
        "disable_tqdm",
        "run_name",
    )
    values: dict[str, Any] = {name: getattr(args, name) for name in same}
    for kind in ("logging", "eval", "save"):
        strategy = getattr(args, f"{kind}_strategy").value
        if strategy == "best":
            values["save"] = OnBest()
        else:
            values |= {f"{kind}_strategy": strategy, f"{kind}_steps": int(getattr(state, f"{kind}_steps") or 0)}
    return TrainingArguments(
        **values,
        on_resume=on_resume,
        max_steps=state.max_steps or -1,
        num_train_epochs=float(args.num_train_epochs),
        save_total_limit=args.save_total_limit or None,
    )


def mirror(own: TrainerState, args: Any, state: Any) -> None:
    """Copy the trainer's progress to dalsegno's state."""
    for name in ("global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen", "total_flos", "best_metric"):
        setattr(own, name, getattr(state, name))
    own.epoch = state.epoch or 0.0
    own.best_global_step = state.best_global_step or 0
    own.best_model_checkpoint = state.best_model_checkpoint
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    own.samples_seen = state.global_step * batch


class _NextStep:
    """The trainer's state as it will be at the end of the step that begins."""

    def __init__(self, state: Any) -> None:
        self.global_step = state.global_step + 1
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def due_at_next_step(args: Any, state: Any, loader: Any) -> transformers.TrainerControl:
    """What Hugging Face's own schedule will ask for at the end of the step that begins."""
    flow, due, then = DefaultFlowCallback(), transformers.TrainerControl(), _NextStep(state)
    flow.on_step_end(args, then, due)  # type: ignore[arg-type]
    try:
        batches = len(loader)
    except TypeError:  # of unknown length
        return due
    if then.global_step % max(-(-batches // args.gradient_accumulation_steps), 1) == 0:
        flow.on_epoch_end(args, then, due)  # type: ignore[arg-type]
    return due


def timeline_of(state: Any) -> str:
    """Fingerprint of the records so far, which the trainer saves and restores with each checkpoint."""
    text = json.dumps(state.log_history, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def partial_mean_after(state: Any) -> Callable[[RecordDifference], str | None]:
    """Excuses the loss of the first record after a resume from ``state``, if that is between two records."""
    losses = [record["step"] for record in state.log_history if "loss" in record]
    is_between = state.global_step > 0 and state.global_step not in losses[-1:]

    def excuse(found: RecordDifference) -> str | None:
        is_first = is_between and found.key == "loss"
        return "Hugging Face's Trainer averages the first logged loss since the checkpoint only" if is_first else None

    return excuse


def kind_of(logs: dict[str, Any]) -> str:
    if "train_runtime" in logs:
        return "final"
    if any(name.startswith("eval_") for name in logs):
        return "eval"
    return "train" if "loss" in logs else "user"


def set_name_of(metrics: dict[str, Any]) -> str:
    """Name of the evaluation set: ``eval``, or its key if there are several, as in ``eval_small_runtime``."""
    prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
    return prefix.removeprefix("eval_")
