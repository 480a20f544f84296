"""The number of micro-batches in a step grows at given steps."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import AdamW

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.config import RunConfig
from dalsegno.policies.triggers import StepSchedule
from dalsegno.testing import (
    DataOrder,
    FaultPlan,
    TinyRegression,
    assert_resume_equivalent,
    run_ranks,
    tiny_regression_data,
)
from support.listeners import Listener
from support.models import Line
from support.small import arguments, same, small_trainer, weights

GROWING = {0: 1, 2: 2, 5: 3}
OF_EACH_STEP = [1, 1, 2, 2, 2, 3, 3]


def growing_trainer(output_dir: Path) -> ds.Trainer:
    """Five samples in the last step of the first epoch; dropout."""
    torch.manual_seed(0)
    args = arguments(
        output_dir,
        max_steps=9,
        gradient_accumulation_schedule=GROWING,
        logging_steps=1,
        save_steps=1,
        disable_tqdm=True,
    )
    data = tiny_regression_data(53)
    return ds.Trainer(TinyRegression(), args, train_dataset=data, callbacks=[JsonLogger(), DataOrder()])


def test_a_killed_run_resumes_exactly_before_at_and_after_a_change(tmp_path: Path) -> None:
    kills = [
        FaultPlan(event=ds.Event.MICROBATCH_BEGIN, count=4),
        FaultPlan(event=ds.Event.STEP_END, count=5),
        FaultPlan(event=ds.Event.STEP_END, count=6),
    ]
    assert_resume_equivalent(growing_trainer, kill_at=kills, folder=tmp_path)


def test_each_step_is_the_mean_over_its_own_micro_batches(tmp_path: Path) -> None:
    """Against a plain loop with AdamW, over the same batches."""
    batches: list[dict[str, Tensor]] = []
    losses: list[float] = []

    notes = {
        "on_microbatch_begin": lambda ctx: batches.append(ctx.batch),
        "on_step_end": lambda ctx: losses.append(ctx.loss),
    }
    settings = {"max_steps": 7, "lr_scheduler_type": "constant", "max_grad_norm": 0, "length": 56}
    schedule = {"gradient_accumulation_schedule": GROWING}
    trainer = small_trainer(tmp_path, Listener(notes), model=Line(), **settings, **schedule)
    result = trainer.train()

    model = Line()
    groups = [{"params": [model.layer.weight]}, {"params": [model.layer.bias]}]
    optimizer = AdamW(groups, lr=0.01, weight_decay=0.0)
    rest = iter(batches)
    by_hand = []
    for count in OF_EACH_STEP:
        total = 0.0
        for _ in range(count):
            loss = model(**next(rest)) * (1 / count)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.append(total)
    assert not [*rest]
    assert losses == pytest.approx(by_hand)
    assert same(weights(trainer), {name: tensor.detach() for name, tensor in model.state_dict().items()})
    assert trainer.state.samples_seen == 4 * sum(OF_EACH_STEP)
    assert result.metrics["effective_batch_size"] == 12


def train_weighed(output_dir: Path, batch_size: int, weigh: bool) -> tuple[dict[int, float], int]:
    """The loss of each step, and the number of samples."""
    torch.manual_seed(0)
    losses: dict[int, float] = {}
    note = Listener({"on_train_metrics": lambda ctx: losses.update({ctx.state.global_step: ctx.metrics["loss"]})})
    trainer = ds.Trainer(
        Line(),
        arguments(
            output_dir,
            max_steps=9,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_schedule=GROWING,
            disable_tqdm=True,
        ),
        train_dataset=tiny_regression_data(53),
        loss_weight=(lambda batch: float(len(batch["x"]))) if weigh else None,
        callbacks=[note],
    )
    trainer.train()
    return losses, trainer.state.samples_seen


@pytest.mark.parametrize("weigh", [False, True])
def test_two_ranks_take_the_same_samples_a_step(tmp_path: Path, weigh: bool) -> None:
    ((alone, samples),) = run_ranks(train_weighed, 1, tmp_path / "one", 4, weigh)
    for losses, samples_of_both in run_ranks(train_weighed, 2, tmp_path / "two", 2, weigh):
        assert losses == pytest.approx(alone, rel=1e-4)
        assert samples_of_both == samples


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(tiny_regression_data(56), batch_size=4)
    args = arguments(tmp_path, max_steps=7, gradient_accumulation_schedule=GROWING, disable_tqdm=True)
    counts, count = [], 0
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.batches():
            count += 1
            (model(**batch) * run.microbatch_weight).backward()
            if run.is_last_microbatch:
                optimizer.step()
                optimizer.zero_grad()
                run.step_end(loss=0.0)
                counts.append(count)
                count = 0
    assert counts == OF_EACH_STEP


@pytest.mark.parametrize("epochs", [1, 3, 2.5, 0.5])
def test_the_number_of_steps_in_epochs_is_known_ahead(tmp_path: Path, epochs: float) -> None:
    """Eleven micro-batches an epoch; the default schedule of the learning rate ends at the last step."""
    rates: list[float] = []
    note = Listener({"on_step_end": lambda ctx: rates.append(float(ctx.lr))})
    settings = {"num_train_epochs": epochs, "gradient_accumulation_schedule": GROWING, "length": 44}
    trainer = small_trainer(tmp_path, note, model=Line(), **settings)
    result = trainer.train()
    assert trainer.state.max_steps == result.global_step
    assert rates[-1] == pytest.approx(0.01 / result.global_step)


schedules = st.dictionaries(st.integers(1, 40), st.integers(1, 9)).flatmap(
    lambda later: st.integers(1, 9).map(lambda first: {0: first, **later})
)


@given(schedules, st.integers(0, 200), st.integers(0, 60))
def test_steps_are_counted_as_one_by_one(values: dict[int, int], count: int, done: int) -> None:
    schedule = StepSchedule("values", values)
    steps, left = 0, count
    while left > 0:
        left -= values[max(start for start in values if start <= done + steps)]
        steps += 1
    assert schedule.steps_to_consume(count, done) == steps
    assert StepSchedule("values", str(values)).values == schedule.values == dict(sorted(values.items()))


def build(args: ds.TrainingArguments, callbacks: list[ds.Callback]) -> ds.Trainer:
    return ds.Trainer(Line(), args, train_dataset=tiny_regression_data(8), callbacks=callbacks)


def test_a_schedule_as_text_or_in_a_file(tmp_path: Path) -> None:
    read = {
        text: ds.TrainingArguments(tmp_path, gradient_accumulation_schedule=text).gradient_accumulation_schedule
        for text in ("0: 1, 1000: 2", "{1_000: 2, 0: 1}")
    }
    assert [*read.values()] == [{0: 1, 1000: 2}] * 2
    table = f'trainer = "{__name__}:build"\n[args]\noutput_dir = "runs"\n'
    for name, line in (("table", "{0 = 1, 1000 = 2}"), ("text", '"0: 1, 1000: 2"')):
        path = tmp_path / f"{name}.toml"
        path.write_text(f"{table}gradient_accumulation_schedule = {line}\n")
        config = RunConfig.read(path)
        assert config.args.gradient_accumulation_schedule == {0: 1, 1000: 2}
        assert config.settings["args"]["gradient_accumulation_schedule"] == "{0: 1, 1000: 2}"


@pytest.mark.parametrize(
    "given", [{}, {1: 2}, {0: 0}, {0: 1.5}, {0: True}, {-1: 2, 0: 1}, "0: 1, 0: 2", "two", 2, [1, 2], {0: math.nan}]
)
def test_a_schedule_that_cannot_be(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ds.ConfigurationError, match=r"gradient_accumulation_schedule=.*such as \{0: 1, 1000: 2\}"):
        ds.TrainingArguments(tmp_path, gradient_accumulation_schedule=given)


def test_only_one_of_the_two_settings(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="and gradient_accumulation_steps= too; give only one"):
        ds.TrainingArguments(tmp_path, gradient_accumulation_schedule={0: 1}, gradient_accumulation_steps=2)


def test_a_schedule_that_begins_in_a_later_leg(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The new value takes effect, with a warning; the same schedule again is not mentioned."""
    caplog.set_level(logging.WARNING)
    settings: dict[str, Any] = {"lr_scheduler_type": "constant", "save_steps": 2, "length": 80}
    schedule = {"gradient_accumulation_schedule": {0: 1, 4: 2}}
    small_trainer(tmp_path, model=Line(), max_steps=2, **settings).train()
    small_trainer(tmp_path, model=Line(), max_steps=4, **settings, **schedule).train()
    assert "samples per step: saved 4, now {0: 4, 4: 8} (" in caplog.text
    caplog.clear()
    trainer = small_trainer(tmp_path, model=Line(), max_steps=6, **settings, **schedule)
    trainer.train()
    assert trainer.state.samples_seen == 4 * (4 + 2 * 2)
    assert not caplog.records
