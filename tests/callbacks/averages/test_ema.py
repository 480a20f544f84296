"""EMA: the right averages, however the model is spread; evaluated, saved, resharded, exported, and out of the way."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import sentences
from dalsegno.callbacks import EMA, JsonLogger, ProgressCallback
from dalsegno.checkpoint import CheckpointManager, read_tensors
from dalsegno.cli import main
from dalsegno.events.table import Event
from dalsegno.logs import read_records
from dalsegno.testing import (
    FaultPlan,
    assert_resume_equivalent,
    compare_runs,
    run_ranks,
    tiny_regression_data,
)
from support.averaged import DECAY, averaged, in_shards, shares, train, with_squares
from support.listeners import Listener
from support.models import Normed
from support.resumed import assert_resumes
from support.small import arguments, same, small_trainer, weights

NAMES = {"embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "scale"}
"""Of Uneven's parameters that are trained; the tied one once."""


def saved(output_dir: Path, part: str = "callbacks.EMA") -> dict[str, Tensor]:
    newest = CheckpointManager(output_dir).find()
    assert newest is not None
    return read_tensors(newest)[part]


def ema_of(trainer: ds.Trainer) -> EMA:
    return next(each for each in trainer.callbacks if isinstance(each, EMA))


class Witness(ds.Callback):
    """All weights before the first step and after each, in float64."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_begin(self, ctx: Any) -> None:
        self.note(ctx.model)

    def on_step_end(self, ctx: Any) -> None:
        self.note(ctx.model)

    def note(self, model: nn.Module) -> None:
        self.weights.append({name: each.detach().clone().double() for name, each in model.named_parameters()})


def expected(history: list[dict[str, Tensor]], decay: float, every: int = 1, warmup: bool = False) -> dict[str, Tensor]:
    """The definition, one parameter and one step after the other."""
    average = dict(history[0])
    for number, now in enumerate(history[every::every]):
        used = min(decay, (1 + number) / (10 + number)) if warmup else decay
        average = {name: used * average[name] + (1 - used) * now[name] for name in average}
    return average


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), wanted[name].double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", [{}, {"every": 3}, {"decay": 0.99, "warmup": True}, {"decay": 0}])
def test_the_average_is_what_its_definition_says(tmp_path: Path, how: dict[str, Any]) -> None:
    witness = Witness()
    averaged(tmp_path, witness, how=how).train()
    found = saved(tmp_path)
    assert found.keys() == NAMES
    assert_close(found, expected(witness.weights, **{"decay": DECAY, **how}))


def test_added_in_the_middle_of_a_leg_it_sees_no_begin_of_training(tmp_path: Path) -> None:
    class Own(EMA):
        begins = 0

        def on_train_begin(self, ctx: Any) -> None:
            self.begins += 1
            super().on_train_begin(ctx)

    late = Own(0.5)

    def add(ctx: Any) -> None:
        if ctx.step == 1:
            ctx.trainer.add_callback(late)

    trainer = small_trainer(tmp_path, Listener({"on_step_end": add}), max_steps=3)
    trainer.train()
    assert late.begins == 0
    last = weights(trainer)
    with late.averaged():
        assert not same(weights(trainer), last)


def test_the_averages_are_evaluated_and_the_weights_come_back(tmp_path: Path) -> None:
    witness = Witness()
    seen: list[bool] = []

    def compare(ctx: Any) -> None:
        seen.append(same(weights(ctx.trainer), {name: each.float() for name, each in witness.weights[-1].items()}))

    model = Uneven()
    model.head.weight = nn.Parameter(model.head.weight.clone())  # so that state_dict and parameters have the same names
    watcher = Listener({"on_prediction_step": compare, "on_evaluate": compare, "on_step_done": compare})
    averaged(tmp_path, witness, watcher, model=model).train()
    one_evaluation = [False] * 4 + [True]
    assert seen == [True, True, *one_evaluation, True, True, True, *one_evaluation, True, True, True]
    for record in read_records(tmp_path / "logs/train.jsonl"):
        if record.get("kind") == "eval":
            history = witness.weights[: record["global_step"] + 1]
            assert record["eval_loss"] == pytest.approx(loss_of(model, expected(history, DECAY)), rel=1e-5)


def loss_of(model: nn.Module, parameters: dict[str, Tensor]) -> float:
    with torch.no_grad():
        other = deepcopy(model).double()
        other.load_state_dict(parameters)
        tokens = torch.stack([each["tokens"] for each in sentences(8, seed=1)])
        return float(other(tokens))


def test_an_exception_in_an_evaluation_leaves_the_weights(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        raise RuntimeError("in the middle of it")

    broken = averaged(tmp_path / "broken", Listener({"on_prediction_step": fail}))
    with pytest.raises(RuntimeError, match="in the middle of it"):
        broken.train()
    sound = averaged(tmp_path / "sound", max_steps=3)
    sound.train()
    assert same(weights(broken), weights(sound))
    with pytest.raises(RuntimeError, match="in the middle of it"):
        broken.evaluate()
    assert same(weights(broken), weights(sound))


def test_an_evaluation_that_is_broken_off_leaves_the_weights(tmp_path: Path) -> None:
    batches: list[int] = []

    def interrupt(ctx: Any) -> None:
        batches.append(ctx.index)
        if len(batches) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    averaged(tmp_path / "whole").train()
    first = averaged(tmp_path / "parts", Listener({"on_prediction_step": interrupt}, name="sender")).train()
    assert (first.global_step, first.stopped_by) == (6, "signal")
    averaged(tmp_path / "parts").train()
    rows = compare_runs(tmp_path / "whole", tmp_path / "parts").rows
    differing = {row.what for row in rows if not row.identical}
    assert differing == {"trainer"}, "the stop has saved the best model, too"


def test_stopped_and_resumed(tmp_path: Path) -> None:
    how = {"every": 2, "warmup": True}
    assert_resumes(lambda folder, *own: averaged(folder, *own, how=how), tmp_path, 1, 4, 5)


def test_killed_and_resumed_in_shards(tmp_path: Path) -> None:
    kills = [FaultPlan(event=Event.PREDICTION_STEP, count=3), FaultPlan(event=Event.STEP_END, count=6)]
    assert_resume_equivalent(in_shards, kills, world_size=2, folder=tmp_path)


def test_each_rank_has_its_shards_alone(tmp_path: Path) -> None:
    ours, theirs = run_ranks(shares, 2, tmp_path)
    for name, (here, whole) in ours.items():
        assert here + theirs[name][0] == whole
    assert sum(here for here, _ in ours.values()) < sum(whole for _, whole in ours.values())


@pytest.mark.parametrize(
    "legs",
    [
        [(2, "ddp"), (2, "ddp")],
        [(2, "fsdp"), (1, "none")],
        [(1, "none"), (2, "fsdp")],
        [(2, "fsdp"), (2, "ddp")],
    ],
    ids=lambda legs: " then ".join(f"{layout} {count}" for count, layout in legs),
)
def test_the_averages_follow_the_model_to_any_layout(tmp_path: Path, legs: list[tuple[int, str]]) -> None:
    train(tmp_path / "alone", "none", {})
    for steps, (count, layout) in zip((4, 8), legs, strict=True):
        run_ranks(train, count, tmp_path / "spread", layout, {"max_steps": steps})
    found, wanted = saved(tmp_path / "spread"), saved(tmp_path / "alone")
    assert found.keys() == wanted.keys() == NAMES
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-6)
    losses = [
        [record["eval_loss"] for record in read_records(tmp_path / run / "logs/train.jsonl") if "eval_loss" in record]
        for run in ("alone", "spread")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 2


def test_low_precision_is_averaged_in_fp32(tmp_path: Path) -> None:
    trainer = averaged(tmp_path, model=Uneven().to(torch.bfloat16), how={"decay": 0.9999})
    before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    trainer.train()
    found = saved(tmp_path)
    assert {each.dtype for each in found.values()} == {torch.float32}
    assert all(not torch.equal(found[name], before[name].float()) for name in ("embed.weight", "scale"))
    assert {each.dtype for each in saved(tmp_path, "model").values()} == {torch.bfloat16}


def test_buffers_are_the_models_own(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, EMA(0.5), model=Normed(), max_steps=4, save_steps=4)
    trainer.train()
    assert saved(tmp_path).keys() == {"norm.weight", "norm.bias", "layer.weight", "layer.bias"}
    running = trainer.model.norm.running_mean.clone()
    with ema_of(trainer).averaged():
        assert torch.equal(trainer.model.norm.running_mean, running)
        assert same(dict(trainer.model.named_parameters()), saved(tmp_path))
    assert not same(dict(trainer.model.named_parameters()), saved(tmp_path))


def test_by_hand_they_can_be_put_in_place(tmp_path: Path) -> None:
    trainer = averaged(tmp_path, max_steps=4)
    ema = ema_of(trainer)
    with pytest.raises(ds.ConfigurationError, match=r"there is no average yet"), ema.averaged():
        pass
    trainer.train()
    before = weights(trainer)
    plain = trainer.predict(sentences(4, seed=2))["test_loss"]
    with ema.averaged():
        assert trainer.predict(sentences(4, seed=2))["test_loss"] != plain
        with pytest.raises(ds.ConfigurationError, match="the averages of EMA are swapped in already"), ema.averaged():
            pass
    assert same(weights(trainer), before)
    assert trainer.predict(sentences(4, seed=2))["test_loss"] == plain


def test_a_finished_runs_averages_are_there(tmp_path: Path) -> None:
    """In a program that does not train, they are evaluated as in the one that did, and can be put in place."""
    first = averaged(tmp_path)
    first.train()
    second = averaged(tmp_path)
    second.train()
    assert second.evaluate()["eval_loss"] == first.evaluate()["eval_loss"]
    second.remove_callback("EMA")
    assert second.evaluate()["eval_loss"] != first.evaluate()["eval_loss"]
    third = averaged(tmp_path)
    third.train()
    with ema_of(third).averaged():
        assert_close(saved(tmp_path), dict(third.model.named_parameters()))


def test_the_best_model_comes_with_its_averages(tmp_path: Path) -> None:
    """They are what was the best; so measured again it is."""
    settings = {"learning_rate": 0.3, "eval_steps": 2, "save_steps": 2, "max_steps": 12, "load_best_model_at_end": True}
    trainer = small_trainer(tmp_path, EMA(0.5), parts={"eval_dataset": tiny_regression_data(6, seed=1)}, **settings)
    trainer.train()
    best = trainer.state.best_global_step
    assert 0 < best < 12
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    assert trainer.train().global_step == 12


# --- in checkpoints ---------------------------------------------------------------------------------------------------


def told_by(output_dir: Path, *callbacks: ds.Callback, **how: Any) -> Any:
    """The report of the load."""
    reports: list[Any] = []
    listener = Listener({"on_load": lambda ctx: reports.append(ctx.report)}, name="loaded")
    parts = {"train_dataset": sentences()}
    trainer = small_trainer(output_dir, listener, *callbacks, model=Uneven(), parts=parts, max_steps=6, save_steps=2)
    trainer.train(**how)
    return reports[0]


def test_one_that_comes_later_begins_with_the_weights_of_then(tmp_path: Path) -> None:
    parts = {"train_dataset": sentences()}
    small_trainer(tmp_path, model=Uneven(), parts=parts, max_steps=4, save_steps=2).train()
    witness = Witness()
    assert told_by(tmp_path, EMA(DECAY), witness).fresh == ["callbacks.EMA"]
    assert_close(saved(tmp_path), expected(witness.weights, DECAY))


def test_one_that_is_gone_is_told_of(tmp_path: Path) -> None:
    averaged(tmp_path, max_steps=4, optim="adamw").train()
    with pytest.raises(ds.StateMismatch, match=r"callbacks\.EMA: saved, but not here"):
        told_by(tmp_path, strict_callbacks=True)
    notes = told_by(tmp_path).notes
    assert "callbacks.EMA: is in the checkpoint, but nothing takes it; it is not carried forward" in notes


def test_a_new_run_may_begin_with_weights_and_averages_of_another(tmp_path: Path) -> None:
    averaged(tmp_path / "a", max_steps=4).train()
    trainer = averaged(tmp_path / "b", max_steps=1, learning_rate=0.0, how={"decay": 0.5})
    trainer.train(tmp_path / "a/checkpoints/step-00000004", load_components=("model", "EMA"))
    average, model = saved(tmp_path / "a"), saved(tmp_path / "a", "model")
    assert_close(saved(tmp_path / "b"), {name: (average[name] + model[name]) / 2 for name in average})


def test_a_parameter_that_thaws_is_averaged_from_then_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    averaged(tmp_path, max_steps=4).train()
    model = Uneven()
    model.frozen.requires_grad_()
    optimizer = torch.optim.SGD([each for name, each in model.named_parameters() if name != "frozen"], lr=0.01)
    parts = {"train_dataset": sentences(), "optimizer": optimizer}
    with caplog.at_level(logging.WARNING, "dalsegno"):
        trainer = small_trainer(tmp_path, EMA(DECAY), model=model, parts=parts, max_steps=5, save_steps=5)
        trainer.train(allow_changes=("optimizer",))
    assert "EMA: no average was saved of 1 parameter(s), frozen among them" in caplog.text
    assert torch.equal(saved(tmp_path)["frozen"], torch.ones(3))


def test_two_of_them_have_names_of_their_own(tmp_path: Path) -> None:
    parts = {"train_dataset": sentences()}
    both = (EMA(0.5, name="short"), EMA(0.9, name="long"))
    witness = Witness()
    small_trainer(tmp_path, *both, witness, model=Uneven(), parts=parts, max_steps=4, save_steps=4).train()
    for name, decay in (("short", 0.5), ("long", 0.9)):
        assert_close(saved(tmp_path, f"callbacks.{name}"), expected(witness.weights, decay))


@pytest.mark.parametrize("how", ["none", "ddp", "fsdp"])
def test_the_first_of_two_is_evaluated_and_training_is_what_it_was(tmp_path: Path, how: str) -> None:
    if how == "none":
        one, two = evaluated_beside_another(tmp_path, how)
    else:
        (one, two), _ = run_ranks(evaluated_beside_another, 2, tmp_path, how)
    assert one == two


def evaluated_beside_another(output_dir: Path, how: str) -> list[Any]:
    """With one average and with two: what was evaluated, as the records say, and the weights at the end."""
    found: list[Any] = []
    for name, own in (("one", [EMA(0.5)]), ("two", [EMA(0.5), EMA(0.9, name="long")])):
        torch.manual_seed(0)
        parts = {"train_dataset": sentences(), "eval_dataset": sentences(8, seed=1)}
        settings = {"max_steps": 4, "eval_steps": 2, "save_steps": 4, "parallel": how}
        trainer = small_trainer(output_dir / name, JsonLogger(), *own, model=Uneven(), parts=parts, **settings)
        trainer.train()
        records = read_records(output_dir / name / "logs/train.jsonl")
        evaluated = [(each["evaluated_weights"], each["eval_loss"]) for each in records if each.get("kind") == "eval"]
        assert len(evaluated) == 2
        model = {key: each.tolist() for key, each in saved(output_dir / name, "model").items()}
        found.append((evaluated, model))
    return found


def test_a_record_says_whose_weights_were_evaluated_and_no_metric_does(tmp_path: Path) -> None:
    """By a callback's key, which ``export --average`` takes; the model's own weights are not named."""
    shown = io.StringIO()
    asked: list[Any] = []
    noted = Listener({"on_evaluate": lambda ctx: asked.append((ctx.evaluated_weights, sorted(ctx.metrics)))})
    parts = {"train_dataset": sentences(), "eval_dataset": {"near": sentences(8, seed=1), "far": sentences(8, seed=2)}}
    own = [JsonLogger(), EMA(0.5, name="half"), noted, ProgressCallback(use_tqdm=False, output_stream=shown)]
    settings = {
        "max_steps": 2,
        "logging_steps": 1,
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": "near_loss",
    }
    trainer = small_trainer(tmp_path, *own, model=Uneven(), parts=parts, **settings)
    trainer.train()
    records = read_records(tmp_path / "logs/train.jsonl")
    kinds = [(each.get("kind"), each.get("evaluated_weights")) for each in records]
    assert kinds == [("header", None), (None, None), (None, None), ("eval", "half"), ("eval", "half"), ("final", None)]
    metrics = [
        [f"eval_{name}_{each}" for each in ("loss", "runtime", "samples_per_second")] for name in ("near", "far")
    ]
    assert asked == [("half", each) for each in metrics]
    newest = CheckpointManager(tmp_path).find()
    assert newest is not None
    assert sorted(newest.manifest.metrics) == sorted(metrics[0] + metrics[1])
    assert shown.getvalue().count("  eval of half: eval_") == 2
    trainer.remove_callback("half")
    trainer.evaluate()
    assert [each for each, _ in asked] == ["half", "half", None, None]


def test_what_is_put_in_place_by_hand_stays_there_in_an_evaluation(tmp_path: Path) -> None:
    trainer = averaged(tmp_path, max_steps=4)
    trainer.train()
    plain = trainer.predict(sentences(4, seed=2))["test_loss"]
    seen: list[str | None] = []
    trainer.add_callback(Listener({"on_evaluate": lambda ctx: seen.append(ctx.evaluated_weights)}, name="seen"))
    with ema_of(trainer).averaged():
        before = trainer.predict(sentences(4, seed=2))["test_loss"]
        trainer.evaluate()
        assert trainer.predict(sentences(4, seed=2))["test_loss"] == before != plain
    assert trainer.predict(sentences(4, seed=2))["test_loss"] == plain
    assert seen == ["EMA"]


def test_exported_in_place_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = small_trainer(tmp_path / "run", EMA(0.5), model=Normed(), max_steps=4, save_steps=4)
    trainer.train()
    ds.export_model(tmp_path / "run", tmp_path / "average", average="EMA")
    exported = load_file(tmp_path / "average/model.safetensors")
    assert same(exported, {**saved(tmp_path / "run", "model"), **saved(tmp_path / "run")})
    assert not same(exported, saved(tmp_path / "run", "model"))
    command = ["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "cli"), "--average", "EMA"]
    assert main(command) == 0
    assert same(load_file(tmp_path / "cli/model.safetensors"), exported)
    with pytest.raises(ds.UnknownName, match=r"unknown average 'EMMA'; did you mean 'EMA'\?"):
        ds.export_model(tmp_path / "run", tmp_path / "other", average="EMMA")
    capsys.readouterr()
    assert main(["checkpoints", "show", str(tmp_path / "run"), "--component", "callbacks.EMA"]) == 0
    assert "layer.weight" in capsys.readouterr().out


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_tensors_of_a_callback_of_ones_own(tmp_path: Path) -> None:
    kills = [FaultPlan(event=Event.STEP_END, count=6)]
    assert_resume_equivalent(with_squares, kills, world_size=2, folder=tmp_path)
    sums = saved(tmp_path / "killed", "callbacks.SquaredGradients")
    assert sums.keys() == {*NAMES, "frozen"}
    assert float(sums["embed.weight"].min()) > 0 == float(sums["frozen"].max())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"decay": 1.0}, "decay=1.0; needs a number below 1"),
        ({"decay": -0.1}, "decay=-0.1; needs a finite number of at least 0"),
        ({"every": 0}, "every=0; needs an integer of at least 1"),
        ({"warmup": 1}, "warmup=1; allowed are True and False"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        EMA(**how)


def test_a_name_that_can_be_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"name='my/average': .*; allowed are letters, digits, - and _"):
        small_trainer(tmp_path, EMA(name="my/average"), max_steps=1)


class Both(EMA):
    def state_dict(self) -> int:
        return 1

    def load_state_dict(self, state: int) -> None: ...


def test_two_kinds_of_state_in_one_callback(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"callbacks\.Both: it has both sharded_state and state_dict"):
        small_trainer(tmp_path, Both(), max_steps=1)


# --- the end of an evaluation -----------------------------------------------------------------------------------------


def test_on_evaluate_end_comes_whatever_happens(tmp_path: Path) -> None:
    ends: list[str] = []

    def fail(ctx: Any) -> None:
        raise RuntimeError("first")

    def fail_too(ctx: Any) -> None:
        ends.append(ctx.name)
        raise ValueError("second")

    trainer = small_trainer(
        tmp_path,
        Listener({"on_prediction_step": fail, "on_evaluate_end": fail_too}, name="a"),
        Listener({"on_evaluate_end": lambda ctx: ends.append(ctx.name)}, name="b"),
        parts={"eval_dataset": {"near": tiny_regression_data(4)}},
    )
    with pytest.raises(RuntimeError, match="first") as caught:
        trainer.evaluate()
    assert ends == ["near", "near"], "one that fails keeps no other from being called"
    assert "and during teardown: ValueError: second" in caught.value.__notes__
    assert arguments(tmp_path).directory == tmp_path


def test_of_two_that_fail_at_the_end_of_an_evaluation_the_second_is_in_the_notes(tmp_path: Path) -> None:
    def fail(ctx: Any) -> None:
        raise RuntimeError(ctx.name)

    both = [Listener({"on_evaluate_end": fail}, name=name) for name in "ab"]
    trainer = small_trainer(tmp_path, *both, parts={"eval_dataset": {"near": tiny_regression_data(4)}})
    with pytest.raises(RuntimeError, match="near") as caught:
        trainer.evaluate()
    assert caught.value.__notes__[-1] == "and during teardown: RuntimeError: near"
