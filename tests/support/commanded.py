"""Runs that receive commands at given steps, once each: a leg that comes there again receives none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.control import Ticket
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.models import Layered
from support.small import small_trainer

Commands = Mapping[int, Sequence[tuple[str, dict[str, Any]]]]
"""By the step during which they are submitted, and at whose end they act: name and data of each."""


class Client(ds.Callback):
    """Submits commands on rank 0. Since it may set flags at any step, the ranks synchronize at each."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.tickets: list[Ticket] = []

    def on_step_begin(self, ctx: Any) -> None:
        step = ctx.state.global_step + 1
        if ctx.state.is_world_process_zero and f"client at {step}" not in senders(ctx.args.directory):
            for name, data in self._commands.get(step, ()):
                self.tickets.append(ctx.trainer.commands.submit(name, data, by=f"client at {step}"))


class TinyWithDropout(Layered):
    """Small enough for FSDP2 on two ranks; its random numbers show where a step was left out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 1))


def lines(output_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of this kind in the journal."""
    path = output_dir / "control.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in found if line["kind"] == kind]


def senders(output_dir: Path) -> set[str]:
    return {line["by"] for line in lines(output_dir, "accepted")}


def acted(output_dir: Path) -> list[tuple[str, int]]:
    """Name and step of each command that took effect, in this order."""
    names = {line["id"]: line["command"] for line in lines(output_dir, "accepted")}
    return [(names[line["id"]], line["step"]) for line in lines(output_dir, "acted")]


def commanded(output_dir: Path, commands: Commands, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """Twelve steps with records every second, checkpoints every fourth, and an evaluation set."""
    usual: dict[str, Any] = {
        "max_steps": 12,
        "logging_steps": 2,
        "save_steps": 4,
        "save_in_background": False,  # so that it is known from which checkpoint a killed run resumes
        "length": 200,
        "model": TinyWithDropout(),
        "parts": {"eval_dataset": tiny_regression_data(8, seed=1)},
    }
    torch.manual_seed(0)
    return small_trainer(output_dir, Client(commands), JsonLogger(), *callbacks, **{**usual, **settings})


ALL: Commands = {
    2: [("set", {"learning_rate": {"factor": 0.5}, "logging_steps": 3})],
    3: [("evaluate", {})],
    6: [("set", {"learning_rate": 0.004}), ("set", {"max_steps": 14, "save_steps": 5}), ("log", {})],
    7: [("evaluate", {}), ("save_checkpoint", {})],
    9: [("switch", {"callback": "Losses", "on": False}), ("set", {"eval_steps": 2})],
    11: [("switch", {"callback": "Losses", "on": True}), ("set", {"eval_steps": 0})],
}
"""Every repeated command, and a save."""


class Losses(ds.Callback):
    """Observes; its state shows which steps it saw."""

    sets_control_flags = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.steps.append(ctx.step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def with_all(output_dir: Path) -> ds.Trainer:
    return commanded(output_dir, ALL, Losses())


def with_all_sharded(output_dir: Path) -> ds.Trainer:
    return commanded(output_dir, ALL, Losses(), parallel="fsdp")


def losses_of_records(output_dir: Path, commands: Commands, logging_steps: int) -> dict[int, float]:
    """The losses in the records of four steps."""
    losses: dict[int, float] = {}

    def note(ctx: ds.LogContext) -> None:
        if ctx.kind == "train":
            losses[ctx.state.global_step] = ctx.logs["loss"]

    settings = {"logging_steps": logging_steps, "max_steps": 4, "save_steps": 0}
    commanded(output_dir, commands, Listener({"on_log": note}), **settings).train()
    return losses


def set_at_five(output_dir: Path) -> ds.Trainer:
    return commanded(output_dir, {5: [("set", {"learning_rate": 0.1}), ("evaluate", {})]})


def set_at_seven(output_dir: Path) -> ds.Trainer:
    return commanded(output_dir, {7: [("set", {"learning_rate": 0.1}), ("evaluate", {})]})
