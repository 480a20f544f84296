"""What the training changes beside tensors and hyperparameters: modes, frozen parameters, attributes, groups."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from dalsegno.callbacks import EMA
from dalsegno.checkpoint import Checkpoint, saved_states
from dalsegno.distributed import collectives
from dalsegno.errors import StateMismatch
from dalsegno.testing import DataOrder, TinyRegression, compare_runs, run_ranks
from support.flagged import CHANGES, Flagged, add_group, at_step, flagged, train
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.resumed import assert_resumes, stop_after
from support.rolling import Sniffer, rolling, samples_of_step
from support.small import same, small_trainer, weights


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_callback_changes_is_as_in_an_uninterrupted_run(tmp_path: Path, what: str) -> None:
    assert_resumes(partial(flagged, what=what), tmp_path, 5, 8)


@pytest.mark.parametrize("what", ["a mode", "thawed", "a group"])
def test_the_next_leg_of_the_same_process_has_it_too(tmp_path: Path, what: str) -> None:
    whole = flagged(tmp_path / "whole", what=what)
    whole.train()
    parts = flagged(tmp_path / "parts", what=what, max_steps=10)
    stopper = stop_after(5)
    parts.add_callback(stopper)
    assert parts.train().global_step == 5
    parts.remove_callback(stopper)
    assert parts.train().global_step == 10
    assert same(weights(whole), weights(parts))


def test_what_a_handler_of_on_train_begin_did_in_the_first_leg_only(tmp_path: Path) -> None:
    def freeze(ctx: Any) -> None:
        if ctx.resumed_from is None:
            ctx.model.norm.eval()
            ctx.model.first.requires_grad_(False)

    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        return flagged(folder, Listener({"on_train_begin": freeze}, name="Begin"), *callbacks, what="an attribute")

    assert_resumes(build, tmp_path, 5)


def test_what_a_handler_of_on_train_begin_prepares_for_a_new_run_is_as_it_became(tmp_path: Path) -> None:
    def freeze(ctx: Any) -> None:
        ctx.model.first.requires_grad_(False)

    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        thaw = at_step(4, lambda ctx: ctx.model.first.requires_grad_(True))
        thaw.name = "Thaw"
        return flagged(folder, Listener({"on_train_begin": freeze}, name="Begin"), thaw, *callbacks)

    assert_resumes(build, tmp_path, 5)


def flags_at(folder: Path, step: int) -> Any:
    return saved_states(Checkpoint.open(folder / f"checkpoints/step-{step:08}"))["flags"]


def test_only_what_has_changed_is_saved_so_that_a_change_of_the_script_counts(tmp_path: Path) -> None:
    def build(p: float, *callbacks: Any) -> ds.Trainer:
        trainer = flagged(tmp_path, *callbacks)
        trainer.model.get_submodule("dropout").p = p  # type: ignore[assignment]
        return trainer

    build(0.1, stop_after(5)).train()
    trainer = build(0.4)
    trainer.train()
    assert trainer.model.get_submodule("dropout").p == 0.4
    assert not trainer.model.get_submodule("norm").training


def test_what_a_rollback_goes_back_to(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def look(ctx: Any) -> None:
        seen.append((ctx.step, next(ctx.model.parameters()).requires_grad))

    changes = at_step(6, lambda ctx: next(ctx.model.parameters()).requires_grad_(False))
    rolling(tmp_path, changes, Listener({"on_step_end": look}, name="Look"), Sniffer(samples_of_step(10))).train()
    assert [trained for step, trained in seen if step == 5] == [True, True]
    assert [trained for step, trained in seen if step == 7] == [False, False]


class OwnFlagged(OwnLoop):
    """Puts the model into training mode before its loop, as scripts do, and evaluates in the other mode. Trains a
    second one, which counts its calls and has a buffer that is not saved."""

    def __init__(self, output_dir: Path, *callbacks: ds.Callback, **settings: object) -> None:
        super().__init__(output_dir, *callbacks, **settings)
        self.model: Any = Flagged()
        self.second = Flagged()
        self.second.growth = 1.1
        self.optimizer: Any = torch.optim.Adam([*self.model.parameters(), *self.second.parameters()], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [10, 20])

    def run(self, state: Mapping[str, Any] | None = None) -> ds.Run:
        return super().run({"second": self.second})

    def update(self, batch: dict[str, Tensor]) -> Tensor:
        self.second(**batch).backward()
        return super().update(batch)

    def train(self) -> ds.TrainResult | None:
        with self.run() as run:
            self.model.train()
            for batch in run.batches():
                run.step_end(loss=self.update(batch))
        return run.result

    def evaluate(self) -> dict[str, float]:
        was_training = self.model.norm.training
        losses = super().evaluate()
        self.model.norm.train(was_training)
        return losses


def test_in_a_loop_of_ones_own_that_sets_the_mode_itself(tmp_path: Path) -> None:
    settings = {"max_steps": 12, "save_steps": 50}

    def freeze(ctx: Any) -> None:
        ctx.model.norm.eval()
        ctx.model.dropout.p = 0.5

    def run(folder: str, *callbacks: ds.Callback) -> None:
        change = at_step(3, freeze)
        OwnFlagged(tmp_path / folder, change, *callbacks, **settings).train()

    run("whole")
    run("parts", stop_after(7))
    run("parts")
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"
    assert "model.first" not in flags_at(tmp_path / "whole", 12)  # its mode is the script's


class Lazy(nn.Module):
    """Makes what it needs in its first forward pass, and marks that."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.is_initialized = False
        self.length = 0
        self.cache: Tensor | None = None
        self.shared: list[Any] = [object()]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.is_initialized:
            self.shared[0] = torch.ones(8)
            self.is_initialized = True
        if self.length < 8:
            self.cache = torch.ones(8)
            self.length = 8
        assert self.cache is not None
        return nn.functional.mse_loss(self.layer(x * self.cache * self.shared[0]), y)


def test_what_a_module_makes_in_each_leg_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        torch.manual_seed(0)
        return small_trainer(folder, *callbacks, model=Lazy(), max_steps=8, save_steps=100, length=40)

    assert_resumes(build, tmp_path, 5)
    assert "uninterrupted" not in caplog.text


class Backboned(nn.Module):
    """Its checkpoints shall not contain the backbone, which is frozen, but for what its normalization counts."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.backbone(x)
        self.backbone.eval()  # so that what was counted before matters
        loss = nn.functional.mse_loss(self.layer(self.backbone(x)), y)
        self.backbone.train()
        return loss

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        return {name: each for name, each in whole.items() if not name.startswith("backbone.")}


def test_buffers_that_the_state_dict_of_a_model_omits_go_on(tmp_path: Path) -> None:
    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        torch.manual_seed(0)
        return small_trainer(folder, *callbacks, model=Backboned(), max_steps=8, save_steps=100, length=40)

    assert_resumes(build, tmp_path, 5)


class LargeUnsaved(nn.Module):
    """Changes two megabytes that no checkpoint contains."""

    table: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("table", torch.zeros(1 << 19), persistent=False)
        self.register_buffer("mask", torch.zeros(1 << 19), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.table[: x.shape[1]] += x.sum(0)
        self.mask = self.mask.clone()  # the same values
        return nn.functional.mse_loss(self.layer(x + self.table[: x.shape[1]]), y)


def test_a_large_unsaved_buffer_that_changes_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path, model=LargeUnsaved(), max_steps=8, save_steps=2, length=40).train()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "the training changes model.table (2.1 MB), which no checkpoint contains" in warning


def warnings_where_rank_one_changes(folder: Path) -> list[str]:
    """What each rank logs of a megabyte that only rank 1 changes, as a stage of a pipeline may."""
    model, lines = TinyRegression(), list[str]()
    model.table = torch.zeros(1 << 19)
    change = {"on_step_end": lambda ctx: setattr(model, "table", model.table + collectives.rank())}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(handler)
    small_trainer(folder, Listener(change), model=model, max_steps=4, save_steps=1, parallel="ddp").train()
    return [line for line in lines if "the training changes" in line]


def test_a_large_unsaved_tensor_of_another_rank_is_named_once_on_rank_zero(tmp_path: Path) -> None:
    (warning,), of_rank_one = run_ranks(warnings_where_rank_one_changes, 2, tmp_path)
    assert "the training changes model.table (2.1 MB), which no checkpoint contains" in warning
    assert of_rank_one == []


class Interruptible(OwnFlagged):
    """Its evaluation can be left between two batches, and then leaves the model in evaluation mode."""

    asks = False

    def run(self) -> ds.Run:
        self.current = super().run()
        return self.current

    def evaluate(self) -> dict[str, float]:
        was_training = self.model.training
        self.model.eval()
        for _ in range(2):
            self.current.between_batches()
            if self.asks:
                signal.raise_signal(signal.SIGTERM)
        self.model.train(was_training)
        return {"eval_loss": float(was_training)}


def test_a_mode_that_an_interrupted_evaluation_leaves_behind_is_not_the_trainings(tmp_path: Path) -> None:
    settings = {"max_steps": 12, "save_steps": 5, "eval_steps": 5}
    Interruptible(tmp_path / "whole", DataOrder(), **settings).train()
    stopped = Interruptible(tmp_path / "parts", DataOrder(), **settings)
    stopped.asks = True
    result = stopped.train()
    assert result is not None and (result.global_step, result.stopped_by) == (5, "signal")
    Interruptible(tmp_path / "parts", DataOrder(), **settings).train()
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


def test_a_value_that_cannot_replace_the_present_one_is_refused(tmp_path: Path) -> None:
    trainer = flagged(tmp_path)
    flags = trainer._parts.flags
    for bad in (
        {"model.norm": {"training": 1}},
        {"model": {"first": 3}},
        {"model": {"forward": 3}},
        {"model": {"scale": 3}},
        {"model.dropout": {"p": torch.ones(3)}},
        {"model.first": {"weight.requires_grad": "yes"}},
    ):
        with pytest.raises(StateMismatch, match="flags: model"):
            flags.check_state(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parallel", "what"), [("ddp", "thawed"), ("ddp", "a group"), ("fsdp", "thawed"), ("fsdp", "a group")]
)
def test_on_two_ranks(tmp_path: Path, parallel: str, what: str) -> None:
    settings = {"parallel": parallel}
    whole = run_ranks(train, 2, tmp_path / "whole", what, 0, settings)
    assert whole[0] == whole[1]
    run_ranks(train, 2, tmp_path / "parts", what, 5, settings)
    assert run_ranks(train, 2, tmp_path / "parts", what, 0, settings) == whole
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"


def test_ddp_averages_the_gradients_of_what_is_thawed(tmp_path: Path) -> None:
    (alone,) = run_ranks(train, 1, tmp_path / "one", "thawed", 0, {"max_grad_norm": 0.5})
    for rank in run_ranks(train, 2, tmp_path / "two", "thawed", 0, {"max_grad_norm": 0.5, "parallel": "ddp"}):
        assert rank[:2] != pytest.approx(alone[:2], rel=1e-9)  # batches are normalized on each rank
        assert rank == pytest.approx(alone, abs=0.2)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_an_added_group_is_clipped_and_follows_the_schedule(tmp_path: Path) -> None:
    rates: list[float] = []
    norms: list[float] = []

    def look(ctx: Any) -> None:
        rates.append(ctx.optimizer.param_groups[-1]["lr"])
        gradients = [each.grad for group in ctx.optimizer.param_groups for each in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm([each for each in gradients if each is not None])))

    look_at = Listener({"on_pre_optimizer_step": look}, name="Look")
    flagged(tmp_path, look_at, what="a group", max_grad_norm=0.01, warmup_steps=0).train()
    assert rates[:3] == pytest.approx([0.01, 0.009, 0.008])
    assert rates[3:5] == pytest.approx([0.003 * 0.7, 0.003 * 0.6])  # its factor is that of the others
    assert max(norms) < 0.0101


def test_groups_that_the_script_adds_or_removes_are_refused_still(tmp_path: Path) -> None:
    flagged(tmp_path, stop_after(5), what="thawed").train()
    trainer = flagged(tmp_path, what="a group")
    with pytest.raises(StateMismatch, match="group 0, unexpected in the checkpoint"):
        trainer.train()


def test_a_group_that_was_added_is_removed_by_a_rollback(tmp_path: Path) -> None:
    counts: dict[int, list[int]] = {}

    def look(ctx: Any) -> None:
        counts.setdefault(ctx.step, []).append(len(ctx.optimizer.param_groups))

    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        callbacks = (*callbacks, Listener({"on_step_begin": lambda ctx: None, "on_step_end": look}, name="Look"))
        return flagged(folder, go_back(), *callbacks, what="a group", recovery="RecoveryPolicy()", save_steps=2)

    def go_back() -> ds.Callback:
        done: list[int] = []

        def ask(ctx: Any) -> None:
            if ctx.step == 5 and not done:
                done.append(5)
                ctx.control.roll_back("once")

        return Listener({"on_step_end": ask}, name="Back")

    build(tmp_path).train()
    assert counts[5] == [2, 2]
    assert counts[3][0] == counts[3][1]
    assert counts[4] == [2, 2]


def test_a_group_with_a_function_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(*callbacks: Any) -> ds.Trainer:
        torch.manual_seed(0)
        model = Flagged()
        model.first.requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

        def add(ctx: Any) -> None:
            add_group(ctx)
            ctx.lr_scheduler.base_lrs.append(0.003)
            ctx.lr_scheduler.lr_lambdas.append(lambda step: 1.0)

        parts = {"optimizer": optimizer, "lr_scheduler": schedule}
        return small_trainer(
            tmp_path, at_step(3, add), *callbacks, model=model, parts=parts, length=60, max_steps=10, save_steps=100
        )

    build(stop_after(5)).train()
    build().train()
    assert "its factors are those of the group before" in caplog.text


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["thawed", "frozen", "a group"])
@pytest.mark.parametrize("is_first", [True, False])
def test_averages_are_of_the_parameters_that_are_trained(tmp_path: Path, what: str, is_first: bool) -> None:
    def build(folder: Path, *callbacks: Any) -> ds.Trainer:
        trainer = flagged(folder, *callbacks, what=what)
        change = trainer.remove_callback("Changes")
        for each in [EMA(decay=0.9), change][:: 1 if is_first else -1]:
            trainer.add_callback(each)
        return trainer

    assert_resumes(build, tmp_path, 3, 5)
