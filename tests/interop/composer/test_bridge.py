"""dalsegno's callbacks in Composer's Trainer. mosaicml 0.32 pins an older torch: skipped where it is not installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import EarlyStopping, GradientNoiseScale, JsonLogger, NaNChecker
from dalsegno.testing import run_ranks, start_ranks
from support.listeners import Journal, Listener, Trace
from support.threads import one_thread

pytest.importorskip("composer")
from dalsegno.interop.composer import Bridge
from dalsegno.interop.composer.bridge import UNSUPPORTED_EVENTS
from interop.composer.bridged import At, fit, fit_on_a_rank, fit_until_killed, records, several, states
from interop.pages import assert_rows, examples, refused_builtins

pytestmark = pytest.mark.filterwarnings("ignore")

UNSUPPORTED = tuple(event.handler for event in UNSUPPORTED_EVENTS)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def saved(output_dir: Path) -> list[int]:
    return sorted(int(path.stem[2:]) for path in (output_dir / "checkpoints").glob("ba*.pt"))


def test_a_killed_run_resumes_with_the_logs_and_states_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    (outcome,) = start_ranks(fit_until_killed, 1, killed, 13).wait(300)
    assert outcome.was_killed
    assert saved(killed) == [5, 10]
    fit(whole, several())
    fit(killed, several(), load_path=str(killed / "checkpoints" / "ba10.pt"))
    found, expected = records(killed), records(whole)
    assert found == expected
    assert [len(found[name]) for name in sorted(found)] == [6, 4, 16]
    assert states(killed / "checkpoints" / "ba20.pt") == states(whole / "checkpoints" / "ba20.pt")
    assert list((killed / "logs" / "rewound").glob("train.jsonl*"))


def test_epochs_are_counted_over_a_resume_inside_one(tmp_path: Path) -> None:
    seen: list[Any] = []
    note = {
        "on_epoch_begin": lambda ctx: seen.append(("begin", ctx.epoch, ctx.state.global_step)),
        "on_epoch_end": lambda ctx: seen.append(("end", ctx.epoch, ctx.state.global_step)),
    }
    fit(tmp_path, [Listener(note)], save_interval="7ba", max_duration="2ep")
    assert seen == [("begin", 0, 0), ("end", 0, 5), ("begin", 1, 5), ("end", 1, 10)]
    seen.clear()
    path = str(tmp_path / "checkpoints" / "ba7.pt")
    fit(tmp_path, [Listener(note)], max_duration="3ep", load_path=path)
    assert seen == [("end", 1, 10), ("begin", 2, 10), ("end", 2, 15)]


def test_an_evaluation_inside_an_epoch_is_at_the_step_and_epoch_of_training(tmp_path: Path) -> None:
    """Composer has the evaluator's dataloader in its state meanwhile, of two batches; an epoch has five."""
    seen: list[Any] = []

    def note(ctx: Any) -> None:
        seen.append((ctx.state.global_step, ctx.state.epoch, ctx.state.max_steps))

    noting = Listener({"on_evaluate_begin": note, "on_evaluate": note})
    fit(tmp_path, [JsonLogger(), noting], eval_interval="2ba", max_duration="2ep")
    steps = [2, 4, 6, 8, 10]
    assert seen == [(step, step / 5, 10) for step in steps for _ in range(2)]
    ((_, log),) = records(tmp_path).items()
    assert [record["epoch"] for record in log if "eval_loss" in record] == [step / 5 for step in steps]


def test_a_checkpoint_from_before_the_bridge_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, [], max_duration="1ep")
    path = tmp_path / "checkpoints" / "ba5.pt"
    content = torch.load(path, weights_only=False)
    del content["state"]["callbacks"]["Bridge"]
    torch.save(content, path)
    trace = Trace()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        fit(tmp_path, [trace], max_duration="2ep", load_path=str(path))
    assert "was saved without a Bridge" in caplog.text
    assert trace.steps == 5


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, several(), max_duration="1ep")
    path = tmp_path / "checkpoints" / "ba5.pt"
    content = torch.load(path, weights_only=False)
    content["state"]["callbacks"]["Bridge"]["dalsegno"]["shared.json"][20] ^= 1
    torch.save(content, path)
    with pytest.raises(ds.DamagedCheckpoint, match=r"shared\.json: has checksum"):
        fit(tmp_path, several(), load_path=str(path))


def test_what_a_handler_requests_the_trainer_does(tmp_path: Path) -> None:
    def request(ctx: Any) -> None:
        ctx.control.should_save = ctx.control.should_log = ctx.step == 3
        if ctx.step == 7:
            ctx.control.stop("enough")

    logged: list[Any] = []
    ends: list[str] = []
    asking = Listener(
        {
            "on_step_end": request,
            "on_log": lambda ctx: logged.append((ctx.kind, ctx.state.global_step)),
            "on_train_end": lambda ctx: ends.append(ctx.reason),
        }
    )
    one = fit(tmp_path, [asking], logging_steps=100)
    assert one.state.timestamp.batch.value == 7
    assert (logged, ends) == ([("train", 3), ("eval", 5), ("final", 7)], ["stopped"])
    assert saved(tmp_path) == [3, 5, 7]


def test_early_stopping_and_nan_end_the_run(tmp_path: Path) -> None:
    one = fit(tmp_path / "a", [EarlyStopping(patience=2)], lr=0.0, max_duration="9ep")
    assert one.state.timestamp.epoch.value == 3
    model_is_broken = [NaNChecker()]

    class Broken(ds.Callback):
        def on_step_begin(self, ctx: Any) -> None:
            if ctx.state.global_step == 2:
                next(ctx.model.parameters()).data.fill_(float("nan"))

    fit(tmp_path / "b", [Broken(), *model_is_broken], save_interval="1ba")
    assert max(saved(tmp_path / "b")) < 3, "weights of NaN are not saved"


def test_what_composer_cannot_do_is_not_ignored(tmp_path: Path) -> None:
    def ask(ctx: Any) -> None:
        ctx.control.should_evaluate = True

    with pytest.raises(ds.ConfigurationError, match=r"should_evaluate"):
        fit(tmp_path, [Listener({"on_step_end": ask})])


def test_numbers_of_a_step(tmp_path: Path) -> None:
    """Losses, and gradients before and after clipping, with micro-batches."""
    seen: dict[str, list[Any]] = {"ready": [], "clipped": [], "loss": [], "micro": []}

    def total(ctx: Any) -> float:
        return float(sum(float((each.grad.double() ** 2).sum()) for each in ctx.model.parameters()) ** 0.5)

    look = Listener(
        {
            "on_gradients_ready": lambda ctx: seen["ready"].append(total(ctx)),
            "on_pre_optimizer_step": lambda ctx: seen["clipped"].append(total(ctx)),
            "on_microbatch_end": lambda ctx: seen["micro"].append((ctx.loss, ctx.index, ctx.is_last)),
            "on_step_end": lambda ctx: seen["loss"].append(ctx.loss),
        }
    )
    fit(tmp_path, [look], max_duration="1ep", lr=0.0, device_train_microbatch_size=2)
    losses = [loss for loss, _, _ in seen["micro"]]
    assert [(index, is_last) for _, index, is_last in seen["micro"]] == [(0, False), (1, True)] * 5
    assert seen["loss"] == pytest.approx([sum(losses[at : at + 2]) / 2 for at in range(0, 10, 2)], rel=1e-5)
    assert min(seen["ready"]) > 0.5
    assert seen["clipped"] == pytest.approx([0.5] * 5, rel=1e-3)


def test_the_events_of_a_run(tmp_path: Path) -> None:
    journal = Journal(without=UNSUPPORTED)
    fit(tmp_path, [journal], max_duration="2ba", eval_interval="2ba", save_interval="2ba")
    step = [
        *["step_begin", "microbatch_begin", "microbatch_end", "gradients_ready", "pre_optimizer_step"],
        *["optimizer_step", "step_end"],
    ]
    evaluation = ["evaluate_begin", "evaluate_end", "log_step", "log", "evaluate"]
    begin = ["init_end", "before_load", "train_begin", "epoch_begin"]
    end = ["log_step", "log", *evaluation, "before_save", "step_done", "log_step", "log", "train_end"]
    assert journal.fired == [*begin, *step, "step_done", *step, *end]


def test_an_exception_ends_the_leg(tmp_path: Path) -> None:
    reasons: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [Listener({"on_train_end": lambda ctx: reasons.append(ctx.reason)})], At(3, lambda: 1 / 0))
    assert reasons == ["exception"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.EventNotFired, match=r"GradientNoiseScale needs on_before_backward, which Composer"):
        Bridge([GradientNoiseScale()], output_dir=tmp_path)


def test_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(fit_on_a_rank, 2, tmp_path)
    assert first == second, "gradients are reduced, and the stop of rank 1 is one of both"
    assert first["ended at"] == 7
    logs = records(tmp_path)
    written = [(record.get("kind", "train"), record["global_step"]) for record in logs["train.jsonl"][1:]]
    assert written == [("train", 2), ("train", 4), ("eval", 5), ("train", 6), ("final", 7)]
    for record in logs["gradient_norms.jsonl"]:
        assert record["norms"] == pytest.approx(first["norms"][record["global_step"]], rel=1e-4)


# --- docs/bridges.md --------------------------------------------------------------------------------------------------


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples("Composer")), {"__name__": "example"})
    steps = [record["global_step"] for record in records(tmp_path / "runs/co")["train.jsonl"] if "loss" in record]
    assert steps == [*range(2, 21, 2)]


def test_the_page_lists_what_is_refused(tmp_path: Path) -> None:
    assert_rows(
        "Composer",
        {
            "events that are never fired": [event.handler for event in UNSUPPORTED_EVENTS],
            "built-ins that are refused": refused_builtins(lambda given: Bridge(given, output_dir=tmp_path)),
        },
    )
