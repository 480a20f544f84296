"""dalsegno's callbacks in a loop around an Accelerator: two ranks, events, and what a resume that is not exact says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from dalsegno.callbacks import JsonLogger
from dalsegno.interop.accelerate import UNSUPPORTED_EVENTS
from dalsegno.testing import run_ranks
from interop.accelerate.bridged import bridge, loop, loop_on_a_rank
from interop.bridges import Left, Verdict, leave, records
from support.listeners import Journal, Listener
from support.own_loops import OwnLoop
from support.threads import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


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


def test_an_exception_in_the_final_record_ends_the_leg(tmp_path: Path) -> None:
    """Nothing of the bridge stays in the accelerator, which the program may use again."""

    def fail(ctx: Any) -> None:
        if ctx.kind == "final":
            raise ZeroDivisionError

    journal = Journal(without=tuple(event.handler for event in UNSUPPORTED_EVENTS))
    one = bridge([journal, Listener({"on_log": fail})], tmp_path)
    with pytest.raises(ZeroDivisionError), one:
        pass
    assert journal.fired[-2:] == ["exception", "train_end"]
    assert not {"backward", "clip_grad_norm_"} & vars(one._accelerator).keys()


# --- whether a resume is exact ----------------------------------------------------------------------------------------


def leave_after(output_dir: Path, step: int, **settings: Any) -> None:
    last = Listener({"on_step_begin": lambda ctx: leave() if ctx.state.global_step == step else None})
    with pytest.raises(Left):
        loop(output_dir, [JsonLogger(), last], **settings)


def resume(output_dir: Path, checkpoint: str, **settings: Any) -> Verdict:
    verdict = Verdict()
    loop(output_dir, [JsonLogger(), verdict], resume=output_dir / checkpoint, **settings)
    return verdict


def test_with_dropout_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    settings = {"save_steps": 5, "max_steps": 10, "dropout": True, "eval_strategy": "no"}
    leave_after(tmp_path, 8, **settings)
    assert resume(tmp_path, "checkpoint-5", **settings).proof.line.startswith("resumed exactly: steps 6 to 8 ")


def test_with_dropout_inside_an_epoch(tmp_path: Path) -> None:
    leave_after(tmp_path, 7, dropout=True)
    verdict = resume(tmp_path, "checkpoint-4", dropout=True)
    assert verdict.found == ("differs", "random numbers", 5)
    assert "a loader's new iterator draws one" in verdict.proof.why


@pytest.mark.parametrize("on_resume", ["warn", "stop", "ignore"])
def test_batches_that_are_not_skipped(tmp_path: Path, on_resume: str, caplog: pytest.LogCaptureFixture) -> None:
    leave_after(tmp_path, 7, logging_steps=100)
    verdict = resume(tmp_path, "checkpoint-4", skips=False, on_resume=on_resume, logging_steps=100)
    assert verdict.proof.verdict == "differs"
    assert verdict.proof.differs_at == 5
    assert "accelerator.skip_first_batches" in verdict.proof.why
    assert (verdict.reason, verdict.ended_at) == (("aborted", 5) if on_resume == "stop" else ("finished", 8))
    assert ("not resumed exactly" in caplog.text) == (on_resume != "ignore")


class Prepared(OwnLoop):
    def __init__(self, output_dir: Path, *callbacks: Any, **settings: object) -> None:
        super().__init__(output_dir, *callbacks, **settings)
        self.optimizer = Accelerator(cpu=True).prepare(self.optimizer)


def test_a_loop_without_the_bridge_may_step_a_prepared_optimizer(tmp_path: Path) -> None:
    """``ds.Run`` fires events, saves and restores as with the optimizer inside."""
    weights, seen = [], list[Any]()
    for kind in (OwnLoop, Prepared):
        for steps in (12, 20):
            seen.clear()
            loop = kind(tmp_path / kind.__name__, Listener({"on_optimizer_step": seen.append}), max_steps=steps)
            loop.train()
        assert len(seen) == 8
        weights.append(loop.model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
