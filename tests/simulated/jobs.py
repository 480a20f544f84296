"""Runs on the simulated accelerator. At the top of a module, so that processes can import them."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dalsegno as ds
import durability.device
from dalsegno import callbacks
from dalsegno.callbacks import EMA, JsonLogger, NaNChecker
from dalsegno.callbacks.watchers import slow_rank_detector
from dalsegno.checkpoint import staging
from dalsegno.checkpoint.tensor_files import FileLayout, TensorChunk
from dalsegno.data import loader
from dalsegno.distributed import accelerator
from dalsegno.logs import read_records
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.runs import busy_trainer
from support.small import small_trainer

from .accelerator import KIND, no_waits, plug_in, waits

DUE_AT_EACH_STEP = {"DumpActivations"}
"""What they are for: they copy from the device at each step."""


def trainer(output_dir: Path, order: int = 1, frozen: Sequence[str] = (), **changes: Any) -> ds.Trainer:
    """Everything that ``busy_trainer`` does, with averaged weights and a search for NaN."""
    plug_in(order)
    made = busy_trainer(output_dir, frozen=frozen, **{"max_steps": 12, "use_cpu": False, **changes})
    assert accelerator.current_device().type == KIND
    made.add_callback(EMA(0.9))
    made.add_callback(NaNChecker())
    return made


def background(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir)


def foreground(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, order=0, save_in_background=False)


class OwnLoopThere(OwnLoop):
    """A loop written by hand around ``ds.Run``, which moves model and batches itself."""

    device = KIND

    def __init__(self, output_dir: Path) -> None:
        super().__init__(output_dir, max_steps=16, eval_steps=0)
        self.model.to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [10])

    def update(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().update({key: value.to(self.device, non_blocking=True) for key, value in batch.items()})


class OwnLoopElsewhere(OwnLoopThere):
    """On a device that is not the process's current one."""

    device = f"{KIND}:1"


def own_loop(output_dir: Path) -> OwnLoop:
    plug_in(1)
    return OwnLoopThere(output_dir)


def own_loop_elsewhere(output_dir: Path) -> OwnLoop:
    plug_in(0)
    return OwnLoopElsewhere(output_dir)


def in_memory(output_dir: Path) -> ds.Trainer:
    """A memory checkpoint each step, and a frozen layer that is changed in the middle."""

    def change(ctx: Any) -> None:
        if ctx.state.global_step == 6:
            ctx.model.layers[0].weight.data.mul_(1.5)

    made = trainer(output_dir, frozen=["layers.0"], save_steps=8, save_in_memory="Every(steps=1)")
    made.add_callback(Listener({"on_step_end": change}, name="changes the frozen layer"))
    return made


def ddp(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, parallel="ddp")


def fsdp(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, parallel="fsdp")


# --- what a missing wait breaks ---------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A place where the program waits for the device, or takes care not to."""

    where: Callable[..., Any]
    line: str
    instead: str
    noticed_by: str
    """Name of a check below."""

    @property
    def shown(self) -> str:
        """As the page shows it."""
        return self.line if (at := self.line.find("non_blocking")) < 0 else self.line[at:].rstrip(")")


WAITS = (
    Wait(staging.Buffer.wait_for_devices, "arrival.synchronize()", "pass", "saved"),
    Wait(staging.Buffer._allocate, "self.wait_for_devices()", "pass", "kept"),
    Wait(staging.Copying.wait_for_devices, "buffer.wait_for_devices()", "pass", "saved"),
    Wait(accelerator.recorded_events, "event.record(stream)", "pass", "saved"),
    Wait(staging.Buffer.copy, "place.copy_(tensor, non_blocking=arrive_late)", "place.copy_(tensor)", "not held up"),
    Wait(accelerator.LateNumbers.values, "self._event.synchronize()", "pass", "logged"),
    Wait(accelerator.LateNumbers.are_here, "bool(self._event.query())", "True", "quiet"),
    Wait(accelerator.LateNumbers.__init__, "together, non_blocking=True", "together", "quiet"),
    Wait(loader.to_device, "batch.to(device, non_blocking=True)", "batch.to(device)", "quiet"),
    Wait(slow_rank_detector._seconds_between, "end.synchronize()", "pass", "timed"),
    Wait(accelerator.timed_event, "event.record()", "pass", "timed"),
)


def leave_out(wait: Wait) -> None:
    """Change that line, in this process."""
    function = inspect.unwrap(wait.where)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(wait.line) == 1, f"{wait.line} is not in {function.__qualname__}"
    namespace: dict[str, Any] = {}
    exec(source.replace(wait.line, wait.instead), function.__globals__, namespace)
    function.__code__ = inspect.unwrap(namespace[function.__name__]).__code__


def saved(output_dir: Path) -> None:
    """Background saves contain the weights of their step, although callbacks and later steps change these."""
    plug_in(1, patience=200)
    changes = {"max_steps": 7, "save_steps": 2}
    durability.device.contents(output_dir, changes, durability.device.changing_weights, blocks=2, width=200)


def saved_late(output_dir: Path) -> None:
    plug_in(0, patience=200)
    changes = {"max_steps": 7, "save_steps": 2}
    durability.device.contents(output_dir, changes, durability.device.changing_weights, blocks=2, width=200)


def saved_fused(output_dir: Path) -> None:
    """The optimizer steps within the backward pass."""
    plug_in(5, patience=200)
    fused = {"fuse_optim_with_backward": True, "max_grad_norm": 0, "optim": "adamw", "max_steps": 7, "save_steps": 2}
    durability.device.contents(output_dir, fused, durability.device.no_handlers, blocks=2, width=200)


def not_held_up(output_dir: Path) -> None:
    """The thread that trains does not wait for a background save's copies."""
    plug_in(0)
    before, after = [], []
    counting = Listener(
        {
            "on_before_save": lambda ctx: before.append(waits(own=True)),
            "on_step_begin": lambda ctx: after.append(waits(own=True)),
        },
        name="counts",
    )
    small_trainer(output_dir, counting, use_cpu=False, max_steps=5, save_steps=4).train()
    assert after[4] - before[0] == 1, "after step 4, for its loss: one that is not finite is not saved"


def kept(output_dir: Path) -> None:
    """A buffer keeps its memory until the copies of a save that failed have arrived."""
    plug_in(0)
    buffer = staging.Buffer()
    for size in (1 << 12, 1 << 16):
        tensor = torch.ones(size, device=KIND)
        buffer.lay_out(FileLayout.of([TensorChunk.entire("weight", tensor)]))
        buffer.copy([tensor], lambda position: None)
    torch.accelerator.synchronize()


def logged(output_dir: Path) -> None:
    plug_in(0)
    small_trainer(output_dir, JsonLogger(), use_cpu=False, max_steps=4, logging_steps=1).train()
    losses = [each["loss"] for each in read_records(output_dir / "logs" / "train.jsonl") if "loss" in each]
    assert len(losses) == 4 and all(map(math.isfinite, losses)), losses


def timed(output_dir: Path) -> None:
    plug_in(0)
    weight = torch.ones(8, device=KIND)
    clock = slow_rank_detector.clock_of([weight])
    begin = clock.now()
    weight.mul_(2)
    assert clock.seconds(begin, clock.now()) >= 0


def quiet(output_dir: Path) -> None:
    """In steps with nothing due the host waits for nothing, though the witness records the first ones."""
    plug_in(0)
    small_trainer(output_dir, *with_no_waits(1), use_cpu=False, max_steps=8).train()


def quiet_observed(output_dir: Path) -> None:
    from callbacks.test_not_felt import OBSERVERS, trainer
    from support.builtins import build

    def rarely(name: str) -> ds.Callback:
        """The callback, due only after these steps, if it can be told when."""
        kind = getattr(callbacks, name.split()[0])
        if "every" not in inspect.signature(kind).parameters:
            return build(name)
        made = kind(every=100) if name != "ExpertLoadBalance" else kind(every=100, router=r"layers\.3$")
        assert isinstance(made, ds.Callback)
        return made

    plug_in(0)
    first, last = with_no_waits(4)
    own = [rarely(name) for name in OBSERVERS if name not in DUE_AT_EACH_STEP]
    rare = {"logging_steps": 100, "eval_steps": 100, "save_steps": 100}
    trainer(output_dir, first, *own, last, use_cpu=False, max_steps=12, **rare).train()


def with_no_waits(first_step: int) -> tuple[ds.Callback, ds.Callback]:
    """The first and the last callback: between them, an error says where the host waits."""
    inside = contextlib.ExitStack()

    def begin(ctx: Any) -> None:
        if first_step <= ctx.state.global_step < ctx.state.max_steps - 1:
            inside.enter_context(no_waits())

    def end(ctx: Any) -> None:
        inside.close()

    return Listener({"on_step_begin": begin}, name="first"), Listener({"on_step_done": end}, name="last")


def second_device(output_dir: Path) -> None:
    """A rank whose device is the second one puts nothing on the first."""
    os.environ["LOCAL_RANK"] = "1"
    for steps in (6, 12):
        made = busy_on_device(output_dir, steps)
        assert next(made.model.parameters()).device.index == 1
    assert torch.accelerator.max_memory_allocated(1) > 0
    assert torch.accelerator.max_memory_allocated(0) == 0


def busy_on_device(output_dir: Path, steps: int) -> ds.Trainer:
    made = trainer(output_dir, max_steps=steps, save_in_memory="Every(steps=1)", save_steps=4)
    made.train()
    return made


def rolled_back(output_dir: Path) -> None:
    """Once, in the middle; then on to the end."""
    once: list[int] = []

    def back(ctx: Any) -> None:
        if ctx.state.global_step == 8 and not once:
            once.append(ctx.state.global_step)
            ctx.control.roll_back("to see what happens")

    made = trainer(output_dir, recovery="RecoveryPolicy(margin=2)")
    made.add_callback(Listener({"on_step_end": back}, name="back"))
    assert made.train().global_step == 12 and once == [8]


CHECKS: dict[str, Callable[[Path], None]] = {
    "saved": saved,
    "saved, late": saved_late,
    "saved, fused": saved_fused,
    "not held up": not_held_up,
    "kept": kept,
    "logged": logged,
    "timed": timed,
    "quiet": quiet,
    "quiet, with every observer": quiet_observed,
    "second device": second_device,
    "rolled back": rolled_back,
}


def check(name: str, output_dir: Path, without: int | None = None) -> None:
    """Run a check; ``without``: number of a line in ``WAITS`` that is left out."""
    if without is not None:
        leave_out(WAITS[without])
    CHECKS[name](output_dir)
