"""The run whose checkpoints are kept for ever. Nothing here may change once a checkpoint of it is released.

A model with dropout, a tied weight and a buffer; data of its own; callbacks of each kind. ``Leaving`` listens up to
step 4 and from step 8 on: the checkpoint of step 8 carries its state forward, and no callback has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dalsegno as ds
from dalsegno.callbacks import DivergenceDetector, GradNormLogger, JsonLogger

LEFT, SAVED, LAST = 4, 8, 12
"""Steps: where ``Leaving`` leaves, of the checkpoint that is kept, and of the end."""


class Model(nn.Module):
    """Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(5, 6, bias=False)
        self.again = nn.Linear(5, 6, bias=False)
        self.again.weight = self.second.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both of shape (batch, 6)."""
        self.seen += 1
        hidden = self.drop(torch.tanh(self.first(x)))
        return nn.functional.mse_loss(self.second(hidden) + self.again(hidden), y)


class Waves(Dataset[dict[str, Tensor]]):
    """20 samples that need no random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.sin(torch.arange(6) * 0.7 + index)
        return {"x": x, "y": x.roll(1) * 0.5}


class Average(ds.Callback):
    """A replicated state with all that the codec knows."""

    def __init__(self) -> None:
        self.average = torch.zeros(2)
        self.steps: dict[int, float] = {}

    def on_train_metrics(self, ctx: Any) -> None:
        self.average = 0.9 * self.average + 0.1 * ctx.metrics["loss"]
        self.steps[ctx.state.global_step] = ctx.metrics["loss"]

    def state_dict(self) -> dict[str, Any]:
        kinds = (None, True, -1, 1 << 70, 0.1, float("nan"), float("-inf"), b"\x00\xff", "dal segno", "\ud800")
        types = [torch.bfloat16, torch.Size([2, 3]), torch.device("cpu")]
        odd = {
            "bfloat16": torch.ones(3, dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j]),
            "bool": torch.tensor(True),
        }
        return {"average": self.average, "steps": self.steps, "kinds": kinds, "types": types, "odd": odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        now = self.state_dict()
        assert all(repr(state[key]) == repr(now[key]) for key in ("kinds", "types", "odd")), state
        self.average, self.steps = state["average"], state["steps"]


class Samples(ds.Callback):
    """What each rank was given, on each rank for itself."""

    state_scope = "per_rank"
    state_version = 3

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_microbatch_begin(self, ctx: Any) -> None:
        self.sums.append(float(ctx.batch["x"].sum()))

    def state_dict(self) -> list[float]:
        return list(self.sums)

    def load_state_dict(self, state: list[float]) -> None:
        self.sums = list(state)

    @classmethod
    def reshard(cls, states: Sequence[list[float]], world_size: int) -> list[list[float]]:
        return [[each for state in states for each in state], *([] for _ in range(world_size - 1))]


class Leaving(ds.Callback):
    """One that is taken out, and put back."""

    state_scope = "per_rank"

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_step_end(self, ctx: Any) -> None:
        self.words.append(f"step {ctx.state.global_step}")

    def state_dict(self) -> list[str]:
        return list(self.words)

    def load_state_dict(self, state: list[str]) -> None:
        self.words = list(state)

    @classmethod
    def reshard(cls, states: Sequence[list[str]], world_size: int) -> list[list[str]]:
        return [list(states[0]) for _ in range(world_size)]


class Loaded(ds.Callback):
    """The weights as they are when everything has been restored."""

    def __init__(self) -> None:
        self.weights: dict[str, list[Any]] = {}

    def on_load(self, ctx: Any) -> None:
        self.weights = weights_of(ctx.model)


def trainer(output_dir: Path, parallel: str, max_steps: int, *callbacks: ds.Callback) -> ds.Trainer:
    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=max_steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=2,
        eval_steps=4,
        save_steps=4,
        parallel=parallel,
        use_cpu=True,
        disable_tqdm=True,
    )
    loggers = [JsonLogger(run="golden"), JsonLogger(path="logs/array.json", name="ArrayLogger"), GradNormLogger()]
    listeners = [*loggers, DivergenceDetector(), *callbacks]
    return ds.Trainer(Model(), args, train_dataset=Waves(), eval_dataset=Waves(), callbacks=listeners)


def first_legs(output_dir: Path, parallel: str) -> None:
    """Up to the checkpoint that is kept."""
    trainer(output_dir, parallel, LEFT, Average(), Samples(), Leaving()).train()
    trainer(output_dir, parallel, SAVED, Average(), Samples()).train()


def last_leg(output_dir: Path, parallel: str) -> dict[str, Any]:
    """From that checkpoint to the end. What was loaded, and what has become of it; as JSON can hold it."""
    average, samples, leaving, loaded = Average(), Samples(), Leaving(), Loaded()
    last = trainer(output_dir, parallel, LAST, average, samples, leaving, loaded)
    result = last.train()
    assert result.global_step == LAST, result
    return {
        "loaded": loaded.weights,
        "final": weights_of(last.model),
        "average": average.average.tolist(),
        "losses": {str(step): loss for step, loss in average.steps.items()},
        "samples": samples.sums,
        "words": leaving.words,
    }


def weights_of(model: nn.Module) -> dict[str, list[Any]]:
    """Every parameter and buffer, whole, as nested lists. Collective."""
    state = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    return {name: each.tolist() for name, each in state.items()}
