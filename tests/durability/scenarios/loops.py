"""State of a loop around ``ds.Run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.testing import DataOrder, TinyRegression, tiny_regression_data
from dalsegno.testing.equivalence import Trains
from durability.kinds import Sample
from support.small import NOISY

from .parts import EPOCHS, LENGTH, calling, loader
from .scenario import HEALTHY, LATE, LOOP, scenario


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
        self.state: dict[str, Any] = {}

    def train(self) -> ds.TrainResult | None:
        with ds.Run(
            self.args,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            loader=self.batches,
            state=self.state,
            callbacks=[JsonLogger(), DataOrder(), *map(calling, NOISY)],  # the last are silent
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


class Plateau(OwnLoop):
    """Sets the learning rate at each epoch's end by losses that it collects."""

    def __init__(self, output_dir: Path, *, saved: bool) -> None:
        super().__init__(output_dir)
        self.kept: dict[str, list[float]] = {"losses": []}
        if saved:
            self.state = {"kept": self.kept}

    def step(self, run: ds.Run, batch: Sample) -> None:
        loss = self.model(**batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        losses = self.kept["losses"]
        losses.append(loss.item())
        if len(losses) == len(self.batches):
            self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + sum(losses))
            losses.clear()
        run.step_end(loss=loss)


@scenario(HEALTHY)
def losses_in_a_dict_in_state(output_dir: Path) -> Trains:
    """A loop collects the losses in a dict in `state=`, and sets the learning rate by them at each epoch's end."""
    return Plateau(output_dir, saved=True)


@scenario(LATE)
def losses_in_a_list_of_the_loop(output_dir: Path) -> Trains:
    """A loop collects the losses in a list of its own, and sets the learning rate by them at each epoch's end."""
    return Plateau(output_dir, saved=False)
