"""What an event costs elsewhere, with ten callbacks that handle it and with ten that do not. Seconds, per system.

``python -m benchmarks.peers.events SYSTEM``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.timing import seconds_each

Fired = tuple[dict[str, tuple[str, str]], dict[str, Any]]
"""Statements that fire an event ``handled`` by ten callbacks and one ``unhandled``, and the names they use."""


def hf() -> Fired:
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerCallback, TrainerControl

    class Listener(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    class Flow(DefaultFlowCallback):
        """Without it the handler warns; it counts as one of the ten."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    classes = [Flow, *(type(f"Listener{index}", (Listener,), {}) for index in range(9))]
    handler = CallbackHandler([cls() for cls in classes], None, None, None, None)
    return (
        {
            "handled": ("handler.on_step_begin(args, state, control)", "pass"),
            "unhandled": ("handler.on_substep_end(args, state, control)", "pass"),
        },
        {"handler": handler, "args": object(), "state": object(), "control": TrainerControl()},
    )


def lightning() -> Fired:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.call import _call_callback_hooks

    class Listener(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: Any) -> None:
            pass

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", **quiet)
    trainer.callbacks = [Listener() for _ in range(10)]
    trainer.strategy.connect(LightningModule())
    return (
        {
            "handled": ("fire(trainer, 'on_train_batch_start', None, 0)", "pass"),
            "unhandled": ("fire(trainer, 'on_before_zero_grad', None)", "pass"),
        },
        {"fire": _call_callback_hooks, "trainer": trainer},
    )


def ignite() -> Fired:
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: None)
    for _ in range(10):
        engine.add_event_handler(Events.ITERATION_STARTED, lambda engine: None)
    return (
        {
            "handled": ("fire(event)", "fire, event = engine.fire_event, Events.ITERATION_STARTED"),
            "unhandled": ("fire(event)", "fire, event = engine.fire_event, Events.ITERATION_COMPLETED"),
        },
        {"engine": engine, "Events": Events},
    )


def torchtnt() -> Fired:
    from torchtnt.framework._callback_handler import CallbackHandler
    from torchtnt.framework.callback import Callback

    class Listener(Callback):
        def on_train_step_start(self, state: Any, unit: Any) -> None:
            pass

    return (
        {
            "handled": ("handler.on_train_step_start(state, unit)", "pass"),
            "unhandled": ("handler.on_train_step_end(state, unit)", "pass"),
        },
        {"handler": CallbackHandler([Listener() for _ in range(10)]), "state": object(), "unit": object()},
    )


SYSTEMS: dict[str, Callable[[], Fired]] = {
    "torchtnt": torchtnt,
    "ignite": ignite,
    "hf": hf,
    "lightning": lightning,
}

if __name__ == "__main__":
    rounds = seconds_each(*SYSTEMS[sys.argv[1]]())
    print(json.dumps({name: median(seconds) for name, seconds in rounds.items()}))
