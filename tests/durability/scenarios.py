"""Scenarios of training: state that a checkpoint contains, and state that only the script has.

Each is a small function that builds a run, as a user's script would. A run of three epochs is killed three steps after a
checkpoint, and stopped at one, twice each, and resumed; then it is held against one that was never interrupted.

``python -m durability.scenarios --write`` tries all of them and writes what became of each to ``scenarios.json``, from
which ``docs/resume-proof.py`` makes its table; the tests try a part, and hold it against the same file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, default_collate

import dalsegno as ds
from dalsegno.callbacks import EMA, JsonLogger
from dalsegno.distributed import collectives
from dalsegno.testing import (
    DataOrder,
    Pattern,
    TinyRegression,
    Trial,
    check_resume_thoroughly,
    tiny_regression_data,
)
from dalsegno.testing.equivalence import Trains
from durability.kinds import Augmented, Buffered, Counting, Pure, Sample, noise, sample
from support.listeners import Listener
from support.small import small_trainer

SHOWN = Path(__file__).with_name("scenarios.json")

LENGTH, EPOCHS = 24, 3
"""Samples in an epoch, four to a step: six steps."""

PATTERNS: dict[str, Pattern] = {
    "killed": ((("inside", "kill"),), (("end", "kill"),)),
    "stopped": ((("inside", "stop"),), (("end", "stop"),)),
}
"""The ways to interrupt a run: by SIGKILL three steps after a checkpoint, and by SIGTERM, which saves one."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run with something of its own. Called with a folder, it builds the trainer."""

    group: str
    build: Callable[[Path], Trains]
    ranks: int = 1
    patterns: tuple[str, ...] = tuple(PATTERNS)

    @property
    def name(self) -> str:
        return self.build.__name__.replace("_", " ")

    @property
    def what(self) -> str:
        return (self.build.__doc__ or "").removesuffix(".")


class Build:
    """What the processes of a leg get: the name of a scenario, which they build anew."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, output_dir: Path) -> Trains:
        torch.manual_seed(0)
        return SCENARIOS[self._name].build(output_dir)


SCENARIOS: dict[str, Scenario] = {}

DATA, MODEL, OPTIMIZER = "Data", "Model and loss", "Optimizer and schedule"
CALLBACKS, LOOP, CHANGED, HEALTHY = "Callbacks", "Your own loop", "Changed between two legs", "All in the checkpoint"


def scenario(group: str, **how: Any) -> Callable[[Callable[[Path], Trains]], Callable[[Path], Trains]]:
    def add(build: Callable[[Path], Trains]) -> Callable[[Path], Trains]:
        one = Scenario(group, build, **how)
        SCENARIOS[one.name] = one
        return build

    return add


# -- what they are made of --------------------------------------------------------------------------------------------

_PARTS = ("train_dataset", "train_dataloader", "data_collator", "loss_fn", "loss_weight", "optimizer", "lr_scheduler")


def trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **given: Any) -> ds.Trainer:
    """A small run; ``given``: parts of the Trainer, and settings."""
    parts: dict[str, Any] = {name: given.pop(name) for name in _PARTS if name in given}
    if "train_dataloader" in parts:
        parts["train_dataset"] = None
    usual: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "logging_steps": 2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4 // collectives.world_size(),
        "save_steps": 3,
        "save_in_background": False,
    }
    logs = JsonLogger(), DataOrder()
    return small_trainer(output_dir, *logs, *callbacks, model=model, length=LENGTH, parts=parts, **usual | given)


def is_resumed(output_dir: Path) -> bool:
    """Whether a leg of this run has begun before: what a user edits in a script, or in its surroundings, then."""
    return (output_dir / "run.json").exists()


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, **options)


def calling(name: str = "caller", **handlers: Callable[[Any], Any]) -> ds.Callback:
    """A callback without state: ``calling(on_step_end=…)``."""
    return Listener(handlers, name=name)


class Samples(Pure):
    """Each with a noise that a function gives."""

    def __init__(self, noise: Callable[[], float]) -> None:
        super().__init__(LENGTH)
        self.noise = noise

    def __getitem__(self, index: int) -> Sample:
        return sample(index, self.noise())


class Stream(Buffered):
    """Draws between the samples, in worker processes too."""

    def __iter__(self) -> Iterator[Sample]:
        worker = torch.utils.data.get_worker_info()
        for index in range(0 if worker is None else worker.id, LENGTH, 1 if worker is None else worker.num_workers):
            yield sample(index, noise())


class Regression(TinyRegression):
    """Its layers' outputs go through ``change`` before the loss."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda outputs: outputs) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.change(self.layers(x)), y)


class Outputs(TinyRegression):
    """Returns outputs, for a loss function."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


def squared(outputs: Tensor, batch: Sample) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["y"])


STEPS = itertools.count(1)
"""A global counter of the script's."""
NUMBERS = random.Random(7)
"""A global generator of the script's."""


def shrinking() -> float:
    """A factor that depends on how often it was asked for."""
    return 1.0 / next(STEPS)


# -- data -------------------------------------------------------------------------------------------------------------


@scenario(DATA)
def generator_in_a_closure(output_dir: Path) -> Trains:
    """The collate function is a closure over a NumPy generator."""
    rng = np.random.default_rng(0)

    def collate(samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] + rng.random()}

    return trainer(output_dir, data_collator=collate)


@scenario(DATA)
def generator_of_a_module(output_dir: Path) -> Trains:
    """The dataset draws from a `random.Random` that is a global variable of its module."""
    return trainer(output_dir, train_dataset=Samples(lambda: NUMBERS.random()))


@scenario(DATA)
def generator_as_a_default(output_dir: Path) -> Trains:
    """The dataset calls a function with a `torch.Generator` as the default of an argument."""

    def drawn(generator: torch.Generator = torch.Generator().manual_seed(3)) -> float:  # noqa: B008
        return torch.rand(1, generator=generator).item()

    return trainer(output_dir, train_dataset=Samples(drawn))


@scenario(DATA)
def generator_in_a_generator(output_dir: Path) -> Trains:
    """The dataset draws from a Python generator function, whose variables nobody can read."""

    def numbers() -> Iterator[float]:
        own = random.Random(0)
        while True:
            yield own.random()

    return trainer(output_dir, train_dataset=Samples(numbers().__next__))


@scenario(DATA)
def growing_cache(output_dir: Path) -> Trains:
    """The dataset augments a sample when it is first read, and has it in a cache from then on."""

    class Cached(Pure):
        cache: dict[int, Sample] = {}

        def __getitem__(self, index: int) -> Sample:
            if index not in self.cache:
                self.cache[index] = sample(index, len(self.cache) / 10)
            return self.cache[index]

    return trainer(output_dir, train_dataset=Cached(LENGTH))


@scenario(DATA)
def curriculum_by_counting(output_dir: Path) -> Trains:
    """The dataset makes samples harder the more of them it has returned, by an attribute."""

    class Curriculum(Counting):
        state_dict = None  # type: ignore[assignment]
        load_state_dict = None  # type: ignore[assignment]

    return trainer(output_dir, train_dataset=Curriculum(LENGTH))


@scenario(DATA)
def sampler_that_draws_while_it_is_read(output_dir: Path) -> Trains:
    """The sampler draws each index from the global generator when it is asked for, between the model's own numbers."""

    class Drawing(Sampler[int]):
        def __len__(self) -> int:
            return LENGTH

        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(LENGTH, ())) for _ in range(LENGTH))

    return trainer(output_dir, train_dataloader=loader(Pure(LENGTH), sampler=Drawing()))


@scenario(DATA)
def shuffle_buffer(output_dir: Path) -> Trains:
    """An iterable dataset has a shuffle buffer without a state, which draws between the samples."""
    return trainer(output_dir, train_dataset=Buffered(LENGTH))


@scenario(DATA)
def persistent_workers(output_dir: Path) -> Trains:
    """A `DataLoader` with `persistent_workers=True` reads an iterable dataset that draws."""
    return trainer(output_dir, train_dataloader=loader(Stream(), num_workers=2, persistent_workers=True))


@scenario(DATA)
def workers_out_of_order(output_dir: Path) -> Trains:
    """A `DataLoader` with `in_order=False` returns batches as soon as a worker process has one."""

    class Uneven(Pure):
        def __getitem__(self, index: int) -> Sample:
            if index % 8 < 4:  # one worker process takes as long as it happens to
                time.sleep(os.urandom(1)[0] / 50_000)
            return sample(index)

    return trainer(output_dir, train_dataloader=loader(Uneven(LENGTH), num_workers=2, in_order=False))


@scenario(DATA)
def workers_seeded_from_entropy(output_dir: Path) -> Trains:
    """A `worker_init_fn` seeds NumPy from the operating system."""

    def seed(worker: int) -> None:
        np.random.seed(int.from_bytes(os.urandom(4)))

    return trainer(output_dir, train_dataloader=loader(Augmented(LENGTH), num_workers=2, worker_init_fn=seed))


@scenario(DATA)
def samples_from_the_clock(output_dir: Path) -> Trains:
    """Samples depend on `time.time()`."""
    return trainer(output_dir, train_dataset=Samples(lambda: time.time() % 1.0))


@scenario(DATA)
def samples_from_the_operating_system(output_dir: Path) -> Trains:
    """Samples depend on `os.urandom`."""
    return trainer(output_dir, train_dataset=Samples(lambda: os.urandom(1)[0] / 256))


@scenario(DATA)
def samples_from_the_process(output_dir: Path) -> Trains:
    """Samples depend on `os.getpid()`, as seeds in many scripts do."""
    return trainer(output_dir, train_dataset=Samples(lambda: os.getpid() % 1000 / 1000))


@scenario(DATA)
def collate_function_with_a_counter(output_dir: Path) -> Trains:
    """The collate function counts its batches in an attribute, and changes them by it."""

    class Collate:
        batches = 0

        def __call__(self, samples: list[Sample]) -> Sample:
            self.batches += 1
            batch = default_collate(samples)
            return batch | {"x": batch["x"] / self.batches}

    return trainer(output_dir, data_collator=Collate())


@scenario(DATA)
def loss_weight_with_a_counter(output_dir: Path) -> Trains:
    """The function `loss_weight=` counts its calls."""
    return trainer(
        output_dir,
        loss_weight=lambda batch: float(next(STEPS)),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
    )


@scenario(DATA)
def file_that_changes(output_dir: Path) -> Trains:
    """The dataset reads a file at each epoch's begin; the run itself has written it anew meanwhile."""
    file = output_dir.with_suffix(".weights")

    def read(ctx: Any) -> None:
        file.write_text(str(float(file.read_text()) + 1.0 if file.exists() else 0.0))

    return trainer(
        output_dir,
        calling(on_epoch_begin=read),
        train_dataset=Samples(lambda: float(file.read_text()) / 10 if file.exists() else 0.0),
    )


# -- model and loss ---------------------------------------------------------------------------------------------------


@scenario(MODEL)
def counter_in_the_loss_function(output_dir: Path) -> Trains:
    """The loss function multiplies by a factor from a global counter."""
    return trainer(
        output_dir, model=Outputs(), loss_fn=lambda outputs, batch: squared(outputs, batch) * (1.0 + shrinking())
    )


@scenario(MODEL)
def label_smoothing_that_decays(output_dir: Path) -> Trains:
    """The loss function smooths labels less with each second of the process."""
    began = time.monotonic()

    def smoothed(outputs: Tensor, batch: Sample) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["y"] * (1.0 - 0.5 ** (1.0 + time.monotonic() - began)))

    return trainer(output_dir, model=Outputs(), loss_fn=smoothed)


@scenario(MODEL)
def counter_in_the_model(output_dir: Path) -> Trains:
    """`forward` counts its calls in an attribute, and scales by it."""

    class Warming(TinyRegression):
        calls = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x, y) * min(1.0, self.calls / 20)

    return trainer(output_dir, model=Warming())


@scenario(MODEL)
def list_in_the_model(output_dir: Path) -> Trains:
    """The model keeps its last outputs in a Python list, and subtracts their mean."""
    kept: list[float] = []

    def centred(outputs: Tensor) -> Tensor:
        kept.append(float(outputs.detach().mean()))
        return outputs - sum(kept[-8:]) / len(kept[-8:])

    return trainer(output_dir, model=Regression(centred))


@scenario(MODEL)
def buffer_that_is_not_saved(output_dir: Path) -> Trains:
    """The model updates a buffer with `persistent=False`."""

    class Running(TinyRegression):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(y.mean().detach(), alpha=0.1)
            return super().forward(x, y - self.mean)

    return trainer(output_dir, model=Running())


@scenario(MODEL)
def noise_from_the_models_own_generator(output_dir: Path) -> Trains:
    """The model adds noise from a generator that is its attribute."""
    generator = torch.Generator().manual_seed(4)
    return trainer(output_dir, model=Regression(lambda y: y + torch.randn(y.shape, generator=generator) / 10))


@scenario(MODEL)
def dropout_changed_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback sets another probability of the dropout."""

    def change(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[2].p = 0.5

    return trainer(output_dir, calling(on_step_end=change))


@scenario(MODEL)
def frozen_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback freezes a layer by `requires_grad_(False)`."""

    def freeze(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[0].requires_grad_(False)

    return trainer(output_dir, calling(on_step_end=freeze))


@scenario(MODEL)
def eval_mode_set_by_a_callback(output_dir: Path) -> Trains:
    """At step 3 a callback puts the dropout into eval mode."""

    def evaluate(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            ctx.model.layers[2].eval()

    return trainer(output_dir, calling(on_step_end=evaluate))


@scenario(MODEL)
def forward_hook_with_a_counter(output_dir: Path) -> Trains:
    """A forward hook scales the output of a layer by a counter."""
    model = TinyRegression()
    model.layers[0].register_forward_hook(lambda module, args, output: output * (1.0 + shrinking()))
    return trainer(output_dir, model=model)


@scenario(MODEL)
def gradient_hook_with_a_counter(output_dir: Path) -> Trains:
    """A hook on a parameter scales its gradient by a counter."""
    model = TinyRegression()
    model.layers[0].weight.register_hook(lambda gradient: gradient * (1.0 + shrinking()))
    return trainer(output_dir, model=model)


# -- optimizer and schedule -------------------------------------------------------------------------------------------


class Lookahead(torch.optim.SGD):
    """Keeps slow weights, and its count of steps, in attributes beside its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
        return result


@scenario(OPTIMIZER)
def lookahead(output_dir: Path) -> Trains:
    """The optimizer keeps slow weights in an attribute, which its `state_dict` does not contain."""
    model = TinyRegression()
    return trainer(output_dir, model=model, optimizer=Lookahead(model.parameters()))


@scenario(OPTIMIZER)
def schedule_with_a_counter(output_dir: Path) -> Trains:
    """The schedule is a `LambdaLR` whose function counts its calls."""
    model = TinyRegression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    calls = itertools.count(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / next(calls))
    return trainer(output_dir, model=model, optimizer=optimizer, lr_scheduler=schedule)


@scenario(OPTIMIZER)
def learning_rate_by_hand(output_dir: Path) -> Trains:
    """A callback sets the learning rate before each step, from a global counter."""
    model = TinyRegression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def set_rate(ctx: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * shrinking()

    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return trainer(
        output_dir, calling(on_step_begin=set_rate), model=model, optimizer=optimizer, lr_scheduler=constant
    )


@scenario(OPTIMIZER)
def gradient_noise(output_dir: Path) -> Trains:
    """A callback adds noise to the gradients, from a generator of its own."""
    generator = torch.Generator().manual_seed(4)

    def add(ctx: Any) -> None:
        for parameter in ctx.model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)

    return trainer(output_dir, calling(on_pre_optimizer_step=add))


@scenario(OPTIMIZER)
def average_kept_outside(output_dir: Path) -> Trains:
    """A callback keeps an average of the weights in a variable, and pulls the weights to it at each fourth step."""
    average: dict[str, Tensor] = {}

    def pull(ctx: Any) -> None:
        for name, each in ctx.model.named_parameters():
            mean = average.setdefault(name, each.detach().clone())
            mean.lerp_(each.detach(), 0.1)
            if ctx.state.global_step % 4 == 0:
                each.data.lerp_(mean, 0.5)

    return trainer(output_dir, calling(on_step_end=pull))


# -- callbacks --------------------------------------------------------------------------------------------------------


def draw(ctx: Any) -> None:
    torch.rand(1)


@scenario(CALLBACKS)
def callback_without_state(output_dir: Path) -> Trains:
    """A callback writes an average of the losses into the records, and has no `state_dict`."""
    losses: list[float] = []

    def add(ctx: Any) -> None:
        if ctx.kind == "train":
            losses.append(ctx.logs["loss"])
            ctx.logs["mean_loss"] = sum(losses) / len(losses)

    return trainer(output_dir, calling(on_log_step=add))


@scenario(CALLBACKS)
def callback_without_state_that_writes_rarely(output_dir: Path) -> Trains:
    """A callback counts the steps without a `state_dict`, and writes its count into the final record only."""
    steps = itertools.count()

    def add(ctx: Any) -> None:
        if ctx.kind == "final":
            ctx.logs["steps_seen"] = next(steps)

    return trainer(output_dir, calling(on_step_end=lambda ctx: next(steps), on_log_step=add))


@scenario(CALLBACKS)
def draws_at_the_begin_of_a_leg(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_train_begin`."""
    return trainer(output_dir, calling(on_train_begin=draw))


@scenario(CALLBACKS)
def draws_after_a_load(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_load`."""
    return trainer(output_dir, calling(on_load=draw))


@scenario(CALLBACKS)
def draws_after_a_save(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_save`."""
    return trainer(output_dir, calling(on_save=draw))


@scenario(CALLBACKS)
def draws_before_a_save(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `on_before_save`."""
    return trainer(output_dir, calling(on_before_save=draw))


@scenario(CALLBACKS)
def draws_in_its_state_dict(output_dir: Path) -> Trains:
    """A callback draws from the global generator in `state_dict`."""

    class Drawing(ds.Callback):
        def state_dict(self) -> dict[str, float]:
            return {"drawn": torch.rand(1).item()}

        def load_state_dict(self, state: Mapping[str, float]) -> None:
            pass

    return trainer(output_dir, Drawing())


@scenario(CALLBACKS)
def layer_built_at_the_begin(output_dir: Path) -> Trains:
    """A callback builds a layer in `on_train_begin`, which the model then uses."""
    model = Regression()

    def build(ctx: Any) -> None:
        model.change = nn.Linear(1, 1)

    return trainer(output_dir, calling(on_train_begin=build), model=model)


@scenario(CALLBACKS)
def seeds_from_the_clock(output_dir: Path) -> Trains:
    """The script seeds `random` from the clock once everything is built; samples draw from it."""
    built = trainer(output_dir, train_dataset=Augmented(LENGTH))
    random.seed(time.time_ns() if is_resumed(output_dir) else 1)
    return built


# -- your own loop ----------------------------------------------------------------------------------------------------


class OwnLoop:
    """A loop around ``ds.Run``; subclasses do one thing otherwise."""

    def __init__(self, output_dir: Path, **settings: Any) -> None:
        self.args = ds.TrainingArguments(
            output_dir, num_train_epochs=EPOCHS, logging_steps=2, save_steps=3, save_in_background=False, **settings
        )
        self.model: nn.Module = TinyRegression()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.batches = loader(tiny_regression_data(LENGTH), shuffle=True)

    def train(self) -> ds.TrainResult | None:
        with ds.Run(
            self.args,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.batches,
            callbacks=[JsonLogger(), DataOrder()],
        ) as run:
            for batch in run.batches():
                self.step(run, batch)
        return run.result

    def step(self, run: ds.Run, batch: Sample) -> None:
        loss = self.model(**batch)
        loss.backward()
        self.update()
        run.step_end(loss=loss)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


@scenario(LOOP)
def counter_behind_step_end(output_dir: Path) -> Trains:
    """The loop counts its steps in a variable, and scales the loss by it."""

    class Counter(OwnLoop):
        steps = 0

        def step(self, run: ds.Run, batch: Sample) -> None:
            loss = self.model(**batch) * min(1.0, (self.steps + 1) / 20)
            loss.backward()
            self.update()
            run.step_end(loss=loss)
            self.steps += 1

    return Counter(output_dir)


@scenario(LOOP)
def forgotten_second_optimizer(output_dir: Path) -> Trains:
    """The loop has a second optimizer, with momentum, that it does not pass to `ds.Run`."""

    class Two(OwnLoop):
        def __init__(self, output_dir: Path) -> None:
            super().__init__(output_dir)
            self.other = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

        def update(self) -> None:
            self.other.step()
            super().update()

    return Two(output_dir)


@scenario(LOOP)
def schedule_behind_step_end(output_dir: Path) -> Trains:
    """The loop steps its schedule after `run.step_end`, and so after the save."""

    class Late(OwnLoop):
        def step(self, run: ds.Run, batch: Sample) -> None:
            loss = self.model(**batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            run.step_end(loss=loss)
            self.scheduler.step()

    return Late(output_dir)


@scenario(LOOP)
def gradients_carried_over(output_dir: Path) -> Trains:
    """The loop clears its gradients in every second step only."""

    class Carrying(OwnLoop):
        def step(self, run: ds.Run, batch: Sample) -> None:
            loss = self.model(**batch)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if run.state.global_step % 2:
                self.optimizer.zero_grad()
            run.step_end(loss=loss)

    return Carrying(output_dir)


@scenario(LOOP)
def carry_between_batches(output_dir: Path) -> Trains:
    """The loop carries the mean of the last batch into the next one, as recurrent models do with hidden states."""

    class Carry(OwnLoop):
        def __init__(self, output_dir: Path) -> None:
            super().__init__(output_dir)
            self.hidden = torch.zeros(8)

        def step(self, run: ds.Run, batch: Sample) -> None:
            x = batch["x"] + self.hidden
            self.hidden = 0.5 * x.mean(0)
            super().step(run, batch | {"x": x})

    return Carry(output_dir)


# -- changed between two legs -----------------------------------------------------------------------------------------


@scenario(CHANGED)
def changed_learning_rate(output_dir: Path) -> Trains:
    """The learning rate."""
    return trainer(output_dir, learning_rate=0.02 if is_resumed(output_dir) else 0.01)


@scenario(CHANGED)
def changed_batch_size(output_dir: Path) -> Trains:
    """The batch size, to half, with accumulation over two."""
    halves = 2 if is_resumed(output_dir) else 1
    return trainer(output_dir, per_device_train_batch_size=4 // halves, gradient_accumulation_steps=halves)


@scenario(CHANGED)
def changed_shares_of_a_mixture(output_dir: Path) -> Trains:
    """The weights of a `ds.Mixture`."""
    shares = {"a": 1.0, "b": 3.0 if is_resumed(output_dir) else 1.0}
    return trainer(output_dir, train_dataset=ds.Mixture({"a": Pure(LENGTH // 2), "b": Augmented(LENGTH // 2)}, shares))


@scenario(CHANGED)
def grown_dataset(output_dir: Path) -> Trains:
    """The dataset has more samples."""
    return trainer(output_dir, train_dataset=Pure(LENGTH + 4 * is_resumed(output_dir)))


@scenario(CHANGED)
def other_samples(output_dir: Path) -> Trains:
    """The dataset has as many samples, and others."""
    return trainer(output_dir, train_dataset=tiny_regression_data(LENGTH, seed=int(is_resumed(output_dir))))


@scenario(CHANGED)
def changed_preprocessing(output_dir: Path) -> Trains:
    """The code of the collate function."""
    factor = 0.9 if is_resumed(output_dir) else 1.0

    def collate(samples: list[Sample]) -> Sample:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] * factor}

    return trainer(output_dir, data_collator=collate)


@scenario(CHANGED)
def changed_model_code(output_dir: Path) -> Trains:
    """The code of `forward`, with the same parameters."""
    other = is_resumed(output_dir)
    return trainer(output_dir, model=Regression(lambda outputs: torch.tanh(outputs) if other else outputs))


@scenario(CHANGED)
def changed_model_shape(output_dir: Path) -> Trains:
    """The width of a layer."""
    return trainer(output_dir, model=TinyRegression(32 if is_resumed(output_dir) else 16))


@scenario(CHANGED)
def changed_optimizer(output_dir: Path) -> Trains:
    """The optimizer's class."""
    model = TinyRegression()
    kind = torch.optim.SGD if is_resumed(output_dir) else torch.optim.Adam
    return trainer(output_dir, model=model, optimizer=kind(model.parameters(), lr=0.01))


@scenario(CHANGED)
def environment_variable(output_dir: Path) -> Trains:
    """An environment variable that the loss function reads."""
    os.environ["LOSS_SCALE"] = "2.0" if is_resumed(output_dir) else "1.0"
    return trainer(
        output_dir,
        model=Outputs(),
        loss_fn=lambda outputs, batch: squared(outputs, batch) * float(os.environ["LOSS_SCALE"]),
    )


@scenario(CHANGED)
def other_number_of_threads(output_dir: Path) -> Trains:
    """`torch.set_num_threads`, with a layer that is large enough for several."""
    torch.set_num_threads(2 if is_resumed(output_dir) else 1)
    return trainer(output_dir, model=TinyRegression(width=40_000), learning_rate=1e-5)


@scenario(CHANGED, ranks=2, patterns=("killed",))
def other_number_of_ranks(output_dir: Path) -> Trains:
    """The number of ranks, from two to one."""
    if not is_resumed(output_dir):
        return trainer(output_dir, parallel="ddp")
    rank = collectives.rank()
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return Absent() if rank else trainer(output_dir)


class Absent:
    """A rank that is no more."""

    def train(self) -> None:
        return None


# -- all in the checkpoint --------------------------------------------------------------------------------------------


@scenario(HEALTHY)
def dropout_and_shuffling(output_dir: Path) -> Trains:
    """A model with dropout, a shuffled dataset."""
    return trainer(output_dir)


@scenario(HEALTHY)
def random_augmentation(output_dir: Path) -> Trains:
    """Samples draw from `random`, `numpy.random` and `torch`."""
    return trainer(output_dir, train_dataset=Augmented(LENGTH))


@scenario(HEALTHY)
def random_augmentation_in_workers(output_dir: Path) -> Trains:
    """The same in two worker processes."""
    return trainer(output_dir, train_dataset=Augmented(LENGTH), dataloader_num_workers=2)


@scenario(HEALTHY)
def dataset_with_a_state(output_dir: Path) -> Trains:
    """A dataset that counts, with a `state_dict`."""
    return trainer(output_dir, train_dataset=Counting(LENGTH))


@scenario(HEALTHY)
def mixture(output_dir: Path) -> Trains:
    """A `ds.Mixture` of two datasets."""
    return trainer(output_dir, train_dataset=ds.Mixture({"a": Pure(LENGTH // 2), "b": Augmented(LENGTH // 2)}))


@scenario(HEALTHY)
def averaged_weights(output_dir: Path) -> Trains:
    """The callback `EMA`."""
    return trainer(output_dir, EMA(decay=0.5))


@scenario(HEALTHY)
def callback_with_a_state(output_dir: Path) -> Trains:
    """A callback that scales gradients by a counter, with `state_dict` and `load_state_dict`."""

    class Decaying(ds.Callback):
        steps = 0

        def on_pre_optimizer_step(self, ctx: Any) -> None:
            self.steps += 1
            for parameter in ctx.model.parameters():
                parameter.grad.div_(self.steps)

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    return trainer(output_dir, Decaying())


@scenario(HEALTHY)
def loss_function_with_a_buffer(output_dir: Path) -> Trains:
    """The loss function is a module, and counts in a buffer."""

    class Scaled(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.ones(()))

        def forward(self, outputs: Tensor, batch: Sample) -> Tensor:
            self.steps += 1
            return squared(outputs, batch) / self.steps

    return trainer(output_dir, model=Outputs(), loss_fn=Scaled())


@scenario(HEALTHY)
def tied_weights(output_dir: Path) -> Trains:
    """Two layers share their weights."""

    class Tied(TinyRegression):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(self.decode(self.encode(x)), y)

    return trainer(output_dir, model=Tied())


@scenario(HEALTHY)
def column_major_optimizer_state(output_dir: Path) -> Trains:
    """A weight, and so its optimizer state, is stored column by column."""
    model = TinyRegression()
    model.layers[0].weight.data = model.layers[0].weight.data.t().contiguous().t()
    return trainer(output_dir, model=model)


@scenario(HEALTHY)
def warm_up_and_decay(output_dir: Path) -> Trains:
    """A schedule of the learning rate, accumulation and clipping."""
    return trainer(
        output_dir,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        max_grad_norm=0.5,
    )


@scenario(HEALTHY)
def own_loop(output_dir: Path) -> Trains:
    """A loop around `ds.Run`."""
    return OwnLoop(output_dir)


@scenario(HEALTHY, ranks=2)
def two_ranks(output_dir: Path) -> Trains:
    """DDP on two ranks."""
    return trainer(output_dir, parallel="ddp")


@scenario(HEALTHY, ranks=2)
def sharded_over_two_ranks(output_dir: Path) -> Trains:
    """FSDP2 on two ranks."""
    return trainer(output_dir, parallel="fsdp")


# -- what becomes of them ---------------------------------------------------------------------------------------------


def outcomes(name: str, folder: Path, patterns: tuple[str, ...] = tuple(PATTERNS)) -> dict[str, Trial]:
    """What becomes of a scenario, by how it is interrupted."""
    one = SCENARIOS[name]
    wanted = [each for each in patterns if each in one.patterns]
    trials = check_resume_thoroughly(
        Build(name),
        folder=folder,
        world_sizes=[one.ranks],
        patterns=[PATTERNS[each] for each in wanted],
        find_out_which=False,
        timeout=120.0,
    )
    return dict(zip(wanted, trials, strict=True))


def shown() -> dict[str, dict[str, str]]:
    """What has been shown so far: verdicts by scenario and by how it was interrupted."""
    found: dict[str, dict[str, str]] = json.loads(SHOWN.read_text()) if SHOWN.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="only scenarios with this in their names; default: all")
    parser.add_argument("--write", action="store_true", help="write what has been shown to scenarios.json")
    options = parser.parse_args()
    silent = 0
    for name in SCENARIOS:
        if options.names and not any(part in name for part in options.names):
            continue
        with tempfile.TemporaryDirectory(prefix="dalsegno-scenarios-") as folder:
            found = outcomes(name, Path(folder))
        print(f"{name}:", flush=True)
        for how, trial in found.items():
            silent += trial.verdict == "different"
            print(f"    {how}: {trial.verdict}{f': {trial.words}' if trial.words else ''}", flush=True)
        if options.write:
            known = shown() | {name: {how: str(trial.verdict) for how, trial in found.items()}}
            kept = {each: known[each] for each in SCENARIOS if each in known}
            SHOWN.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if silent else 0


if __name__ == "__main__":
    from durability import scenarios  # not this module: the processes of the legs import it by its name

    sys.exit(scenarios.main())
