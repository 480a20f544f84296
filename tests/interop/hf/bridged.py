"""Runs of Hugging Face's Trainer with a Bridge in it. At the top of a module, so that ranks can import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import CheckLoss, JsonLogger
from dalsegno.interop.hf import Bridge
from dalsegno.interop.hf import bridge as bridge_module
from dalsegno.testing import tiny_regression_data
from interop.bridges import Left, Reader, Verdict, alone, leave, pages, several, states_in
from interop.bridges import records as records_of
from support.listeners import Trace
from support.models import Outputs

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.01,
    "max_steps": 8,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 4,
    "use_cpu": True,
    "disable_tqdm": True,
    "report_to": [],
    "label_names": ["y"],
}


def hf_trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **settings: Any) -> Any:
    """Five steps an epoch."""
    torch.manual_seed(0)
    return transformers.Trainer(
        Outputs() if model is None else model,
        transformers.TrainingArguments(str(output_dir), **{**SETTINGS, **settings}),
        train_dataset=tiny_regression_data(20),
        eval_dataset=tiny_regression_data(8, seed=1),
        callbacks=list(callbacks),
    )


def with_bridge(output_dir: Path, callbacks: Iterable[Any], *others: Any, **settings: Any) -> Any:
    """A trainer whose Bridge has it; ``others`` are Hugging Face's, and come before the Bridge."""
    trainer = hf_trainer(output_dir, *others, **settings)
    trainer.add_callback(Bridge(callbacks, trainer=trainer))
    return trainer


class At(transformers.TrainerCallback):
    """Does something when an event fires at a step."""

    def __init__(self, event: str, step: int, act: Any) -> None:
        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return act(control) if state.global_step == step else None

        setattr(self, event, handler)


def train_until_killed(output_dir: Path, step: int, event: str = "on_step_end") -> None:
    def kill(control: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    alone()
    with_bridge(output_dir, several(), At(event, step, kill)).train()


def records(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Without their mean loss, which is over a leg's own steps."""
    found = records_of(output_dir)
    found["train.jsonl"][-1].pop("train_loss", None)
    return found


def states(checkpoint: Path) -> dict[str, Any]:
    return states_in(checkpoint / "dalsegno")


def train_until_left(output_dir: Path, step: int, *callbacks: Any, **settings: Any) -> None:
    """Steps after the newest checkpoint remain, up to ``step``."""
    trainer = with_bridge(output_dir, [JsonLogger()], At("on_step_begin", step, leave), *callbacks, **settings)
    try:
        trainer.train()
    except Left:
        return


def resume(
    output_dir: Path, *callbacks: Any, knows_trainer: bool = True, on_resume: Any = "warn", **settings: Any
) -> Verdict:
    """Resume where random numbers have been drawn before."""
    verdict = Verdict()
    ours = [verdict, JsonLogger(), *(each for each in callbacks if isinstance(each, ds.Callback))]
    trainer = hf_trainer(output_dir, *(each for each in callbacks if each not in ours), **settings)
    trainer.add_callback(Bridge(ours, trainer=trainer if knows_trainer else None, on_resume=on_resume))
    torch.rand(7)
    trainer.train(resume_from_checkpoint=True)
    return verdict


def resume_on_a_rank(output_dir: Path) -> list[str]:
    """The verdicts about an exact resume, and about one in which rank 1 draws a number of its own."""

    def draw(control: Any) -> None:
        if os.environ["RANK"] == "1":
            torch.rand(1)

    lines = []
    for name, callbacks in (("exact", []), ("differs", [At("on_step_begin", 5, draw)])):
        train_until_left(output_dir / name, 7)
        lines.append(resume(output_dir / name, *callbacks).proof.line)
    return lines


def read(folder: Path, callbacks: Sequence[Any], model: Reader, steps: int, *, knows_trainer: bool = True) -> None:
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = transformers.Trainer(model, args, train_dataset=pages())  # type: ignore[arg-type]
    trainer.add_callback(Bridge(callbacks, trainer=trainer if knows_trainer else None))
    trainer.train(resume_from_checkpoint=(folder / "checkpoint-4").exists())


def read_without_trainer(folder: Path, callbacks: Sequence[Any], model: Reader, steps: int) -> None:
    read(folder, callbacks, model, steps, knows_trainer=False)


# --- the contract of every bridge -------------------------------------------------------------------------------------

PAGE = "hugging-face"
UNSUPPORTED_EVENTS = bridge_module.UNSUPPORTED_EVENTS
REFUSED = CheckLoss, r"CheckLoss needs on_microbatch_end, .* use dalsegno\.Trainer"
EVALUATIONS = "set eval_strategy"
KILLED_AT, REPEATED = 7, "5 to 6"
"""A step, and those that a resume repeats."""
EXAMPLE = "runs/hf", range(2, 17, 2)
"""Where the page's example writes, and the steps that it logs."""
READS = {"with the trainer": read, "without": read_without_trainer}
"""Train a :class:`Reader`, for so many steps altogether; saved after four."""
COUNTS = {"with the trainer"}
"""Those that count tokens and FLOPs."""


def bridge(callbacks: list[object], output_dir: Path) -> Bridge:
    return Bridge(callbacks, trainer=hf_trainer(output_dir))


def train(output_dir: Path, callbacks: Iterable[Any], *, resume: Path | None = None, evaluates: bool = True) -> int:
    trainer = with_bridge(output_dir, callbacks, **({} if evaluates else {"eval_strategy": "no"}))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return int(trainer.state.global_step)


def train_with_two(output_dir: Path) -> None:
    hf_trainer(output_dir, Bridge([Trace()]), Bridge([JsonLogger()])).train()


def train_without(output_dir: Path) -> int:
    """Save a checkpoint without a Bridge. Returns the step at which the library itself resumes from it."""
    hf_trainer(output_dir, max_steps=4).train()
    return 4


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """By their step."""
    return {int(path.name.partition("-")[2]): path for path in output_dir.glob("checkpoint-*")}


def damage(checkpoint: Path) -> None:
    path = checkpoint / "dalsegno" / "shared.json"
    path.write_bytes(path.read_bytes().replace(b"JsonLogger", b"JsonLooger"))
