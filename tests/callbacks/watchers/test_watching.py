"""Callbacks that end a run: at the right step, on all ranks, with a reason that says where to look."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.layouts import layout_trainer
from dalsegno.callbacks import (
    CheckLoss,
    DivergenceDetector,
    EarlyStopping,
    HangWatchdog,
    NaNChecker,
)
from dalsegno.checkpoint import Checkpoint
from dalsegno.distributed import collectives
from dalsegno.testing import run_ranks, start_ranks, tiny_regression_data
from support.listeners import Listener
from support.resumed import assert_resumes
from support.small import arguments, small_trainer

# --- CheckLoss and NaNChecker: a number that is none -----------------------------------------------------------------


def broken_at(step: int, index: int, rank: int = 0) -> ds.Callback:
    """Makes the loss of that micro-batch NaN, on that rank."""

    def on_before_backward(ctx: Any) -> None:
        seen["index"] = seen["index"] + 1 if seen["step"] == ctx.state.global_step else 0
        seen["step"] = ctx.state.global_step
        if (ctx.state.global_step + 1, seen["index"], collectives.rank()) == (step, index, rank):
            ctx.outputs["loss"] = ctx.outputs["loss"] * float("nan")

    seen = {"step": -1, "index": 0}
    return Listener({"on_before_backward": on_before_backward}, name="breaker")


def train_broken(output_dir: Path, layout: str, rank: int) -> tuple[int, str, str | None, str | None]:
    result = layout_trainer(output_dir, layout, [broken_at(3, 1, rank), CheckLoss()], save_steps=6).train()
    return result.global_step, result.reason, result.why, result.stopped_by


@pytest.mark.parametrize(("layout", "world_size", "rank"), [("none", 1, 0), ("ddp", 2, 1), ("fsdp", 2, 0)])
def test_a_broken_loss_ends_the_run_on_all_ranks(tmp_path: Path, layout: str, world_size: int, rank: int) -> None:
    """At the next step that logs; the reason names the first broken one. No checkpoint is written of it."""
    ended = run_ranks(train_broken, world_size, tmp_path, layout, rank)
    why = f"the loss is nan in micro-batch 1 (from 0) of step 3 on rank {rank}"
    assert ended == [(4, "aborted", why, "CheckLoss")] * world_size
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())


def test_no_checkpoint_is_written_of_a_broken_loss(tmp_path: Path) -> None:
    result = small_trainer(tmp_path, broken_at(4, 0), CheckLoss(), max_steps=9, save_steps=3).train()
    assert (result.global_step, result.reason) == (6, "aborted")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    mended = small_trainer(tmp_path, CheckLoss(), max_steps=9, save_steps=3)
    assert mended.train(continue_stopped=True).reason == "finished"


def send(ctx: Any) -> None:
    if ctx.step == 4:
        os.kill(os.getpid(), signal.SIGTERM)


SAVES_THAT_NOBODY_FORESEES: dict[str, tuple[list[ds.Callback], dict[str, Any]]] = {
    "signal": ([Listener({"on_step_end": send}, name="sender")], {"save_steps": 100}),
    "clock": ([], {"save_steps": 500, "save": ds.Every(seconds=1e-9)}),
}


@pytest.mark.parametrize("what", SAVES_THAT_NOBODY_FORESEES)
@pytest.mark.parametrize("checker", [CheckLoss, NaNChecker])
def test_nor_one_that_comes_out_of_turn(tmp_path: Path, what: str, checker: type[ds.Callback]) -> None:
    """The last checkpoint of a run that is asked to end, or one that is due by the clock: between two records."""
    sender, settings = SAVES_THAT_NOBODY_FORESEES[what]
    own = [broken_at(4, 0), checker(), *sender]
    result = small_trainer(tmp_path, *own, max_steps=9, logging_steps=100, **settings).train()
    assert (result.global_step, result.reason, result.stopped_by) == (4, "aborted", checker.__name__)
    assert "of step 4" in (result.why or "") or "first in step 4" in (result.why or "")
    assert result.checkpoint == (tmp_path / "checkpoints/step-00000003" if what == "clock" else None)
    assert not (tmp_path / "checkpoints/step-00000004").exists()


def ask_to_end(output_dir: Path) -> tuple[int, str, str | None, str | None]:
    def ask(ctx: Any) -> None:
        if ctx.step == 3 and collectives.rank() == 0:
            ctx.control.stop("enough")

    own = [broken_at(3, 1, rank=1), CheckLoss(), Listener({"on_step_end": ask}, name="asking")]
    result = layout_trainer(output_dir, "ddp", own, logging_steps=100, save_steps=100, eval_steps=0).train()
    return result.global_step, result.reason, result.why, result.stopped_by


def test_all_ranks_call_a_save_off(tmp_path: Path) -> None:
    why = "the loss is nan in micro-batch 1 (from 0) of step 3 on rank 1"
    assert run_ranks(ask_to_end, 2, tmp_path) == [(3, "aborted", why, "CheckLoss")] * 2
    assert not list(tmp_path.glob("checkpoints/step-*"))


class Fragile(nn.Module):
    """Its middle breaks down where it is told to: on the way there, or on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 4), Breaking(), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.middle(self.first(x))), y)


class Breaking(nn.Module):
    how = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "output":
            return x / 0.0
        if self.how == "output in place":
            return x.div_(0.0)  # the tensor that has just been looked at
        return Backwards.apply(x) if self.how == "gradient" else x  # type: ignore[no-any-return]


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("output", "the output of middle"),
        ("output in place", "the output of middle"),
        ("gradient", "the gradient of the output of first"),
    ],
)
def test_the_first_module_that_breaks_is_named(tmp_path: Path, how: str, where: str) -> None:
    model = Fragile()

    def on_step_begin(ctx: Any) -> None:
        model.middle.how = how if ctx.state.global_step >= 4 else ""

    breaker = Listener({"on_step_begin": on_step_begin}, name="breaker")
    trainer = small_trainer(tmp_path, breaker, NaNChecker(), model=model, max_steps=20, logging_steps=3)
    result = trainer.train()
    assert (result.global_step, result.reason) == (6, "aborted")
    assert result.why == f"{where} is not finite, first in step 5, on rank 0"
    assert not model.middle._forward_hooks


class Spectral(nn.Module):
    """Filters frequencies: an output, a weight and their gradients are complex; another output is float8."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.narrow, self.last = Transform(), Narrow(), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        filtered = torch.fft.irfft(self.transform(x), 8)
        self.narrow(filtered)
        return nn.functional.mse_loss(self.last(filtered), y)


class Transform(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).conj() * self.weight * self.gain


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach().to(torch.float8_e5m2)


def test_complex_and_float8_outputs_are_checked(tmp_path: Path) -> None:
    model = Spectral()

    def on_step_begin(ctx: Any) -> None:
        model.transform.gain = math.inf if ctx.state.global_step >= 4 else 1.0

    breaker = Listener({"on_step_begin": on_step_begin}, name="breaker")
    result = small_trainer(tmp_path, breaker, NaNChecker(), model=model, max_steps=9, logging_steps=3).train()
    assert result.why == "the output of transform is not finite, first in step 5, on rank 0"


class ThroughWeight(torch.autograd.Function):
    """x·w, whose way back breaks for w alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight, x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weight, x = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0) * math.nan


class Scale(nn.Module):
    is_broken = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return ThroughWeight.apply(x, self.weight) if self.is_broken else x * self.weight  # type: ignore[no-any-return]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 8), Scale(), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.scale(self.first(x))), y)


def train_with_a_broken_weight(output_dir: Path, parallel: str) -> tuple[int, str, str | None]:
    """From step 5 on, on the last rank."""
    torch.manual_seed(0)
    model = Scaled()

    def on_step_begin(ctx: Any) -> None:
        model.scale.is_broken = ctx.state.global_step >= 4 and collectives.rank() == collectives.world_size() - 1

    own = [Listener({"on_step_begin": on_step_begin}, name="breaker"), NaNChecker()]
    args = arguments(output_dir, max_steps=20, logging_steps=3, parallel=parallel, max_grad_norm=1.0)
    result = ds.Trainer(model, args, train_dataset=tiny_regression_data(20), callbacks=own).train()
    return result.global_step, result.reason, result.why


@pytest.mark.parametrize(("parallel", "world_size"), [("none", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_weight_whose_gradient_alone_breaks_is_named(tmp_path: Path, parallel: str, world_size: int) -> None:
    """Not the first module, whose weights clipping has spread it to."""
    where = "on rank 0" if world_size == 1 else "over all ranks"
    why = f"the gradient of weights scale.weight is not finite, first in step 5, {where}"
    assert run_ranks(train_with_a_broken_weight, world_size, tmp_path, parallel) == [(6, "aborted", why)] * world_size


# --- no callback at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logging_steps", [2, 0])
def test_a_loss_that_nobody_watches_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logging_steps: int
) -> None:
    """Once when a record shows it, and at the end of the run."""
    small_trainer(tmp_path, broken_at(3, 0), max_steps=9, logging_steps=logging_steps).train()
    messages = [text for text in caplog.messages if "the loss" in text or "the mean loss" in text]
    assert len(messages) == (2 if logging_steps else 1)
    if logging_steps:
        assert messages[0].startswith("the loss is nan in the record of step 4")
        assert "since the record of step 4" in messages[1]
    assert "the run is at its end, but" in messages[-1]


def test_whoever_watches_it_says_so_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path, broken_at(3, 0), CheckLoss(), max_steps=9, logging_steps=2).train()
    assert not [text for text in caplog.messages if "the loss" in text or "the mean loss" in text]


@pytest.mark.parametrize("keep", [{"save_total_limit": 1}, {"keep": ds.Latest(2)}])
def test_no_good_checkpoint_is_deleted_for_a_broken_one(tmp_path: Path, keep: dict[str, Any]) -> None:
    small_trainer(tmp_path, broken_at(5, 0), max_steps=10, save_steps=2, **keep).train()
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == ([4, 10] if "save_total_limit" in keep else [2, 4, 10])
    assert [Checkpoint.open(path).manifest.finite for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        step < 5 for step in steps
    ]


def train_in_shards(output_dir: Path) -> None:
    layout_trainer(output_dir, "fsdp", [broken_at(5, 0, rank=1)], save_steps=1, save_total_limit=1).train()


def test_nor_of_one_in_shards(tmp_path: Path) -> None:
    run_ranks(train_in_shards, 2, tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000004", "step-00000008"}


@pytest.mark.parametrize("metric", ["loss", "eval_loss"])
def test_a_diverged_run_keeps_its_last_good_checkpoint(tmp_path: Path, metric: str) -> None:
    """NaN ends it without a checkpoint, whatever action says; so a resume begins with good weights."""
    settings = {"max_steps": 9, "logging_steps": 1, "eval_steps": 1, "save_steps": 2, "save_total_limit": 1}
    parts = {"eval_dataset": tiny_regression_data(4)}
    own = [broken_at(5, 0), DivergenceDetector(metric_key=metric, action="stop")]
    result = small_trainer(tmp_path, *own, parts=parts, **settings).train()
    assert (result.global_step, result.reason, result.stopped_by) == (5, "aborted", "DivergenceDetector")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]
    mended = small_trainer(tmp_path, DivergenceDetector(metric_key=metric), parts=parts, **settings)
    again = mended.train(continue_stopped=True)
    assert (again.global_step, again.reason) == (9, "finished")


def test_an_infinite_norm_that_fp16_skips_is_no_divergence(tmp_path: Path) -> None:
    norms: list[float] = []
    note = Listener({"on_log": lambda ctx: norms.append(ctx.logs["max_grad_norm"]) if ctx.kind == "train" else None})
    spoil = Listener({"on_gradients_ready": spoil_gradients}, name="spoiler")
    own = [spoil, DivergenceDetector(metric_key="max_grad_norm", threshold=1e9), note]
    result = small_trainer(tmp_path, *own, max_steps=6, logging_steps=2, fp16=True).train()
    assert (result.global_step, result.reason) == (6, "finished")
    assert not math.isfinite(norms[0]) and math.isfinite(norms[-1])


def spoil_gradients(ctx: Any) -> None:
    """As if the first scale were too large."""
    if ctx.state.global_step == 0:
        next(ctx.model.parameters()).grad.fill_(math.inf)


def test_a_compiled_model_cannot_be_looked_into(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, NaNChecker(), max_steps=2, torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(ds.ConfigurationError, match="torch_compile=False"):
        trainer.train()


# --- EarlyStopping ----------------------------------------------------------------------------------------------------


def scored(output_dir: Path, scores: list[float], *own: ds.Callback, **settings: Any) -> ds.Trainer:
    """A run whose evaluations, one at each step, measure these."""

    def on_log_step(ctx: Any) -> None:
        if ctx.kind == "eval":
            ctx.logs["eval_score"] = scores[ctx.state.global_step - 1]

    script = Listener({"on_log_step": on_log_step}, name="script")
    parts = {"eval_dataset": tiny_regression_data(4)}
    given = {"max_steps": len(scores), "eval_steps": 1, "save_steps": 100, **settings}
    return small_trainer(output_dir, script, *own, parts=parts, **given)


@pytest.mark.parametrize(
    ("scores", "settings", "stops"),
    [
        ([5, 4, 3, 3, 3, 3, 3], {"patience": 3}, 6),
        ([5, 4, 3, 3.5, 2.9, 3, 3, 3, 3], {"patience": 3}, 8),
        ([5, 4.9, 4.8, 4.7, 4.0, 3.9], {"patience": 2, "min_delta": 0.5}, 3),
        ([1, 2, 3, 2, 2, 2], {"patience": 2, "mode": "max"}, 5),
        ([math.nan, math.nan, 1, 1], {"patience": 2}, 2),
        ([1, math.nan, math.nan, 1], {"patience": 2}, 3),
        ([3, 2, 1, 0, -1], {"patience": 1}, None),
    ],
)
def test_it_stops_when_nothing_gets_better(
    tmp_path: Path, scores: list[float], settings: dict[str, Any], stops: int | None
) -> None:
    result = scored(tmp_path, scores, EarlyStopping("score", **settings)).train()
    assert (result.global_step, result.reason) == ((len(scores), "finished") if stops is None else (stops, "stopped"))
    if stops is not None:
        assert result.stopped_by == "EarlyStopping" and "eval_score" in (result.why or "")
        assert result.checkpoint is not None


def test_its_counter_survives_a_resume(tmp_path: Path) -> None:
    """Stopped by somebody else when two of three bad ones had been seen: the third stops it."""
    scores = [5.0, 4, 4, 4, 4, 4, 4, 4]
    stopper = Listener(
        {"on_step_end": lambda ctx: (ctx.step == 4 and ctx.control.stop("mid-way")) or None}, name="stopper"
    )
    assert scored(tmp_path, scores, EarlyStopping("score"), stopper).train().global_step == 4
    result = scored(tmp_path, scores, EarlyStopping("score")).train()
    assert (result.global_step, result.stopped_by) == (5, "EarlyStopping")


def test_a_run_that_it_has_stopped_has_its_patience_again(tmp_path: Path) -> None:
    scores = [1.0] * 12
    assert scored(tmp_path, scores, EarlyStopping("score")).train().global_step == 4
    assert scored(tmp_path, scores, EarlyStopping("score")).train(continue_stopped=True).global_step == 7


def test_a_metric_that_nobody_measures(tmp_path: Path) -> None:
    with pytest.raises(ds.UnknownName, match="'eval_scor'; did you mean 'eval_score'"):
        scored(tmp_path, [1.0] * 4, EarlyStopping("scor")).train()


def build_scored(output_dir: Path, *own: ds.Callback) -> ds.Trainer:
    return scored(output_dir, [5, 4, 4, 3, 3.5, 3, 2, 2], EarlyStopping("score", patience=3), *own)


def test_resumed_anywhere_it_is_the_same(tmp_path: Path) -> None:
    assert_resumes(build_scored, tmp_path, 3, 5)


# --- HangWatchdog -----------------------------------------------------------------------------------------------------


def hang(output_dir: Path) -> None:
    """Rank 1 stops for ever in the middle of a step; rank 0 waits for it in a collective."""
    watchdog = HangWatchdog()

    def on_before_backward(ctx: Any) -> None:
        if ctx.state.global_step == 2:
            watchdog._seconds = 3.0  # not before: a busy machine may take longer than that to begin
            watchdog._arm()
            if collectives.rank() == 1:
                wait_for_nothing()

    layout_trainer(output_dir, "ddp", [Listener({"on_before_backward": on_before_backward}), watchdog]).train()


def wait_for_nothing() -> None:
    import threading

    threading.Event().wait()


def test_a_run_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    outcomes = start_ranks(hang, 2, tmp_path).wait()
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    stuck = (tmp_path / "logs" / "hang-rank-00001.txt").read_text()
    assert "wait_for_nothing" in stuck
    waiting = tmp_path / "logs" / "hang-rank-00000.txt"  # unless its peer's end has reached it as an error before
    assert "backward" in (waiting.read_text() if waiting.exists() else outcomes[0].error or "")


def test_a_run_that_does_not_hang_leaves_nothing(tmp_path: Path) -> None:
    assert small_trainer(tmp_path, HangWatchdog(60.0), max_steps=5).train().reason == "finished"
    assert not list(tmp_path.rglob("hang-*"))


def test_where_a_leg_hung_can_be_read_after_the_next_one(tmp_path: Path) -> None:
    """Whoever started it starts it again at once."""
    (tmp_path / "logs").mkdir()
    stacks = tmp_path / "logs/hang-rank-00000.txt"
    stacks.write_text("Timeout!\n")
    small_trainer(tmp_path, HangWatchdog(60.0), max_steps=5).train()
    assert stacks.read_text() == "Timeout!\n"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EarlyStopping(patience=0), "EarlyStopping: patience=0; needs an integer of at least 1"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta=-1; needs a finite number of at least 0"),
        (lambda: EarlyStopping(mode="mxa"), "unknown EarlyStopping: mode 'mxa'; did you mean 'max'"),  # type: ignore[arg-type]
        (lambda: HangWatchdog(0), "HangWatchdog: seconds=0; needs a finite number over 0"),
        (lambda: NaNChecker(gradients=None), "gradients=None; allowed are True and False"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(build: Any, message: str) -> None:
    with pytest.raises(ds.DalsegnoError, match=message):
        build()
