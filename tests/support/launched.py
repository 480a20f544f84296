"""Trainers and callbacks that a launcher's ranks import."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from support.small import small_trainer

STARTS = "TORCHELASTIC_RESTART_COUNT"


def build_with(callbacks: Sequence[Any], output_dir: str, **settings: Any) -> ds.Trainer:
    """As :func:`build`; a program whose callbacks are all given from outside."""
    return build(output_dir, callbacks, **settings)


def build(output_dir: str, callbacks: Sequence[Any] = (), **settings: Any) -> ds.Trainer:
    """Two samples per rank and step."""
    given = {"max_steps": 8, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, **settings}
    return small_trainer(Path(output_dir), *callbacks, **given)


def misconfigured() -> ds.Trainer:
    raise ds.ConfigurationError("width=-1; needs a number over 0")


def never_built(path: str) -> ds.Trainer:
    Path(path).touch()
    threading.Event().wait()
    raise AssertionError("it waits for ever")


class AtStep(ds.Callback):
    """Does something after a step, on one rank, in the first life only unless ``always``."""

    def __init__(self, step: int, rank: int = 1, *, always: bool = False) -> None:
        self.step, self.rank, self.always = step, rank, always

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        is_first = os.environ[STARTS] == "0"
        if ctx.step == self.step and os.environ["RANK"] == str(self.rank) and (is_first or self.always):
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class Kill(AtStep):
    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Fail(AtStep):
    def act(self) -> None:
        raise RuntimeError("out of luck\nand more")


class Misspell(ds.Callback):
    def on_step_begin(self, ctx: ds.Context) -> None:
        misspelled()  # type: ignore[name-defined]  # noqa: F821


def build_wrongly(attempts: str) -> ds.Trainer:
    with Path(attempts).open("a") as file:
        file.write("x")
    return misspelled  # type: ignore[name-defined,no-any-return]  # noqa: F821


class Titles(AtStep):
    """Writes down how the system names this rank's process and its data loader's worker."""

    def __init__(self, folder: Path) -> None:
        super().__init__(2)
        self.folder = folder

    def act(self) -> None:
        (worker,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for name, pid in ("rank", os.getpid()), ("worker", worker):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0")
            (self.folder / name).write_text(f"{Path(f'/proc/{pid}/comm').read_text()}{words}")


class Hang(AtStep):
    """Rank 0 hangs. While it does, and once rank 1 has made the step too, there is a file of each in ``folder``."""

    def __init__(self, step: int, folder: Path) -> None:
        super().__init__(step, rank=0)
        self.folder = folder

    def on_train_begin(self, ctx: ds.Context) -> None:
        self.folder.mkdir(exist_ok=True)
        self._mine.unlink(missing_ok=True)

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        if ctx.step == self.step and os.environ[STARTS] == "0":
            self._mine.touch()
        super().on_step_done(ctx)

    def act(self) -> None:
        threading.Event().wait()

    @property
    def _mine(self) -> Path:
        return self.folder / os.environ["RANK"]


class Touch(AtStep):
    """Tells the launcher that a step is done, and lets the training last."""

    def __init__(self, path: Path) -> None:
        super().__init__(2, rank=0)
        self.path = path

    def on_step_done(self, ctx: ds.StepDoneContext) -> None:
        super().on_step_done(ctx)
        time.sleep(0.01)

    def act(self) -> None:
        self.path.touch()


class SlowSave(ds.Callback):
    """Takes longer for a save than the launcher's patience with ranks that failed."""

    def on_before_save(self, ctx: ds.Context) -> None:
        (ctx.args.directory / "saving").touch()
        time.sleep(1.0)


class Stop(ds.Callback):
    def __init__(self, *, diverged: bool = False) -> None:
        self.diverged = diverged

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        if ctx.step == 3:
            ctx.control.stop("enough", diverged=self.diverged)


class Meter:
    """An attribute of a callback, of a class of the user's own."""

    def __init__(self) -> None:
        self.values: list[float] = []


class Losses(ds.Callback):
    """Without ``state_dict``: its state is its attributes."""

    def __init__(self, scale: float, transform: Callable[[float], float], every: ds.Every, *, folder: Path) -> None:
        self.scale, self.transform, self.every, self.folder = scale, transform, every, folder
        self.meter = Meter()
        self.modes: dict[str, int] = {}
        self.lock = threading.Lock()

    def on_train_begin(self, ctx: ds.Context) -> None:
        for path in self.folder.rglob("dalsegno-launch-*/**"):
            self.modes |= {each.name: each.stat().st_mode & 0o777 for each in [path, *path.iterdir()]}

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.meter.values.append(self.transform(self.scale * ctx.step))


class Tokens(ds.Callback):
    """With ``state_dict``."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights, self._seen = weights, torch.zeros(3)

    def seen(self) -> list[float]:
        return (self._seen * self._weights).tolist()

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"].clone()


def half(value: float) -> float:
    return value / 2


@ds.on(ds.Event.SAVE)
def note_save(ctx: Any) -> None:
    (ctx.args.directory / "noted").touch()


@ds.on(ds.Event.STEP_DONE, every=4)
def note_step(ctx: Any) -> None:
    (ctx.args.directory / f"step-{ctx.step}").touch()
