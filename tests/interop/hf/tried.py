"""Callbacks of transformers and TRL."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dalsegno as ds
from interop.tried import Tried, trainer

BETTER = {"metric_for_best_model": "loss", "load_best_model_at_end": True}


def theirs(module: str, name: str, *given: Any, **named: Any) -> Callable[[], Any]:
    """Builds one; its library is imported then: some take seconds."""
    return lambda: getattr(importlib.import_module(module), name)(*given, **named)


def of_a_language_model(output_dir: Path, *callbacks: Any) -> ds.Trainer:
    from support.languages import llama
    from support.small import ByteLines

    data = ByteLines()
    return trainer(output_dir, *callbacks, model=llama(), parts={"train_dataset": data}, eval_steps=0)


def for_the_best(output_dir: Path, *callbacks: Any) -> ds.Trainer:
    return trainer(output_dir, *callbacks, **BETTER)


class LossWatchDogCallback(ds.TrainerCallback):
    """After axolotl's documentation, which cannot be installed: ends a run whose loss stays too high."""

    def __init__(self) -> None:
        self.violations = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.log_history and "loss" in state.log_history[-1]:
            self.violations += 1
            control.should_training_stop |= self.violations == 7
        return control


def watching() -> ds.Callback:
    return ds.adapt(LossWatchDogCallback(), state=("violations",))


class Evaluated:
    """What is given for a trainer of theirs."""

    eval_dataset = ()


def transformers(name: str, *given: Any, **tried: Any) -> Tried:
    return Tried(name, "transformers", theirs("transformers.trainer_callback", name, *given), **tried)


def trl(name: str, *given: Any, **tried: Any) -> Tried:
    return Tried(name, "trl", theirs("trl.trainer.callbacks", name, *given), **tried)


TRIED = (
    transformers("DefaultFlowCallback"),
    transformers("EarlyStoppingCallback", 3, trainer=for_the_best),
    transformers("PrinterCallback"),
    transformers("ProgressCallback"),
    Tried("LossWatchDogCallback", "(axolotl)", watching, remark='with `state=("violations",)`'),
    Tried(
        *("LossWatchDogCallback", "(axolotl)", LossWatchDogCallback),
        differs="its counter begins anew, so that it stops later; a warning says so at the first save",
        what=("step",),
    ),
    trl("RichProgressCallback"),
    trl(
        *("BEMACallback", 2),
        differs="its average begins anew at the weights of the resumed checkpoint; `EMA` and `ModelMerge` continue",
        what=("bema/model.safetensors",),
        trainer=of_a_language_model,
    ),
    trl("SyncRefModelCallback", *(None, None), refused="run TRL's own trainer with a dalsegno.interop.hf.Bridge"),
    trl("LogCompletionsCallback", Evaluated(), refused="use dalsegno.callbacks.TextgenCallback"),
)
