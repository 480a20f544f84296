"""What the user changes between two legs: what is obeyed, what is warned of, what is refused unless it is allowed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.checkpoint import LoadReport
from dalsegno.checkpoint.compatibility import REFUSED
from dalsegno.checkpoint.manifest import _checksum_of
from dalsegno.testing import run_ranks, tiny_regression_data
from support.changing import count_threads, plan_of_unequal_loaders, train_in_type, train_on_ranks
from support.listeners import Listener
from support.models import Line
from support.small import arguments, same, small_trainer, weights


class Watched(ds.Callback):
    """What was loaded, and the learning rate of each step."""

    def __init__(self) -> None:
        self.report = LoadReport()
        self.rates: list[float] = []

    def on_load(self, ctx: ds.LoadContext) -> None:
        self.report = ctx.report

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.rates.append(float(ctx.lr or 0))

    def verdicts(self) -> dict[str, tuple[str, str, str]]:
        return {change.setting: (change.severity, change.saved, change.now) for change in self.report.changes}


def leg(output_dir: Path, max_steps: int, *, allow: tuple[str, ...] = (), **how: Any) -> Watched:
    """A leg of a run that saves every two steps, with a constant rate unless set otherwise."""
    watched = Watched()
    usual = {"lr_scheduler_type": "constant", "save_steps": 2, "model": Line()}
    small_trainer(output_dir, watched, max_steps=max_steps, **{**usual, **how}).train(allow_changes=allow)
    return watched


def sgd(model: nn.Module, rate: float = 0.1) -> dict[str, Any]:
    return {"model": model, "parts": {"optimizer": torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)}}


# --- said -------------------------------------------------------------------------------------------------------------


def test_nothing_changed_nothing_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    leg(tmp_path, 2)
    assert leg(tmp_path / "moved", 2).report.changes == []
    assert leg(tmp_path, 4).verdicts() == {"max_steps": ("info", "2", "4")}
    assert not [record for record in caplog.records if "Watched.rates, which no" not in record.getMessage()]


def test_a_new_learning_rate_is_obeyed_by_the_default_optimizer(tmp_path: Path) -> None:
    """From the first step on, and at the schedule's place."""
    shape = {"lr_scheduler_type": "linear", "max_steps": 8, "save_steps": 2}
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("for now") if ctx.step == 4 else None}, name="stop")
    small_trainer(tmp_path, stop, model=Line(), **shape).train()
    watched = Watched()
    small_trainer(tmp_path, watched, model=Line(), **shape, learning_rate=0.02, weight_decay=0.5).train()
    assert watched.rates == pytest.approx([0.02 * left / 8 for left in (4, 3, 2, 1)])
    assert watched.verdicts() == {
        "learning_rate": ("info", "0.01", "0.02"),
        "weight_decay": ("info", "0", "0.5"),
    }
    again = small_trainer(tmp_path, watched, model=Line(), **{**shape, "max_steps": 9}, learning_rate=0.02)
    again.train()
    assert watched.rates[-1] == pytest.approx(0.02 / 9)


def test_a_new_rate_is_the_same_as_if_the_optimizer_had_been_told(tmp_path: Path) -> None:
    """Weights to the bit: nothing of the former rate is left anywhere."""
    leg(tmp_path / "given", 4)
    leg(tmp_path / "set", 4)

    def set_rate(ctx: Any) -> None:
        for group in ctx.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 0.03
        ctx.lr_scheduler.base_lrs = [0.03 for _ in ctx.lr_scheduler.base_lrs]

    usual: dict[str, Any] = {"lr_scheduler_type": "constant", "max_steps": 8, "save_steps": 2}
    given = small_trainer(tmp_path / "given", model=Line(), learning_rate=0.03, **usual)
    given.train()
    hand = small_trainer(tmp_path / "set", Listener({"on_load": set_rate}), model=Line(), **usual)
    hand.train()
    assert same(weights(given), weights(hand))


def test_an_optimizer_of_ones_own_keeps_what_was_saved_and_that_is_said(tmp_path: Path) -> None:
    leg(tmp_path, 2, **sgd(Line()))
    watched = leg(tmp_path, 4, **sgd(Line(), rate=0.5))
    assert watched.rates == [0.1, 0.1]
    assert watched.verdicts()["optimizer.lr"] == ("info", "0.1", "0.5")
    assert "changed          optimizer.lr: saved 0.1, now 0.5 (the checkpoint's value is used" in watched.report.table()


def test_intervals_and_workers(tmp_path: Path) -> None:
    leg(tmp_path, 2)
    watched = leg(tmp_path, 4, logging_steps=3, eval_steps=7, save_steps=1, dataloader_num_workers=1)
    named = {setting: verdict for setting, (verdict, _, _) in watched.verdicts().items()}
    assert named == dict.fromkeys(
        ["max_steps", "logging_steps", "eval_steps", "save_steps", "dataloader_num_workers"], "info"
    )


def test_what_changes_bits_without_being_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken in another order; a run of which nothing is left on the CPU has no thread to count."""
    run_ranks(count_threads, 1, tmp_path, 1, 2)
    (changes,) = run_ranks(count_threads, 1, tmp_path, 2, 4)
    assert {change.setting: (change.severity, change.saved, change.now) for change in changes} == {
        "max_steps": ("info", "2", "4"),
        "threads": ("warning", "1", "2"),
    }
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert leg(tmp_path / "torch", 2).report.changes == []
    monkeypatch.undo()
    assert leg(tmp_path / "torch", 4).verdicts()["torch"] == ("warning", "2.99.0", torch.__version__)


def test_other_ranks_with_the_same_samples_a_step(tmp_path: Path) -> None:
    """Nothing to warn of: the gradients are the same means."""
    run_ranks(train_on_ranks, 2, tmp_path, 2, 4)
    (changes,) = run_ranks(train_on_ranks, 1, tmp_path, 4, 8)
    assert {change.setting: change.severity for change in changes} == dict.fromkeys(
        ["max_steps", "parallel", "world_size", "per_device_train_batch_size"], "info"
    )


# --- warned -----------------------------------------------------------------------------------------------------------

WARNED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "batch size": ({"per_device_train_batch_size": 8}, {"samples per step": ("4", "8")}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {"samples per step": ("4", "8")}),
    "seed": ({"seed": 7}, {"seed": ("42", "7")}),
    "data seed": ({"data_seed": 7}, {"data_seed": ("None", "7")}),
    "warm-up": ({"warmup_steps": 3}, {"warmup_steps": ("0", "3")}),
    "schedule": ({"lr_scheduler_type": "cosine"}, {"lr_scheduler_type": ("linear", "cosine")}),
    "length": ({"max_steps": 9}, {"max_steps of the schedule": ("8", "9")}),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_makes_it_another_course_is_warned_of(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    change, expected = WARNED[name]
    usual: dict[str, Any] = {"lr_scheduler_type": "linear", "max_steps": 8, "save_steps": 2}
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("for now") if ctx.step == 4 else None}, name="stop")
    small_trainer(tmp_path, stop, model=Line(), **usual).train()
    watched = Watched()
    small_trainer(tmp_path, watched, model=Line(), **{**usual, **change}).train()
    warned = {name: (saved, now) for name, (verdict, saved, now) in watched.verdicts().items() if verdict == "warning"}
    assert warned == expected
    for setting, (saved, now) in expected.items():
        assert f"  {setting}: saved {saved}, now {now} (" in caplog.text


@pytest.mark.parametrize("in_one_process", [True, False])
def test_a_longer_schedule_is_followed_from_the_first_step(tmp_path: Path, in_one_process: bool) -> None:
    watched = Watched()
    trainer = small_trainer(tmp_path, watched, model=Line(), max_steps=4, save_steps=2)
    trainer.train()
    if in_one_process:
        trainer.args.max_steps = 8
    else:
        trainer = small_trainer(tmp_path, watched, model=Line(), max_steps=8, save_steps=2)
    trainer.train()
    assert watched.rates[4:] == pytest.approx([0.01 * left / 8 for left in (4, 3, 2, 1)])


@pytest.mark.parametrize("change", [{"per_device_train_batch_size": 8}, {"gradient_accumulation_steps": 2}])
def test_a_run_of_epochs_is_planned_anew_from_where_its_batches_change(tmp_path: Path, change: dict[str, int]) -> None:
    """Of 20 samples an epoch, 7 steps have read 28: of the second epoch 12 are left, then 2 whole epochs."""
    planned = []

    def leg_until(last: int, **settings: Any) -> Watched:
        watched = Watched()
        stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("for now") if ctx.step == last else None})
        given = {"model": Line(), "max_steps": -1, "num_train_epochs": 4, "save_steps": 50, **settings}
        trainer = small_trainer(tmp_path, watched, stop, **given)
        planned.append((trainer.train().global_step, trainer.state.max_steps))
        return watched

    leg_until(7)
    changed, resumed = leg_until(10, **change), leg_until(-1, **change)
    assert planned == [(7, 20), (10, 15), (15, 15)]
    assert changed.rates + resumed.rates == pytest.approx([0.01 * left / 15 for left in range(8, 0, -1)])
    assert changed.verdicts()["max_steps of the schedule"] == ("warning", "20", "15")
    assert not resumed.report.changes


def test_it_is_planned_anew_where_the_ranks_have_unequal_loaders(tmp_path: Path) -> None:
    """After 4 of 10 batches: 6 in 3 steps, and 10 more in 5."""
    assert run_ranks(plan_of_unequal_loaders, 2, tmp_path, 1, 4) == [(4, 20)] * 2
    assert run_ranks(plan_of_unequal_loaders, 2, tmp_path, 2, -1) == [(12, 12)] * 2


# --- refused ----------------------------------------------------------------------------------------------------------


def two_outputs() -> Line:
    model = Line()
    model.layer = nn.Linear(8, 2)
    return model


def test_all_that_is_refused_is_told_at_once(tmp_path: Path) -> None:
    leg(tmp_path, 2)
    with pytest.raises(ds.StateMismatch) as raised:
        leg(tmp_path, 4, length=21, **sgd(two_outputs()))
    assert str(raised.value).splitlines() == [
        f"{tmp_path}/checkpoints/step-00000002: the saved state does not fit this run; nothing was loaded:",
        "  model: the checkpoint does not fit this support.models.Line",
        "    layer.bias: saved as [1] float32, here [2] float32",
        "    layer.weight: saved as [1, 8] float32, here [2, 8] float32",
        "  optimizer: saved torch.optim.adamw.AdamW, now torch.optim.sgd.SGD",
        "  dataset: saved 20 samples of StackDataset, now 21 samples of StackDataset",
        'to load it all the same, set allow_changes=("dataset", "model", "optimizer"):',
        "  model: tensors that fit are loaded, cast if needed, with their optimizer state; all others stay as built",
        "  optimizer: starts without state, at the learning rate that it was built with",
        "  dataset: resumes after the same number of samples, in the new order: some come twice, some never",
    ]
    with pytest.raises(ds.StateMismatch, match=r'allow_changes=\("dataset", "model", "optimizer"\)'):
        leg(tmp_path, 4, length=21, **sgd(two_outputs()), allow=("dataset", "model"))
    assert leg(tmp_path, 4, length=21, **sgd(two_outputs()), allow=REFUSED).report.changes


def test_nothing_of_a_refused_resume_has_happened(tmp_path: Path) -> None:
    leg(tmp_path, 2)
    trainer = small_trainer(tmp_path, model=Line(), length=21, lr_scheduler_type="constant", max_steps=4)
    before = weights(trainer)
    with pytest.raises(ds.StateMismatch):
        trainer.train()
    assert same(weights(trainer), before)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "other", [tiny_regression_data(20, seed=5), tiny_regression_data(24)], ids=["content", "length"]
)
def test_another_dataset(tmp_path: Path, other: Any) -> None:
    leg(tmp_path, 3)
    with pytest.raises(ds.StateMismatch, match=r"dataset: .*20 samples of StackDataset"):
        leg(tmp_path, 8, parts={"train_dataset": other})
    epochs: list[float] = []
    note = Listener({"on_step_end": lambda ctx: epochs.append(ctx.state.epoch * len(other))}, name="epochs")
    trainer = small_trainer(
        tmp_path, note, model=Line(), parts={"train_dataset": other}, lr_scheduler_type="constant", max_steps=5
    )
    trainer.train(allow_changes=("dataset",))
    assert epochs == pytest.approx([16, 20]), "three steps of four samples were behind it"


def test_a_dataset_that_has_become_shorter_than_the_place_in_it(tmp_path: Path) -> None:
    leg(tmp_path, 4)
    watched = leg(tmp_path, 6, length=8, allow=("dataset",))
    assert watched.rates == [0.01, 0.01]


class Grown(nn.Module):
    """``Line`` with a second head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 1)
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(self.head(self.layer(x)), y)


def test_what_fits_of_a_model_is_loaded_and_so_is_its_optimizer_state(tmp_path: Path) -> None:
    first = small_trainer(tmp_path, model=Line(), lr_scheduler_type="constant", max_steps=4, save_steps=2)
    first.train()
    seen: dict[str, Any] = {}

    def look(ctx: Any) -> None:
        seen["weights"] = {name: tensor.detach().clone() for name, tensor in ctx.model.state_dict().items()}
        seen["states"] = {
            name: ctx.optimizer.state.get(parameter, {}).get("exp_avg") is not None
            for name, parameter in ctx.model.named_parameters()
        }
        seen["report"] = ctx.report

    usual: dict[str, Any] = {"lr_scheduler_type": "constant", "max_steps": 6, "save_steps": 2}
    with pytest.raises(ds.StateMismatch, match=r"missing in the checkpoint: head\.weight"):
        small_trainer(tmp_path, model=Grown(), **usual).train()
    grown = small_trainer(tmp_path, Listener({"on_load": look}), model=Grown(), **usual)
    fresh = weights(grown)
    grown.train(allow_changes="model")
    assert torch.equal(seen["weights"]["layer.weight"], first.model.layer.weight)  # type: ignore[union-attr]
    assert torch.equal(seen["weights"]["head.weight"], fresh["head.weight"])
    assert seen["states"] == {
        "layer.weight": True,
        "layer.bias": True,
        "head.weight": False,
        "head.bias": False,
    }
    assert "missing in the checkpoint: head.weight [1, 1] float32" in seen["report"].table()
    assert small_trainer(tmp_path, model=Grown(), **{**usual, "max_steps": 8}).train().global_step == 8


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("types", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_the_optimizers_state_follows_the_element_type_of_its_weights(
    tmp_path: Path, types: tuple[torch.dtype, torch.dtype], world_size: int
) -> None:
    """The number of its steps has a type of its own, and keeps it."""
    before, after = types
    (first, *_) = run_ranks(train_in_type, world_size, tmp_path, before, 2, ())
    with pytest.raises(
        ds.RankFailed, match=r"layer.weight: saved as .*(\n.*)*tensors that fit are loaded, cast if needed"
    ):
        run_ranks(train_in_type, world_size, tmp_path, after, 4, ())
    (second, *_) = run_ranks(train_in_type, world_size, tmp_path, after, 4, ("model",))
    assert {kind: dtype for kind, (dtype, _) in first.items()} == {
        "step": torch.float32,
        "exp_avg": before,
        "exp_avg_sq": before,
    }
    assert {kind: dtype for kind, (dtype, _) in second.items()} == {
        "step": torch.float32,
        "exp_avg": after,
        "exp_avg_sq": after,
    }
    assert second["step"] == (torch.float32, 4.0)
    assert second["exp_avg_sq"][1] > first["exp_avg_sq"][1] / 2, "what was gathered before is still in it"


def test_another_optimizer_takes_the_schedules_place_at_its_own_rate(tmp_path: Path) -> None:
    shape = {"lr_scheduler_type": "linear", "max_steps": 8, "save_steps": 2}
    stop = Listener({"on_step_end": lambda ctx: ctx.control.stop("for now") if ctx.step == 4 else None}, name="stop")
    small_trainer(tmp_path, stop, model=Line(), **shape).train()
    watched = Watched()
    small_trainer(tmp_path, watched, **sgd(Line(), rate=0.4), **shape).train(allow_changes=("optimizer",))
    assert watched.report.fresh == ["optimizer"]
    assert watched.rates == pytest.approx([0.4 * left / 8 for left in (4, 3, 2, 1)])


def test_names_to_allow(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, max_steps=1)
    with pytest.raises(ds.UnknownName, match="unknown change in allow_changes 'data'; did you mean 'dataset'"):
        trainer.train(allow_changes=("data",))


# --- a loop of one's own ----------------------------------------------------------------------------------------------


def own_loop(output_dir: Path, max_steps: int, length: int = 20, rate: float = 0.1, **how: Any) -> LoadReport:
    torch.manual_seed(0)
    model, watched = Line(), Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(tiny_regression_data(length), batch_size=4, shuffle=True)
    args = arguments(output_dir, max_steps=max_steps, save_steps=2)
    callbacks = [watched]
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, callbacks=callbacks, **how) as run:
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    return watched.report


def test_an_own_loop_is_asked_the_same(tmp_path: Path) -> None:
    own_loop(tmp_path, 2)
    report = own_loop(tmp_path, 4, rate=0.2)
    assert {change.setting: change.now for change in report.changes} == {"max_steps": "4", "optimizer.lr": "0.2"}
    with pytest.raises(ds.StateMismatch, match='allow_changes=\\("dataset",\\)'):
        own_loop(tmp_path, 6, length=24)
    assert own_loop(tmp_path, 6, length=24, allow_changes=("dataset",)).changes[0].setting == "dataset"
    with pytest.raises(ds.UnknownName, match="did you mean 'model'"):
        own_loop(tmp_path, 6, allow_changes=("mode",))


def test_a_checkpoint_of_former_times_is_loaded_without_comparison(tmp_path: Path) -> None:
    leg(tmp_path, 2)
    forget_settings(tmp_path / "checkpoints/step-00000002")
    watched = leg(tmp_path, 4, seed=9)
    assert watched.report.changes == []
    assert "settings: not saved in this checkpoint, so nothing was compared" in watched.report.notes


def forget_settings(checkpoint: Path) -> None:
    """As it would have been written before there were any."""
    shared = json.loads((checkpoint / "shared.json").read_text())
    del shared["states"]["settings"]
    (checkpoint / "shared.json").write_text(json.dumps(shared))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["components"]["settings"], manifest["xxh3"]
    data = (checkpoint / "shared.json").read_bytes()
    manifest["files"]["shared.json"] = {"size": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"xxh3": _checksum_of(manifest)}))
