"""A resume under Hugging Face's Trainer says whether it is exact, and if not, what Hugging Face does not restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.hf import Bridge
from dalsegno.testing import run_ranks
from interop.bridges import Verdict
from interop.hf.bridged import (
    At,
    hf_trainer,
    resume,
    resume_on_a_rank,
    train_until_left,
    with_bridge,
)
from support.threads import one_thread


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"dataloader_num_workers": 2},
        {"save_steps": 5},  # where an epoch ends
        {"bf16": True},
        {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"},
    ],
    ids=str,
)
def test_healthy_resumes_raise_no_alarm(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train_until_left(tmp_path, 7, **settings)
    assert resume(tmp_path, **settings).proof.verdict == "exact"
    assert "not resumed exactly" not in caplog.text


def test_without_the_trainer_gradients_tell(tmp_path: Path) -> None:
    train_until_left(tmp_path, 7, logging_steps=100, eval_strategy="no")
    seen = resume(tmp_path, knows_trainer=False, logging_steps=100, eval_strategy="no")
    assert seen.proof.line == "resumed exactly: steps 5 to 7 repeated bit for bit"
    train_until_left(tmp_path / "b", 7, logging_steps=100, eval_strategy="no")

    def change(control: Any) -> None:
        parameter.data.add_(1e-3)

    again = hf_trainer(tmp_path / "b", At("on_step_begin", 5, change), logging_steps=100, eval_strategy="no")
    parameter = next(again.model.parameters())
    verdict = Verdict()
    again.add_callback(Bridge([verdict]))
    again.train(resume_from_checkpoint=True)
    assert verdict.proof.verdict == "differs"
    assert (verdict.proof.differs_at, verdict.proof.what) == (6, "gradients")
    assert "give the Bridge the trainer" in verdict.proof.why


def test_what_their_callbacks_count_and_no_checkpoint_contains_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Patience(TrainerCallback):  # type: ignore[misc]
        bad = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.bad += 1

    with_bridge(tmp_path, [], Patience()).train()
    assert "training has changed Patience.bad, which no checkpoint contains" in caplog.text


def test_data_that_are_not_skipped_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_until_left(tmp_path, 7)
    verdict = resume(tmp_path, ignore_data_skip=True)
    assert "not resumed exactly: data of step 5 differ: Hugging Face's Trainer" in caplog.text
    assert (verdict.proof.verdict, verdict.proof.what, verdict.proof.differs_at) == ("differs", "data", 5)
    assert "ignore_data_skip" in verdict.proof.why
    assert verdict.reason == "finished"


def test_random_numbers_that_are_not_restored_are_said(tmp_path: Path) -> None:
    train_until_left(tmp_path, 7)
    (tmp_path / "checkpoint-4" / "rng_state.pth").unlink()
    proof = resume(tmp_path).proof
    assert (proof.verdict, proof.what, proof.differs_at) == ("differs", "random numbers", 5)


def test_a_stop_that_was_asked_for(tmp_path: Path) -> None:
    """Logging, saving and evaluating are not due for long: the ranks hear of it at the end of the step."""
    rarely = {"logging_steps": 100, "eval_strategy": "no", "max_steps": 100}
    train_until_left(tmp_path, 7, **rarely)
    for _ in range(2):
        verdict = resume(tmp_path, ignore_data_skip=True, on_resume="stop", **rarely)
        assert (verdict.found, verdict.reason, verdict.ended_at) == (("differs", "data", 5), "aborted", 5)
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert resume(tmp_path, on_resume="stop", **rarely).proof.verdict == "exact"


def test_a_wrong_word_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="on_resume"):
        hf_trainer(tmp_path, Bridge([], on_resume="abort")).train()  # type: ignore[arg-type]


def test_the_first_loss_after_a_resume_between_two_records_is_no_alarm(tmp_path: Path) -> None:
    settings = {"save_steps": 3, "max_steps": 12, "logging_steps": 4}
    train_until_left(tmp_path, 9, **settings)
    whole = resume(tmp_path, **settings).proof
    assert whole.line == "not proven: the leg before recorded no step after the checkpoint"
    train_until_left(tmp_path / "b", 8, **settings)
    proof = resume(tmp_path / "b", **settings).proof
    assert (proof.verdict, proof.first_step, proof.last_step) == ("exact", 7, 8)
    assert "averages the first logged loss since the checkpoint" in proof.line


def test_a_callback_that_forgets_is_said(tmp_path: Path) -> None:
    class Counter(ds.Callback):
        count = 0

        def on_log_step(self, ctx: Any) -> None:
            self.count += 1
            ctx.logs["count"] = self.count

    forgets = Counter()
    trainer = with_bridge(tmp_path, [forgets, JsonLogger()])
    trainer.add_callback(At("on_step_begin", 7, lambda control: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    proof = resume(tmp_path, Counter()).proof
    assert (proof.verdict, proof.what, proof.differs_at) == ("differs", "record", 6)
    assert "count in train.jsonl 5 before, 1 now" in proof.why


def test_a_record_is_no_finding_before_the_steps_up_to_it_are_known(tmp_path: Path) -> None:
    """As where the witness has time for one in two steps only."""
    train_until_left(tmp_path, 7)
    (rows,) = (tmp_path / "witness").glob("step-00000004*")
    kept = [line for line in rows.read_text().splitlines() if '"global_step": 6,' not in line]
    rows.write_text("\n".join(kept))

    def change(control: Any) -> None:
        parameter.data.add_(1e-3)

    verdict = Verdict()
    again = with_bridge(tmp_path, [verdict, JsonLogger()], At("on_step_begin", 5, change))
    parameter = next(again.model.parameters())
    again.train(resume_from_checkpoint=True)
    assert verdict.found == ("differs", "loss", 7)


def test_a_changed_setting_is_the_reason(tmp_path: Path) -> None:
    """Also after several checkpoints, when the rows of the first are gone."""
    train_until_left(tmp_path, 15, max_steps=20)
    proof = resume(tmp_path, max_steps=20, per_device_train_batch_size=2).proof
    assert proof.verdict == "changed"
    assert proof.line == (
        "not repeated bit for bit: data of step 13 differ: per_device_train_batch_size: saved 4, now 2"
    )


def test_steps_of_another_run_in_the_same_folder_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_until_left(tmp_path / "a", 7)
    train_until_left(tmp_path / "b", 7, learning_rate=0.5)
    verdict = Verdict()
    there = tmp_path / "a" / "checkpoint-4"
    hf_trainer(tmp_path / "b", Bridge([verdict], resume_from_checkpoint=there)).train(resume_from_checkpoint=str(there))
    assert verdict.proof.verdict == "not proven"
    assert "not resumed exactly" not in caplog.text


def test_a_leg_that_begins_anew_or_repeats_nothing_has_nothing_to_prove(tmp_path: Path) -> None:
    verdict = Verdict()
    with_bridge(tmp_path, [verdict], max_steps=4).train()
    assert verdict.proof is None
    assert resume(tmp_path).proof.verdict == "not proven"


def test_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(resume_on_a_rank, 2, tmp_path)
    assert first == second
    assert first[0] == "resumed exactly: steps 5 to 7 repeated bit for bit"
    assert first[1].startswith(
        "not resumed exactly: random numbers of step 6 differ: on rank 1, from torch's generator"
    )
