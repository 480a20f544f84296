"""Callbacks written for Cerebras's Model Zoo: its order, what may be changed, state, and the trainer they are given."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks
from interop.script import Broken, play
from support.held_saves import hold_save
from support.listeners import Listener
from support.models import Line
from support.small import same, small_trainer, weights

BATCH_START = ["train_batch_start", "train_step_start"]
PASS = ["before_forward", "after_forward", "before_backward", "after_backward"]
BATCH_END = ["train_step_end", "train_batch_end"]
UPDATE = [
    "before_optimizer_step",
    "after_optimizer_step",
    "before_optimizer_zero_grad",
    "after_optimizer_zero_grad",
    "before_scheduler_step",
    "after_scheduler_step",
]
ONE = [*BATCH_START, *PASS, *UPDATE, *BATCH_END]
TWO = [*BATCH_START, *PASS, *BATCH_END, *ONE]
TRAIN = ["enter_train", "train_start"]
TRAIN_END = ["train_end", "close train"]
STATE = ["save_checkpoint", "postprocess_checkpoint", "save_trainer_state"]
VALIDATION_BATCH = ["validate_batch_start", "validate_step_start", "before_forward", "after_forward"]
VALIDATION_BATCH += ["validate_step_end", "validate_batch_end"]
# Its state is kept in mind before an evaluation, which may be broken off.
VALIDATE = [
    *STATE,
    *TRAIN_END,
    "enter_validate",
    "validate_start",
    *VALIDATION_BATCH * 2,
    "validate_end",
    "close validate",
]
LOAD = ["load_trainer_state", "preprocess_checkpoint", "load_checkpoint"]
SAVE = [*STATE, "after_save_checkpoint"]
SET_UP = ["pre_setup", "setup", "post_setup"]
BEGIN = [*SET_UP, "before_load_checkpoint", "enter_fit", "fit_start"]
END = ["fit_end", "close fit"]


def base() -> Any:
    from cerebras.modelzoo.trainer.callbacks import Callback

    return Callback


def journal() -> Any:
    """A callback that writes down which of its methods are called, and when what it has opened is closed."""

    class Journal(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[str] = []
            self.steps: list[tuple[str, int]] = []
            for name in dir(base()):
                if name.startswith(("on_", "pre", "post", "setup", "finalize", "run_validation")):
                    setattr(self, name, partial(self._write, name.removeprefix("on_")))

        def _write(self, name: str, trainer: Any, *given: Any) -> None:
            self.seen.append(name)
            self.steps.append((name, trainer.global_step))
            if name.startswith("enter_"):
                given[0].callback(self.seen.append, f"close {name.removeprefix('enter_')}")

    return Journal()


# --- the order --------------------------------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    first = [*TRAIN, *TWO, *TWO, *ONE, *VALIDATE]
    second = [*TRAIN, *TWO, *SAVE, *TWO, *ONE, *VALIDATE, *SAVE]
    assert callback.seen == [*BEGIN, *first, *second, *END]


def test_the_count_of_steps_moves_with_the_end_of_a_batch(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    counts = [step for name, step in callback.steps if name == "train_batch_start"]
    assert counts == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert [step for name, step in callback.steps if name == "train_batch_end"] == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    assert [step for name, step in callback.steps if name == "train_step_end"] == counts, "it is the batch that counts"


def test_a_run_that_is_stopped(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback, stop_at=2)
    assert callback.seen == [*BEGIN, *TRAIN, *TWO, *TWO, *SAVE, *TRAIN_END, *END]


def test_a_resumed_run(tmp_path: Path) -> None:
    play(tmp_path, journal(), stop_at=5)
    callback = journal()
    play(tmp_path, callback)
    load = ["before_load_checkpoint", *LOAD]
    rest = [*TRAIN, *ONE, *VALIDATE, *SAVE]
    assert callback.seen == [*SET_UP, *load, "enter_fit", "fit_start", *rest, *END]


def test_an_exception_in_training_is_told_innermost_first(tmp_path: Path) -> None:
    callback = journal()
    with pytest.raises(Broken) as caught:
        play(tmp_path, callback, break_at=1)
    broken = ["close train", "train_exception", "close fit", "fit_exception"]
    seen = [*BEGIN, *TRAIN, *BATCH_START, *PASS, *BATCH_END, *BATCH_START, *PASS, "before_optimizer_step"]
    assert callback.seen == [*seen, *broken]
    assert getattr(caught.value, "__notes__", []) == ["raised in interferer.on_gradients_ready"]


def test_an_exception_in_validation(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        raise Broken("here")

    callback = journal()
    with pytest.raises(Broken):
        play(tmp_path, callback, Listener({"on_prediction_step": fail}))
    assert callback.seen[-4:] == ["close validate", "validate_exception", "close fit", "fit_exception"]
    assert "train_exception" not in callback.seen


def test_an_interrupt_closes_everything_and_is_no_exception(tmp_path: Path) -> None:
    def interrupt(ctx: Any) -> None:
        raise KeyboardInterrupt

    callback = journal()
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, callback, Listener({"on_gradients_ready": interrupt}, name="ctrl-c"))
    assert callback.seen[-2:] == ["close train", "close fit"]


def test_a_fit_that_never_began_has_no_end(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        raise Broken("here")

    callback = journal()
    with pytest.raises(Broken):
        play(tmp_path, Listener({"on_train_begin": fail}), callback)
    assert callback.seen == [*SET_UP, "before_load_checkpoint"]


def test_what_an_exception_hook_raises_hides_nothing(tmp_path: Path) -> None:
    class Clumsy(base()):  # type: ignore[misc]
        def on_train_exception(self, trainer: Any, exception: Exception) -> None:
            raise RuntimeError("and this too")

    callback = journal()
    with pytest.raises(Broken) as caught:
        play(tmp_path, Clumsy(), callback, break_at=1)
    assert "and during teardown: RuntimeError: and this too" in caught.value.__notes__
    assert callback.seen[-1] == "fit_exception"


def test_one_that_comes_later_is_set_up_once(tmp_path: Path) -> None:
    callback = journal()
    trainer = small_trainer(tmp_path, max_steps=1, lr_scheduler_type="constant")
    trainer.add_callback(callback)
    trainer.train()
    trainer.args.max_steps = 2
    trainer.train()
    assert [name for name in callback.seen if name in SET_UP] == SET_UP
    assert callback.seen.count("fit_end") == 2


def test_two_loaders_are_validated_under_their_names(tmp_path: Path) -> None:
    loaders: list[Any] = []

    class Note(base()):  # type: ignore[misc]
        def on_validate_start(self, trainer: Any, model: Any, val_dataloader: Any, loop: Any) -> None:
            loaders.append(val_dataloader)

    sets = {
        "a": [{"x": torch.ones(1, 8), "y": torch.ones(1, 1)}],
        "b": [{"x": torch.ones(1, 8), "y": torch.zeros(1, 1)}],
    }
    parts = {"eval_dataloader": sets}
    small_trainer(tmp_path, Note(), model=Line(), parts=parts, max_steps=1, eval_steps=1).train()
    assert [loader is sets[name] for loader, name in zip(loaders, "ab", strict=True)] == [True, True]


# --- what may be changed ----------------------------------------------------------------------------------------------


class Halves:
    """The page's own example, with another number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_before_backward(self, trainer: Any, model: Any, outputs: Any) -> None:
        outputs["loss"] *= self.value


def test_scaling_the_loss(tmp_path: Path) -> None:
    class ScaleLoss(Halves, base()):  # type: ignore[misc]
        pass

    norms: dict[float, list[float]] = {}
    for value in (1.0, 0.5):
        seen = norms[value] = []
        note = Listener({"on_pre_optimizer_step": lambda ctx, seen=seen: seen.append(ctx.grad_norm)})
        small_trainer(tmp_path / str(value), ScaleLoss(value), note, model=Line(), max_steps=1).train()
    assert norms[0.5][0] == pytest.approx(norms[1.0][0] / 2)


def test_a_loss_put_in_place_of_the_models_after_forward(tmp_path: Path) -> None:
    class NoLoss(base()):  # type: ignore[misc]
        def on_after_forward(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None:
            outputs["loss"] = outputs["loss"] * 0

    trainer = small_trainer(tmp_path, NoLoss(), model=Line(), max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


class Multiplied(Line):
    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x, y) * factor


def change_keyword(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs["factor"] = 0.0


def change_inside(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0]["factor"] = 0.0


def change_batch(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0] = {**args[0], "factor": 0.0}


@pytest.mark.parametrize("change", [change_keyword, change_inside, change_batch])
def test_arguments_of_the_models_call(change: Any, tmp_path: Path) -> None:
    class Change(base()):  # type: ignore[misc]
        def on_before_forward(self, trainer: Any, model: Any, batch: Any, args: Any, kwargs: Any) -> None:
            assert args == [batch]
            change(args, kwargs)

    trainer = small_trainer(tmp_path, Change(), model=Multiplied(), max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_that_is_a_list(kind: Any, tmp_path: Path) -> None:
    class Change(base()):  # type: ignore[misc]
        def on_before_forward(self, trainer: Any, model: Any, batch: Any, args: Any, kwargs: Any) -> None:
            assert type(batch) is kind
            args[0] = kind([batch[0], batch[1], 0.0])

    loader = [kind([torch.ones(2, 8), torch.ones(2, 1)])]
    parts = {"train_dataset": None, "train_dataloader": loader}
    trainer = small_trainer(tmp_path, Change(), model=Multiplied(), parts=parts, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert same(before, weights(trainer))


def test_checking_the_loss_ends_the_run(tmp_path: Path) -> None:
    class CheckLoss(base()):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not torch.isfinite(outputs["loss"]):
                raise FloatingPointError(f"step {trainer.global_step}, batch {batch_idx}: no number")

    def spoil(ctx: Any) -> None:
        if ctx.state.global_step == 1:
            ctx.outputs["loss"] = ctx.outputs["loss"] * math.nan

    spoiler = Listener({"on_before_backward": spoil})
    with pytest.raises(FloatingPointError, match="step 2, batch 1: no number") as caught:
        small_trainer(tmp_path, CheckLoss(), spoiler, max_steps=4).train()
    assert caught.value.__notes__ == ["raised in CheckLoss.on_train_batch_end"]


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_norms_are_in_the_records(tmp_path: Path) -> None:
    """What is logged in a step is in its record; at a step without one it goes nowhere, as at home."""

    class ComputeNorm(base()):  # type: ignore[misc]
        def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
            trainer.log_metrics(model_wise_grad_norm=norms.norm())

        def on_validate_step_end(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None:
            with trainer.name_scope("validate"):
                trainer.log_metrics(newest_loss=outputs["loss"])

        def on_validate_end(self, trainer: Any, model: Any, loop: Any) -> None:
            trainer.log_metrics(validated=1)

    play(tmp_path, ComputeNorm(), JsonLogger(), max_grad_norm=0.5)
    records = list(read_records(tmp_path / "logs" / "train.jsonl"))
    training = [record for record in records if "loss" in record]
    assert [record["global_step"] for record in training] == [2, 4, 6]
    assert all(record["model_wise_grad_norm"] > 0 for record in training)
    evaluations = [record for record in records if record.get("kind") == "eval"]
    assert all("validate/newest_loss" in record for record in evaluations)
    assert [(record["global_step"], record["validated"]) for record in evaluations] == [(3, 1), (6, 1)]
    assert not [record for record in records if record.get("kind") == "user"]


def test_the_names_that_callbacks_use(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(base()):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
            seen.update(names=list(trainer.callbacks), found=trainer.get_callback(Look), mine=self)
            seen.update(name=trainer.get_callback_name(self), none=trainer.get_callback(int))
            seen.update(folder=trainer.model_dir, device=trainer.backend.torch_device, csx=trainer.backend.is_csx)
            seen.update(loop=loop is trainer.loop, steps=loop.max_steps, accumulates=loop.grad_accum_steps)
            seen.update(logger=trainer.logger.name, total=loop.total_steps, precision=trainer.precision)
            seen.update(model=trainer.model, optimizer=trainer.optimizer, schedulers=len(trainer.schedulers))

        def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            seen.setdefault("first", []).append(trainer.is_first_iteration)

    trainer = small_trainer(tmp_path, Look(), max_steps=3)
    trainer.train()
    assert seen["names"] == ["cerebras", "Look"]
    assert seen["found"] is seen["mine"]
    assert (seen["name"], seen["none"]) == ("Look", None)
    assert (seen["folder"], seen["device"], seen["csx"]) == (tmp_path, torch.device("cpu"), False)
    assert (seen["loop"], seen["steps"], seen["total"], seen["accumulates"]) == (True, 3, 3, 1)
    assert (seen["logger"], seen["precision"], seen["schedulers"]) == ("dalsegno", None, 1)
    assert seen["model"] is trainer.model
    assert seen["first"] == [True, False, False]


def test_the_trainer_is_at_the_step_of_a_checkpoint_that_is_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []

    class Upload(base()):  # type: ignore[misc]
        def on_after_save_checkpoint(self, trainer: Any, ckpt_path: str) -> None:
            assert ckpt_path.startswith(str(tmp_path))
            seen.append((trainer.global_step, Path(ckpt_path).name))

    small_trainer(tmp_path, hold_save(monkeypatch, 2, until=4), Upload(), max_steps=6, save_steps=2).train()
    assert seen[0] == (2, "step-00000002")


@pytest.mark.parametrize(
    ("ask", "complaint"),
    [
        (
            lambda trainer: trainer.compile,
            "trainer.compile: dalsegno has no counterpart of it; available: ",
        ),
        (lambda trainer: trainer.backend.cluster, "trainer.backend.cluster: dalsegno has no counterpart of it"),
        (lambda trainer: trainer.loop.csx, "trainer.loop.csx: dalsegno has no counterpart of it"),
        (lambda trainer: trainer.schedule.batches_remaining, "trainer.schedule.batches_remaining: the length of the"),
    ],
)
def test_any_other_name_is_an_error_that_names_it(ask: Any, complaint: str, tmp_path: Path) -> None:
    class Ask(base()):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
            assert not hasattr(trainer, "sparsity")
            ask(trainer)

    parts = {"train_dataset": None, "train_dataloader": iter([])}
    with pytest.raises(AttributeError) as caught:
        small_trainer(tmp_path, Ask(), parts=parts, lr_scheduler_type="constant").train()
    assert str(caught.value).startswith(complaint)
    assert caught.value.__notes__ == ["raised in Ask.on_fit_start"]


def test_an_early_exit_saves_and_lasts_for_one_fit(tmp_path: Path) -> None:
    class Enough(base()):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
            if trainer.global_step == 0:
                trainer.early_exit.register(lambda last: trainer.global_step >= last, 2)
                trainer.early_exit.register(lambda: True).remove()

    trainer = small_trainer(tmp_path, Enough(), max_steps=4, save_steps=10)
    result = trainer.train()
    assert (result.reason, result.global_step, result.stopped_by) == ("stopped", 2, "early_exit")
    assert result.checkpoint is not None and result.checkpoint.name == "step-00000002"
    assert trainer.train().reason == "finished"


def test_flags_that_are_set_for_a_stretch_are_put_back_after_an_exception(tmp_path: Path) -> None:
    flags = {"debug": False}

    @contextmanager
    def scoped() -> Iterator[None]:
        flags["debug"] = True
        try:
            yield
        finally:
            flags["debug"] = False

    class ScopedTrainFlags(base()):  # type: ignore[misc]
        def on_enter_train(self, trainer: Any, stack: Any, train_dataloader: Any, loop: Any, loop_idx: int) -> None:
            stack.enter_context(scoped())

    inside: list[bool] = []
    note = Listener({"on_step_begin": lambda ctx: inside.append(flags["debug"])})
    with pytest.raises(Broken):
        play(tmp_path, ScopedTrainFlags(), note, break_at=2)
    assert inside == [True, True]
    assert flags == {"debug": False}


# --- state ------------------------------------------------------------------------------------------------------------


class Seen:
    """Counts batches in the checkpoint, and keeps the newest loss in the trainer's state."""

    def __init__(self) -> None:
        self.batches = 0
        self.loss = 0.0

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.loss = outputs["loss"].item()
        trainer.log_metrics(batches=self.batches, former=self.loss)

    def on_save_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["batches"] = self.batches

    def on_load_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]

    def on_save_trainer_state(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict[trainer.get_callback_name(self)] = self.loss

    def on_load_trainer_state(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self.loss = state_dict[trainer.get_callback_name(self)]


def counting(output_dir: Path) -> ds.Trainer:
    both = [ds.adapt(Seen(), "cerebras", name=name) for name in ("one", "two")]
    settings = {"max_steps": 12, "logging_steps": 1, "save_steps": 4, "gradient_accumulation_steps": 2}
    return small_trainer(output_dir, *both, JsonLogger(), **settings)


def test_state_survives_a_kill(tmp_path: Path) -> None:
    assert_resume_equivalent(counting, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)


def test_state_belongs_to_the_callback_and_not_to_its_place(tmp_path: Path) -> None:
    class First(Seen, base()):  # type: ignore[misc]
        pass

    class Second(Seen, base()):  # type: ignore[misc]
        pass

    small_trainer(tmp_path, First(), max_steps=2, save_steps=2).train()
    second, first = Second(), First()
    small_trainer(tmp_path, second, first, max_steps=4, save_steps=2).train()
    assert (first.batches, second.batches) == (4, 2)


# --- everywhere -------------------------------------------------------------------------------------------------------


def test_an_adapted_callback_is_global_inside_with(tmp_path: Path) -> None:
    callback = Seen()
    trainer = small_trainer(tmp_path / "inside", max_steps=3)
    with ds.adapt(callback, "cerebras"):
        trainer.train()
    small_trainer(tmp_path / "after", max_steps=4).train()
    assert callback.batches == 3


def test_a_handle_lets_go(tmp_path: Path) -> None:
    callback = type("Counted", (Seen, base()), {})()
    handle = ds.register_global_callback(callback)
    small_trainer(tmp_path / "held", max_steps=2).train()
    handle.remove()
    small_trainer(tmp_path / "gone", max_steps=2).train()
    assert callback.batches == 2


def test_what_cerebras_holds_globally_is_global_here(tmp_path: Path) -> None:
    """``with callback:``, where that is the library's own."""
    callback = type("Counted", (Seen, base()), {})()
    with callback:
        small_trainer(tmp_path / "inside", max_steps=3).train()
    small_trainer(tmp_path / "after", max_steps=4).train()
    assert callback.batches == 3


def test_users_callbacks_come_before_global_ones(tmp_path: Path) -> None:
    order: list[str] = []

    def starts(name: str) -> Any:
        return type(name, (base(),), {"on_fit_start": lambda self, *given: order.append(name)})()

    trainer = small_trainer(tmp_path, starts("ComputeNorm"), starts("Other"), max_steps=1)
    with starts("CheckLoss"):
        trainer.train()
    assert order == ["ComputeNorm", "Other", "CheckLoss"]


# --- stops and ranks --------------------------------------------------------------------------------------------------


def test_a_validation_that_is_broken_off_is_closed_and_done_by_the_next_leg(tmp_path: Path) -> None:
    first, second = journal(), journal()
    stop = Listener({"on_prediction_step": lambda ctx: signal.raise_signal(signal.SIGTERM)})
    assert play(tmp_path, first, stop).reason == "stopped"
    batch = VALIDATION_BATCH
    assert first.seen[-10:] == [*batch[-2:], *LOAD, *SAVE, "close validate", *END][-10:]
    assert first.seen.count("close validate") == 1
    play(tmp_path, second)
    begin = [*SET_UP, "before_load_checkpoint", *LOAD, "enter_fit", "fit_start", *STATE, "enter_validate"]
    assert second.seen[: len(begin)] == begin


class CountsBatches:
    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def on_save_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["batches"] = self.batches

    def on_load_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def count_on_a_rank(output_dir: Path, stop_at: int | None) -> int:
    callback = CountsBatches()
    play(output_dir, ds.adapt(callback, "cerebras"), stop_at=stop_at, per_device_train_batch_size=2)
    return callback.batches


def test_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(count_on_a_rank, 2, tmp_path, 4) == [7, 7]
    assert run_ranks(count_on_a_rank, 2, tmp_path, None) == [10, 10]
