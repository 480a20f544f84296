"""dalsegno's callbacks in Hugging Face's Trainer: resumed exactly, and flags in both directions."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import dalsegno as ds
from dalsegno.callbacks import (
    EMA,
    DivergenceDetector,
    GradHistogram,
    JsonLogger,
    NaNChecker,
    StabilityMonitor,
)
from dalsegno.interop.hf import Bridge
from dalsegno.interop.hf.bridge import NEED_TRAINER, UNSUPPORTED_EVENTS
from dalsegno.testing import start_ranks, tiny_regression_data
from interop.bridges import assert_rows, refused_builtins
from interop.hf.bridged import (
    At,
    hf_trainer,
    records,
    several,
    states,
    train_until_killed,
    with_bridge,
)
from support.listeners import Journal, Listener, Trace
from support.models import Outputs
from support.small import NOISY
from support.threads import one_thread

# --- records ----------------------------------------------------------------------------------------------------------


def test_what_is_logged_beside_the_loss_does_not_change_the_kind_of_a_record(tmp_path: Path) -> None:
    trainer = with_bridge(tmp_path, [JsonLogger()], max_steps=2)
    original = trainer.log
    trainer.log = lambda logs, *given: original({**logs, "eval_ratio": 0.5, "train_loss": 1.0}, *given)
    trainer.train()
    kinds = [record.get("kind") for record in records(tmp_path)["train.jsonl"]]
    assert kinds == ["header", None, "eval", "final"]


# --- killed and resumed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The output directory of a run of eight steps, saved after four and eight."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with one_thread():
        with_bridge(folder, several()).train()
        yield folder


def assert_same(output_dir: Path, uninterrupted: Path) -> None:
    found, expected = records(output_dir), records(uninterrupted)
    assert found == expected
    assert len(expected["train.jsonl"]) == 10
    assert states(output_dir / "checkpoint-8") == states(uninterrupted / "checkpoint-8")


def test_a_checkpoint_that_was_not_completed_is_refused(tmp_path: Path, uninterrupted: Path) -> None:
    def interrupt(control: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_bridge(tmp_path, several(), At("on_save", 8, interrupt)).train()
    incomplete = tmp_path / "checkpoint-8"
    with pytest.raises(ds.DamagedCheckpoint, match=r"checkpoint-8: contains no states .* resume from checkpoint-4"):
        with_bridge(tmp_path, several()).train(resume_from_checkpoint=True)
    incomplete.rename(tmp_path / "elsewhere")
    with_bridge(tmp_path, several()).train(resume_from_checkpoint=True)
    assert_same(tmp_path, uninterrupted)


def test_a_first_checkpoint_that_was_not_completed_is_refused_too(
    tmp_path: Path, uninterrupted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no earlier one to tell that a Bridge took part."""
    (outcome,) = start_ranks(train_until_killed, 1, tmp_path, 4, "on_save").wait(300)
    assert outcome.was_killed
    incomplete = tmp_path / "checkpoint-4"
    with pytest.raises(
        ds.DamagedCheckpoint, match=r"although a Bridge took part; .* Delete checkpoint-4, and start again"
    ):
        with_bridge(tmp_path, several()).train(resume_from_checkpoint=True)
    assert "saved without a Bridge" not in caplog.text
    incomplete.rename(tmp_path / "elsewhere")
    with_bridge(tmp_path, several()).train()
    assert_same(tmp_path, uninterrupted)


def test_a_checkpoint_saved_after_the_bridge_was_taken_out_is_one_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hugging Face's state still has the mark, of an earlier step."""
    hf_trainer(tmp_path, Bridge([Trace()]), max_steps=4).train()
    hf_trainer(tmp_path, max_steps=8).train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path / "checkpoint-4")
    with caplog.at_level(logging.WARNING, "dalsegno"):
        hf_trainer(tmp_path, Bridge([Trace()]), max_steps=9).train(resume_from_checkpoint=True)
    assert "checkpoint-8 was saved without a Bridge" in caplog.text


def test_states_of_another_timeline_are_refused(tmp_path: Path) -> None:
    """Training resumed from step 4 with other data, and was killed between its writing of step 8 and the Bridge's."""
    with_bridge(tmp_path, several()).train()

    def interrupt(control: Any) -> None:
        raise KeyboardInterrupt

    again = with_bridge(tmp_path, several(), At("on_save", 8, interrupt), learning_rate=0.02)
    with pytest.raises(KeyboardInterrupt):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.raises(ds.StateMismatch, match=r"its history differs"):
        with_bridge(tmp_path, several()).train(resume_from_checkpoint=True)


def test_a_checkpoint_elsewhere_is_named(tmp_path: Path) -> None:
    hf_trainer(tmp_path / "a", Bridge([Trace()]), max_steps=4).train()
    there = tmp_path / "a" / "checkpoint-4"
    with pytest.raises(ds.ConfigurationError, match=r"resume_from_checkpoint="):
        hf_trainer(tmp_path / "b", Bridge([Trace()])).train(resume_from_checkpoint=str(there))
    trace = Trace()
    hf_trainer(tmp_path / "b", Bridge([trace], resume_from_checkpoint=there)).train(resume_from_checkpoint=str(there))
    assert trace.steps == 8


@pytest.mark.parametrize(
    "settings",
    [{"save_only_model": True}, {"load_best_model_at_end": True, "save_total_limit": 1}, {"save_strategy": "best"}],
    ids=str,
)
def test_other_ways_to_save(settings: dict[str, Any], tmp_path: Path) -> None:
    """States are of their checkpoint's step, and go with the checkpoint."""
    if "save_strategy" in settings:
        settings |= {"metric_for_best_model": "loss"}
    hf_trainer(tmp_path, Bridge([Trace()]), **settings).train()
    saved = sorted(tmp_path.glob("checkpoint-*"))
    assert saved
    assert [states(path)["callbacks.Trace"][0][0]["steps"] for path in saved] == [
        int(path.name.partition("-")[2]) for path in saved
    ]


# --- flags, in both directions ----------------------------------------------------------------------------------------


def test_what_a_handler_requests_the_trainer_does(tmp_path: Path) -> None:
    done: list[tuple[str, int]] = []

    def request(ctx: Any) -> None:
        step = ctx.state.global_step
        ctx.control.should_save = ctx.control.should_evaluate = ctx.control.should_log = step == 3
        if step == 5:
            ctx.control.stop("enough")

    note = {name: lambda ctx, name=name: done.append((name, ctx.state.global_step)) for name in ("on_log", "on_save")}
    end = {"on_train_end": lambda ctx: done.append((ctx.reason, ctx.state.global_step))}
    trainer = hf_trainer(tmp_path, Bridge([Listener({"on_step_end": request, **note, **end})]), logging_steps=100)
    trainer.args.eval_steps = 100
    trainer.train()
    assert trainer.state.global_step == 5
    assert done == [
        *[("on_log", 3), ("on_log", 3), ("on_save", 3)],
        *[("on_save", 4), ("on_save", 5)],
        *[("on_log", 5), ("stopped", 5)],
    ]
    assert (tmp_path / "checkpoint-5" / "dalsegno").is_dir()


def test_what_their_callbacks_request_is_seen_here(tmp_path: Path) -> None:
    def ask(control: Any) -> None:
        control.should_save = control.should_training_stop = True

    journal = Journal(lambda ctx: ctx.state.global_step, without=unsupported())
    hf_trainer(tmp_path, At("on_step_end", 3, ask), Bridge([journal])).train()
    assert ("save", 3) in journal.notes
    assert journal.fired[-1] == "train_end"
    assert journal.notes[-1] == ("train_end", 3)


def test_weights_of_nan_are_not_saved(tmp_path: Path) -> None:
    class Broken(Outputs):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(x, y) * float("nan")}

    trainer = hf_trainer(tmp_path, Bridge([NaNChecker()]), model=Broken(), logging_steps=3, save_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert list(tmp_path.glob("checkpoint-*")) == []


@pytest.mark.parametrize(
    ("callback", "hides", "expected"),
    [
        (DivergenceDetector, True, "so DivergenceDetector cannot find them; set logging_nan_inf_filter=False"),
        (StabilityMonitor, True, "so StabilityMonitor cannot find them; set logging_nan_inf_filter=False"),
        (lambda: DivergenceDetector(use_eval_loss=True), True, None),
        (NaNChecker, True, None),
        (DivergenceDetector, False, None),
    ],
    ids=["detector", "monitor", "of evaluations", "of outputs", "not hidden"],
)
def test_hidden_losses_are_announced_to_those_who_look_for_them(
    callback: Any, hides: bool, expected: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dalsegno"):
        hf_trainer(tmp_path, Bridge([callback()]), max_steps=1, logging_nan_inf_filter=hides).train()
    assert ("NaN or infinite out of its records" in caplog.text) == (expected is not None)
    assert expected is None or expected in caplog.text


# --- the same events as in dalsegno's own trainer ---------------------------------------------------------------------


def unsupported(*others: str) -> tuple[str, ...]:
    return (*(event.handler for event in [*UNSUPPORTED_EVENTS, *NEED_TRAINER]), *others)


BY_STEPS = {"max_steps": 8, "logging_steps": 2, "eval_steps": 4, "save_steps": 4, "eval_strategy": "steps"}
BY_EPOCHS = {
    "max_steps": -1,
    "num_train_epochs": 2,
    **dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch"),
}


@pytest.mark.parametrize("settings", [BY_STEPS, BY_EPOCHS], ids=["by steps, ending inside an epoch", "by epochs"])
def test_the_same_events_as_in_a_trainer_of_dalsegno(settings: dict[str, Any], tmp_path: Path) -> None:
    without = unsupported("on_before_save", "on_step_done")  # theirs come at other moments
    shared: dict[str, Any] = {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "use_cpu": True}

    def note(ctx: Any) -> Any:
        seen = ctx.state.global_step, round(ctx.state.epoch, 6), ctx.state.will_log, ctx.state.will_save
        return *seen, sorted(ctx.logs) if hasattr(ctx, "kind") and ctx.kind == "train" else None

    theirs, ours = (
        Journal(lambda ctx: note(ctx)[:4], without=without),
        Journal(lambda ctx: note(ctx)[:4], without=without),
    )
    hf_trainer(tmp_path / "there", Bridge([theirs]), **settings, **shared).train()
    args = ds.TrainingArguments(
        tmp_path / "here", per_device_train_batch_size=4, save_in_background=False, **settings, **shared
    )
    trainer = ds.Trainer(
        Outputs(),
        args,
        train_dataset=tiny_regression_data(20),
        eval_dataset=tiny_regression_data(8, seed=1),
        callbacks=[ours],
    )
    for name in NOISY:
        trainer.remove_callback(name)
    trainer.train()
    inside = [index for index, event in enumerate(ours.fired) if event not in ("init_end", "before_load")]
    assert theirs.fired == ours.fired
    assert [theirs.notes[index] for index in inside] == [ours.notes[index] for index in inside]


def test_losses_norms_and_gradients_of_a_step(tmp_path: Path) -> None:
    """With the trainer: on_gradients_ready sees gradients before they are clipped; their norm is the one logged."""
    seen: dict[str, list[float]] = {"ready": [], "clipped": [], "norm": [], "loss": []}

    def total(ctx: Any) -> float:
        squares = [float((each.grad.double() ** 2).sum()) for each in ctx.model.parameters()]
        return float(sum(squares) ** 0.5)

    def numbers(ctx: Any) -> None:
        seen["norm"].append(ctx.grad_norm)
        seen["loss"].append(ctx.loss)

    look = Listener(
        {
            "on_gradients_ready": lambda ctx: seen["ready"].append(total(ctx)),
            "on_pre_optimizer_step": lambda ctx: seen["clipped"].append(total(ctx)),
            "on_step_end": numbers,
        }
    )
    settings = {"logging_steps": 1, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = with_bridge(tmp_path, [look], **settings)
    own = trainer.accelerator.clip_grad_norm_, trainer.training_step, trainer.evaluation_loop
    trainer.train()
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert seen["ready"] == pytest.approx([record["grad_norm"] for record in logged], rel=1e-5)
    assert seen["norm"] == pytest.approx(seen["ready"], rel=1e-5)
    assert seen["loss"] == pytest.approx([record["loss"] for record in logged], rel=1e-4)
    assert seen["clipped"] == pytest.approx([0.1] * 4, rel=1e-3)
    assert (trainer.accelerator.clip_grad_norm_, trainer.training_step, trainer.evaluation_loop) == own


def test_metrics_of_an_evaluation_elsewhere_are_of_the_weights(tmp_path: Path) -> None:
    """A program may log metrics of an evaluation of its own before the Trainer has run one."""
    trainer = hf_trainer(tmp_path, eval_steps=8)
    trainer.add_callback(At("on_step_end", 1, lambda control: trainer.log({"eval_elsewhere": 0.5})))
    trainer.add_callback(Bridge([EMA(), JsonLogger()], trainer=trainer))
    trainer.train()
    evaluations = [each for each in records(tmp_path)["train.jsonl"] if each.get("kind") == "eval"]
    assert [each.get("evaluated_weights") for each in evaluations] == [None, "EMA"]


def test_a_gradient_scaler(tmp_path: Path) -> None:
    """Its first scale is too large: that update is skipped."""
    seen: list[tuple[str, int]] = []
    look = Listener(
        {
            "on_step_skipped": lambda ctx: seen.append(("skipped", ctx.state.global_step)),
            "on_optimizer_step": lambda ctx: seen.append(("updated", ctx.state.global_step)),
        }
    )
    trainer = with_bridge(tmp_path, [JsonLogger(), look], max_steps=4, logging_steps=1, optim="adamw_torch")
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    trainer.train()
    assert seen == [("skipped", 0), ("updated", 1), ("updated", 2), ("updated", 3)]
    assert [record["global_step"] for record in records(tmp_path)["train.jsonl"] if "loss" in record] == [1, 2, 3, 4]

    trainer = with_bridge(tmp_path / "b", [GradHistogram()])
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ds.ConfigurationError, match="on_gradients_ready: with fp16"):
        trainer.train()


def test_training_is_the_same_with_a_bridge(tmp_path: Path, uninterrupted: Path) -> None:
    """Random numbers, weights and optimizer: dropout would show a number that a callback has drawn."""
    hf_trainer(tmp_path).train()
    ours, theirs = (load_file(folder / "checkpoint-8" / "model.safetensors") for folder in (uninterrupted, tmp_path))
    assert {name: each.tolist() for name, each in ours.items()} == {
        name: each.tolist() for name, each in theirs.items()
    }


# --- refused ----------------------------------------------------------------------------------------------------------


def test_events_that_need_the_trainer_are_refused_without(tmp_path: Path) -> None:
    for callback in (EMA(), GradHistogram()):
        with pytest.raises(ds.EventNotFired, match=r"needs on_\w+, .*Bridge\(\[…\], trainer=trainer\)"):
            Bridge([callback])
    Bridge([EMA(), GradHistogram()], trainer=hf_trainer(tmp_path))


def test_a_number_that_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    reader = Listener({"on_step_end": lambda ctx: ctx.loss})
    with pytest.raises(ds.EventNotFired, match=r"ctx\.loss of on_step_end is unknown here: .*trainer=trainer"):
        hf_trainer(tmp_path, Bridge([reader])).train()


def test_it_is_a_callback_of_theirs() -> None:
    assert isinstance(Bridge([]), transformers.TrainerCallback)


# --- docs/coming-from -------------------------------------------------------------------------------------------------


def test_the_page_lists_what_needs_the_trainer(tmp_path: Path) -> None:
    without, given = refused_builtins(Bridge), refused_builtins(lambda each: Bridge(each, trainer=hf_trainer(tmp_path)))
    assert_rows("hugging-face", {"built-ins that need the trainer": [name for name in without if name not in given]})


def test_counted_tokens_make_no_record_the_final_one(tmp_path: Path) -> None:
    """With ``include_num_input_tokens_seen`` each of Hugging Face's records has a ``train_runtime``."""
    kinds = Listener({"on_log": lambda ctx: seen.append((ctx.kind, ctx.state.global_step))})
    seen: list[tuple[str, int]] = []
    saved = Listener({"on_save": lambda ctx: ctx.trainer.log({"saved": ctx.step})}, name="Saved")
    callbacks = [kinds, saved, JsonLogger()]
    with_bridge(tmp_path, callbacks, include_num_input_tokens_seen="all", max_steps=4, save_steps=2).train()
    assert [each for each in seen if each[0] == "save"] == [("save", 2), ("save", 4)]
    others = [each for each in seen if each[0] != "save"]
    assert others == [("train", 2), ("eval", 2), ("train", 4), ("eval", 4), ("final", 4)]
    for path in (tmp_path, tmp_path / "checkpoint-2" / "trainer_state.json"):
        read = [
            (record["kind"], record["global_step"])
            for record in ds.open_log(path).records()
            if record["kind"] not in ("header", "save")
        ]
        assert read == others[: len(read)]
        assert len(read) >= 2
    stopped = ds.open_log(tmp_path / "checkpoint-2" / "trainer_state.json")
    assert stopped.summary().state != "finished"
