"""dalsegno's callbacks in a loop around an Accelerator: resumed exactly, also with two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import dalsegno as ds
from dalsegno.callbacks import CheckLoss
from dalsegno.checkpoint import Checkpoint, read_tensors, saved_states
from dalsegno.interop.accelerate import UNSUPPORTED_EVENTS, Bridge
from dalsegno.logs import read_records
from dalsegno.logs.wall_clock import drop_wall_clock
from dalsegno.testing import run_ranks, start_ranks
from interop.accelerate.bridged import loop, loop_on_a_rank, loop_until_killed, several
from interop.pages import assert_rows, examples, refused_builtins
from support.listeners import Journal, Listener, Trace
from support.threads import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def records(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    logs = sorted((output_dir / "logs").glob("*.jsonl"))
    return {log.name: [drop_wall_clock(record) for record in read_records(log)] for log in logs}


def states(checkpoint: Path) -> dict[str, Any]:
    """States that have no times in them."""
    found = Checkpoint.open(checkpoint / "dalsegno")
    saved, tensors = saved_states(found), read_tensors(found)["callbacks.EMA"]
    kept = {key: saved[key] for key in ("callbacks.DivergenceDetector", "callbacks.EarlyStopping", "callbacks.EMA")}
    return kept | {name: tensor.tolist() for name, tensor in tensors.items()}


def test_a_killed_run_resumes_with_the_logs_and_states_of_an_uninterrupted_one(tmp_path: Path) -> None:
    (outcome,) = start_ranks(loop_until_killed, 1, tmp_path / "killed", 7).wait(300)
    assert outcome.was_killed
    assert loop(tmp_path / "whole", several())["ended at"] == 8
    loop(tmp_path / "killed", several(), resume=tmp_path / "killed" / "checkpoint-4")
    whole, resumed = records(tmp_path / "whole"), records(tmp_path / "killed")
    assert resumed == whole
    assert [len(whole[name]) for name in sorted(whole)] == [2, 4, 10]
    assert states(tmp_path / "killed" / "checkpoint-8") == states(tmp_path / "whole" / "checkpoint-8")
    assert list((tmp_path / "killed" / "logs" / "rewound").glob("train.jsonl*"))


def test_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(loop_on_a_rank, 2, tmp_path)
    assert first == second
    assert first["ended at"] == 5
    logs = records(tmp_path)
    written = [(record.get("kind", "train"), record["global_step"]) for record in logs["train.jsonl"][1:]]
    assert written == [*[(kind, step) for step in (2, 4) for kind in ("train", "eval")], ("final", 5)]
    assert [record["global_step"] for record in logs["gradient_norms.jsonl"]] == [2, 4]
    for record in logs["gradient_norms.jsonl"]:
        assert record["norms"] == pytest.approx(first["norms"][record["global_step"]], rel=1e-5)
    assert (tmp_path / "checkpoint-5" / "dalsegno" / "manifest.json").exists()


def test_the_events_of_a_step(tmp_path: Path) -> None:
    journal = Journal(without=tuple(event.handler for event in UNSUPPORTED_EVENTS))
    loop(tmp_path, [journal], max_steps=2)
    first = [
        *["step_begin", "gradients_ready", "pre_optimizer_step", "optimizer_step", "step_end", "step_done"],
    ]
    second = [
        *["step_begin", "gradients_ready", "pre_optimizer_step", "optimizer_step", "step_end", "before_save"],
        *["log_step", "log", "evaluate_begin", "evaluate_end", "log_step", "log", "evaluate"],
    ]
    begin = ["init_end", "before_load", "train_begin", "epoch_begin"]
    assert journal.fired == [*begin, *first, *second, "step_done", "log_step", "log", "train_end"]


def test_requests_and_epochs(tmp_path: Path) -> None:
    seen: list[Any] = []

    def request(ctx: Any) -> None:
        ctx.control.should_save = ctx.step == 3
        if ctx.step == 6:
            ctx.control.stop("enough")

    look = Listener(
        {
            "on_step_end": request,
            "on_epoch_begin": lambda ctx: seen.append(("begin", ctx.epoch)),
            "on_epoch_end": lambda ctx: seen.append(("end", ctx.epoch)),
            "on_train_end": lambda ctx: seen.append(ctx.reason),
        }
    )
    loop(tmp_path, [look], max_steps=-1, num_train_epochs=4, save_strategy="no", eval_strategy="no")
    assert seen == [("begin", 0), ("end", 0), ("begin", 1), "stopped"]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.EventNotFired, match=r"CheckLoss needs on_microbatch_end, which a loop around"):
        loop(tmp_path, [CheckLoss()])
    with pytest.raises(ZeroDivisionError):
        loop(tmp_path, [Listener({"on_step_end": lambda ctx: ctx.step / 0})])
    assert loop(tmp_path, [Trace()])["ended at"] == 8


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples("Accelerate")), {"__name__": "example"})
    steps = [record["global_step"] for record in records(tmp_path / "runs/ac")["train.jsonl"] if "loss" in record]
    assert steps == [2, 4, 6, 8, 10, 12]


def test_the_page_lists_what_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = ds.TrainingArguments(tmp_path, max_steps=1)
    assert_rows(
        "Accelerate",
        {
            "events that are never fired": [event.handler for event in UNSUPPORTED_EVENTS],
            "built-ins that are refused": refused_builtins(
                lambda given: Bridge(args, given, accelerator, model=model, optimizer=optimizer, loader=[1])
            ),
        },
    )
