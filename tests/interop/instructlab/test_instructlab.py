"""InstructLab's observers: its order, its context, functions; and that they can never hurt the training."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from dalsegno.args.other_names import INSTRUCTLAB_FUNCTIONS
from dalsegno.callbacks import JsonLogger
from dalsegno.interop.instructlab import TrainerCallback
from dalsegno.stateful.component import Stateful
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
from interop.script import Broken, play
from support.held_saves import hold_save
from support.listeners import Listener
from support.parcels import sent
from support.small import same, small_trainer, weights

HOOKS = [
    "train_begin",
    "epoch_begin",
    "step_begin",
    "before_forward",
    "after_backward",
    "pre_optimizer_step",
    "optimizer_step",
    "log",
    "evaluate",
    "save",
    "step_end",
    "epoch_end",
    "train_end",
]


def base() -> Any:
    from instructlab.training import TrainerCallback

    return TrainerCallback


def journal() -> Any:
    """A callback that keeps every context it is given."""

    class Journal(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.contexts: list[Any] = []
            for name in HOOKS:
                setattr(self, f"on_{name}", lambda context: self.contexts.append(context))

        @property
        def seen(self) -> list[tuple[str, int]]:
            return [(context.hook_name.removeprefix("on_"), context.step) for context in self.contexts]

    return Journal()


# --- the order --------------------------------------------------------------------------------------------------------

PASS = ["before_forward", "after_backward"]
UPDATE = ["pre_optimizer_step", "optimizer_step"]


def step(number: int, passes: int, *boundary: str) -> list[tuple[str, int]]:
    return [(name, number) for name in ["step_begin", *PASS * passes, *UPDATE, *boundary, "step_end"]]


FIRST_EPOCH = [("epoch_begin", 0), *step(1, 2), *step(2, 2, "log"), *step(3, 1, "evaluate"), ("epoch_end", 3)]
SECOND_EPOCH = [("epoch_begin", 3), *step(4, 2, "log"), ("save", 4), *step(5, 2), *step(6, 1, "log", "evaluate")]
SECOND_EPOCH += [("epoch_end", 6)]


def test_a_whole_run(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    assert callback.seen == [("train_begin", 0), *FIRST_EPOCH, *SECOND_EPOCH, ("save", 6), ("train_end", 6)]


def test_a_run_that_is_stopped(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback, stop_at=2)
    expected = [("train_begin", 0), ("epoch_begin", 0), *step(1, 2), *step(2, 2, "log"), ("save", 2), ("train_end", 2)]
    assert callback.seen == expected


def test_an_exception_ends_the_training_for_callbacks_too(tmp_path: Path) -> None:
    callback = journal()
    with pytest.raises(Broken):
        play(tmp_path, callback, break_at=2)
    cut = [("step_begin", 2), *[(name, 2) for name in PASS * 2]]
    last, end = callback.seen[-len(cut) - 1 : -1], callback.seen[-1]
    assert last == cut
    assert end == ("train_end", 1), "finished steps"


# --- the context ------------------------------------------------------------------------------------------------------


def at(callback: Any, name: str, number: int) -> Any:
    return next(each for each in callback.contexts if each.hook_name == f"on_{name}" and each.step == number)


def test_its_fields_are_those_of_instructlab(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    names = "hook_name step epoch total_samples total_tokens loss learning_rate grad_norm elapsed_time"
    names += " overall_throughput cuda_mem_allocated batch_metrics val_metrics checkpoint_path output_dir"
    names += " model_name_or_path max_epochs world_size is_local_process_zero is_world_process_zero"
    assert [field.name for field in dataclasses.fields(callback.contexts[0])] == names.split()


def test_what_is_known_when(tmp_path: Path) -> None:
    native: dict[int, dict[str, Any]] = {}
    note = Listener({"on_train_metrics": lambda ctx: native.update({ctx.state.global_step: dict(ctx.metrics)})})
    callback = journal()
    play(tmp_path, callback, note)
    end = at(callback, "step_end", 2)
    assert (end.loss, end.grad_norm) == (native[2]["loss"], native[2]["grad_norm"])
    logged = at(callback, "log", 2)
    assert logged.loss == pytest.approx((native[1]["loss"] + native[2]["loss"]) / 2), "what is in the record"
    assert end.learning_rate == native[3]["learning_rate"], "of the next step"
    assert end.overall_throughput == pytest.approx(8 / end.elapsed_time)
    assert at(callback, "optimizer_step", 2).learning_rate == end.learning_rate
    assert (end.epoch, end.total_samples, end.max_epochs, end.world_size) == (0, 16, 2, 1)
    unknown = ("total_length", "num_loss_counted_tokens", "accumulated_loss", "accumulated_aux_loss")
    counts = {"total_samples": 8, "grad_accum_steps": 2, "num_minibatches": 2}
    assert end.batch_metrics == counts | dict.fromkeys(unknown), "its batches have no tokens"
    assert end.elapsed_time > 0
    last = at(callback, "step_end", 3).batch_metrics
    assert (last["total_samples"], last["grad_accum_steps"], last["num_minibatches"]) == (4, 1, 1)
    evaluation = at(callback, "evaluate", 3)
    assert evaluation.val_metrics["val_loss"] == evaluation.val_metrics["eval_loss"]
    assert evaluation.loss == native[3]["loss"]
    save = at(callback, "save", 4)
    assert save.checkpoint_path == str(tmp_path / "checkpoints" / "step-00000004")
    assert (save.output_dir, save.is_world_process_zero) == (str(tmp_path), True)
    assert [each.epoch for each in callback.contexts if each.hook_name == "on_epoch_end"] == [0, 1]


def test_a_save_is_known_with_the_values_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint is published three steps later, in another epoch."""
    callback = journal()
    holder = hold_save(monkeypatch, 4, until=7)
    small_trainer(tmp_path, holder, callback, max_steps=8, save_steps=4).train()
    save, end = at(callback, "save", 4), at(callback, "step_end", 4)
    assert save.checkpoint_path == str(tmp_path / "checkpoints" / "step-00000004")
    assert (save.epoch, save.total_samples, save.batch_metrics["total_samples"]) == (0, 16, 4)
    assert (save.loss, save.learning_rate) == (end.loss, end.learning_rate)
    assert at(callback, "step_end", 7).checkpoint_path is None, "it is not of this step"


class Tagger(nn.Module):
    """A label for each token, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Embedding(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Both: (batch, sequence)."""
        return nn.functional.cross_entropy(self.head(input_ids).flatten(0, 1), labels.flatten())


def tagged(number: int) -> list[dict[str, torch.Tensor]]:
    """Of sample i the first i % 3 + 1 labels of four count."""
    ids = [torch.arange(index, index + 4) % 8 for index in range(number)]
    return [
        {"input_ids": each, "labels": torch.where(torch.arange(4) <= index % 3, each, -100)}
        for index, each in enumerate(ids)
    ]


def test_tokens_of_a_batch(tmp_path: Path) -> None:
    callback, batches = journal(), []
    note = Listener({"on_microbatch_begin": lambda ctx: batches.append(ctx.batch["labels"])})
    parts = {"train_dataset": tagged(24), "eval_dataset": tagged(10)}
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "eval_steps": 2, "per_device_eval_batch_size": 4}
    small_trainer(tmp_path, callback, note, model=Tagger(), parts=parts, **settings).train()
    for number in (1, 2):
        end = at(callback, "step_end", number)
        counted = sum(int((labels != -100).sum()) for labels in batches[2 * number - 2 : 2 * number])
        assert end.batch_metrics == {
            "total_samples": 8,
            "total_length": 32,
            "num_loss_counted_tokens": counted,
            "accumulated_loss": end.loss * counted,
            "accumulated_aux_loss": None,
            "grad_accum_steps": 2,
            "num_minibatches": 2,
        }
        assert at(callback, "optimizer_step", number).batch_metrics["num_loss_counted_tokens"] == counted
        assert (end.batch_metrics.num_loss_counted_tokens, end.batch_metrics.num_minibatches) == (counted, 2)
    assert at(callback, "evaluate", 2).val_metrics["val_num_tokens"] == sum(index % 3 + 1 for index in range(10))
    with pytest.raises(AttributeError, match=r"batch_metrics.total_size: unknown; available: total_samples, "):
        _ = end.batch_metrics.total_size


def test_functions_have_the_names_of_the_first_proposal(tmp_path: Path) -> None:
    begins: list[Any] = []
    ends: list[Any] = []  # each function is on a thread of its own
    trainer = small_trainer(tmp_path, ds.functions(on_step_end=ends.append, on_epoch_begin=begins.append))
    trainer.args.max_steps = 2
    trainer.train()
    (begin,) = begins
    first, second = ends
    assert begin.batch_metrics.total_samples is None and begin.avg_loss_across_ranks is None
    for number, end in ((1, first), (2, second)):
        assert (end.global_step, end.samples_seen, end.is_main_process) == (number, 4 * number, True)
        assert (end.avg_loss_across_ranks, end.current_lr, end.global_grad_norm) == (
            end.loss,
            end.learning_rate,
            end.grad_norm,
        )
        assert end.loss > 0 and end.batch_metrics.total_samples == 4
        assert end.args is trainer.args


def evaluated_tokens(output_dir: Path) -> int:
    contexts: list[Any] = []
    keep = ds.adapt(type("Keep", (), {"on_evaluate": lambda self, context: contexts.append(context)})(), "instructlab")
    parts = {"train_dataset": tagged(8), "eval_dataset": tagged(7)}
    settings = {"max_steps": 1, "eval_steps": 1, "per_device_eval_batch_size": 2}
    small_trainer(output_dir, keep, model=Tagger(), parts=parts, **settings).train()
    return int(contexts[0].val_metrics["val_num_tokens"])


def test_tokens_of_an_evaluation_are_those_of_all_ranks_without_padding(tmp_path: Path) -> None:
    assert run_ranks(evaluated_tokens, 2, tmp_path) == [sum(index % 3 + 1 for index in range(7))] * 2


def trained_tokens(output_dir: Path) -> list[tuple[dict[str, Any], int]]:
    """What each step's context says, and the labels that this rank's batches had."""
    callback, counted = journal(), [0, 0]

    def count(ctx: Any) -> None:
        counted[ctx.state.global_step] += int((ctx.batch["labels"] != -100).sum())

    note = Listener({"on_microbatch_begin": count})
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    small_trainer(output_dir, callback, note, model=Tagger(), parts={"train_dataset": tagged(24)}, **settings).train()
    return [(dict(at(callback, "step_end", step + 1).batch_metrics), counted[step]) for step in range(2)]


def test_tokens_of_a_step_are_those_of_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(trained_tokens, 2, tmp_path)
    for (told, here), (told_there, there) in zip(first, second, strict=True):
        assert told == told_there
        assert (told["num_loss_counted_tokens"], told["total_length"]) == (here + there, 2 * 2 * 2 * 4)
        assert here != there
        assert told["accumulated_loss"] > 0


def test_nothing_of_an_older_step_lingers(tmp_path: Path) -> None:
    callback = journal()
    play(tmp_path, callback)
    for context in callback.contexts:
        if context.hook_name in ("on_step_begin", "on_before_forward", "on_after_backward", "on_pre_optimizer_step"):
            numbers = (context.loss, context.learning_rate, context.grad_norm, context.elapsed_time)
            assert numbers == (None,) * 4, context
            assert (context.batch_metrics, context.val_metrics, context.checkpoint_path) == ({}, {}, None)
    assert at(callback, "step_end", 5).val_metrics == {}
    assert at(callback, "step_end", 5).checkpoint_path is None


def test_each_callback_has_a_context_of_its_own(tmp_path: Path) -> None:
    class Vandal(base()):  # type: ignore[misc]
        def on_evaluate(self, context: Any) -> None:
            context.val_metrics.clear()
            context.step = -1

    callback = journal()
    play(tmp_path, Vandal(), callback)
    assert "val_loss" in at(callback, "evaluate", 3).val_metrics


DIFFERS_BY_DESIGN = {"is_local_process_zero": None, "is_world_process_zero": None}


def contexts_on_a_rank(output_dir: Path) -> list[dict[str, Any]]:
    contexts: list[Any] = []

    class Keep:
        pass

    keep = Keep()
    for name in HOOKS:
        setattr(keep, f"on_{name}", contexts.append)
    play(output_dir, ds.adapt(keep, "instructlab"))
    return [{**dataclasses.asdict(each), **DIFFERS_BY_DESIGN} for each in contexts]


def test_on_all_ranks_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(contexts_on_a_rank, 2, tmp_path)
    assert first == second
    losses = [each["loss"] for each in first if each["hook_name"] == "on_step_end"]
    assert all(loss is not None for loss in losses)
    ends = [each for each in first if each["hook_name"] == "on_step_end"]
    for each in ends:
        rate = each["batch_metrics"]["total_samples"] / each["elapsed_time"]
        assert each["overall_throughput"] == pytest.approx(rate)
    assert all(each["elapsed_time"] is None for each in first if each["hook_name"] == "on_optimizer_step")
    assert first[0]["world_size"] == 2
    logged = [each["overall_throughput"] for each in first if each["hook_name"] == "on_log"]
    assert all(value > 0 for value in logged)
    lengths = [each["batch_metrics"]["total_length"] for each in first if each["hook_name"] == "on_step_end"]
    assert set(lengths) == {None}


# --- never felt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3)])
def test_what_it_raises_is_counted_and_never_felt(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(base()):  # type: ignore[misc]
        def on_step_end(self, context: Any) -> None:
            raise error

    adapted, other = ds.adapt(Fails()), journal()
    with_it = small_trainer(tmp_path / "with", adapted, other, max_steps=3)
    assert with_it.train().reason == "finished"
    assert (adapted.counts.ran, adapted.counts.failed) == (3, 3)  # type: ignore[attr-defined]
    (record,) = [each for each in caplog.records if "3 calls, 3 failed, 0 dropped" in each.message]
    kind = f"{type(error).__name__}: {error}"
    assert record.message.endswith(f"0 dropped; on_step_end failed in all of 3 calls, first with {kind}")
    assert record.levelno == logging.ERROR
    assert ("step_end", 3) in other.seen
    without = small_trainer(tmp_path / "without", max_steps=3)
    without.train()
    assert same(weights(with_it), weights(without))


def test_a_slow_one_delays_no_other(tmp_path: Path) -> None:
    """It is held until the other has seen the whole training: a thread for both would never get there."""
    other_is_done = threading.Event()
    order: list[str] = []

    class Slow(base()):  # type: ignore[misc]
        def on_train_begin(self, context: Any) -> None:
            assert other_is_done.wait(60)
            order.append("slow")

    class Quick(base()):  # type: ignore[misc]
        def on_step_end(self, context: Any) -> None:
            order.append("quick")
            if context.step == 3:
                other_is_done.set()

    small_trainer(tmp_path, Slow(), Quick(), max_steps=3).train()
    assert order == ["quick", "quick", "quick", "slow"]


def test_async_methods_and_no_thread_left(tmp_path: Path) -> None:
    seen: list[int] = []

    class Async(base()):  # type: ignore[misc]
        async def on_step_end(self, context: Any) -> None:
            seen.append(context.step)

    before = set(threading.enumerate())
    small_trainer(tmp_path, Async(), max_steps=3).train()
    assert seen == [1, 2, 3]
    assert set(threading.enumerate()) == before


# --- functions --------------------------------------------------------------------------------------------------------


def test_functions_get_what_their_event_adds(tmp_path: Path) -> None:
    seen: list[Any] = []

    def run_eval(context: Any, checkpoint_path: str, **kwargs: Any) -> None:
        seen.append(("run_eval", context.step, Path(checkpoint_path).name, kwargs))

    def end_if_diverged(context: Any, validation_loss: float) -> None:
        seen.append(("end_if_diverged", context.step, validation_loss == context.val_metrics["val_loss"]))

    async def note(context: Any) -> None:
        seen.append(("note", context.step))

    observers = ds.functions(on_save=run_eval, on_evaluate=[end_if_diverged, note])
    play(tmp_path, observers)
    assert sorted(seen) == [
        ("end_if_diverged", 3, True),
        ("end_if_diverged", 6, True),
        ("note", 3),
        ("note", 6),
        ("run_eval", 4, "step-00000004", {}),
        ("run_eval", 6, "step-00000006", {}),
    ]
    assert observers.key == "functions(run_eval, end_if_diverged, note)"
    assert {name: counts.ran for name, counts in observers.counts.items()} == {  # type: ignore[attr-defined]
        "run_eval": 2,
        "end_if_diverged": 2,
        "note": 2,
    }


def test_a_function_for_each_event_of_the_proposal(tmp_path: Path) -> None:
    names = "train_begin epoch_begin step_begin before_forward after_forward before_backward after_backward"
    names += " before_optimizer_step after_optimizer_step log evaluate save step_end epoch_end train_end"
    seen: dict[str, int] = {}

    def count(context: Any, **kwargs: Any) -> None:
        seen[context.hook_name] = seen.get(context.hook_name, 0) + 1

    observers = [ds.functions(name=name, **{f"on_{name}": count}) for name in names.split()]
    play(tmp_path, *observers)
    passes = dict.fromkeys(["before_forward", "after_forward", "before_backward", "after_backward"], 10)
    steps = dict.fromkeys(["step_begin", "before_optimizer_step", "after_optimizer_step", "step_end"], 6)
    few = {"train_begin": 1, "epoch_begin": 2, "log": 3, "evaluate": 2, "save": 2, "epoch_end": 2, "train_end": 1}
    assert seen == {f"on_{name}": times for name, times in {**passes, **steps, **few}.items()}


@pytest.mark.parametrize("argument", INSTRUCTLAB_FUNCTIONS)
def test_the_arguments_of_the_proposal_are_answered_by_functions(argument: str) -> None:
    with pytest.raises(ds.UnknownName, match="callbacks=") as caught:
        ds.TrainingArguments("runs/a", **{argument: print})  # type: ignore[arg-type]
    (event,) = re.findall(r"dalsegno\.functions\((\w+)=…\)", str(caught.value))
    ds.functions(**{event: print})


def test_a_save_on_demand_is_a_save(tmp_path: Path) -> None:
    steps: list[int] = []
    ask = Listener({"on_step_end": lambda ctx: ctx.trainer.save() if ctx.step == 2 else None})
    observers = ds.functions(on_save=lambda context: steps.append(context.step))
    small_trainer(tmp_path, observers, ask, max_steps=3).train()
    assert steps == [2]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"on_sav": print}, "unknown event 'on_sav'; did you mean 'on_save'?"),
        ({"on_checkpoint": print}, "unknown event 'on_checkpoint'; did you mean 'on_save'?"),
        ({"on_validation_loss": print}, "unknown event 'on_validation_loss'; did you mean 'on_evaluate'?"),
        ({"on_save": "run_eval"}, "functions(on_save='run_eval'): needs a function, or a list of functions"),
        ({"on_save": [lambda context: None, 3]}, "functions(on_save=3): needs a function"),
        ({"on_save": lambda: None}, "functions(on_save=<lambda>): cannot be called with (context, checkpoint_path=)"),
        (
            {"on_log": lambda context, checkpoint_path: None},
            "functions(on_log=<lambda>): cannot be called with (context, loss=): missing a required argument: 'check",
        ),
    ],
)
def test_functions_that_cannot_be(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.functions(**given)
    assert str(caught.value).startswith(complaint)


def touch_noted(context: Any) -> None:
    (Path(context.output_dir) / "noted").touch()


def test_functions_arrive_at_the_ranks_of_a_launch(tmp_path: Path) -> None:
    arrived = sent(ds.functions(on_save=touch_noted), tmp_path)
    assert arrived.key == "functions(touch_noted)"
    play(tmp_path / "run", arrived)
    assert (tmp_path / "run" / "noted").exists()


def test_functions_are_in_the_background_already() -> None:
    with pytest.raises(ds.ConfigurationError, match="already runs in the background"):
        ds.Background(ds.functions(on_save=print))


def functions_on_a_rank(output_dir: Path) -> int:
    seen: list[int] = []
    play(output_dir, ds.functions(on_step_end=lambda context: seen.append(context.step)))
    return len(seen)


def test_functions_are_called_on_rank_zero_alone(tmp_path: Path) -> None:
    calls, none = run_ranks(functions_on_a_rank, 2, tmp_path)
    assert calls > 0
    assert none == 0


# --- state ------------------------------------------------------------------------------------------------------------


class Remembers:
    """One with state, which its own library would lose."""

    def __init__(self, start: float) -> None:
        self.sum = start

    def on_step_end(self, context: Any) -> None:
        self.sum += context.loss

    def on_log(self, context: Any) -> None:
        if context.step == 3:
            raise ValueError("never felt")

    def state_dict(self) -> dict[str, float]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.sum = state["sum"]


def remembering(output_dir: Path) -> ds.Trainer:
    callback = Remembers(1.5)
    show = Listener({"on_log_step": lambda ctx: ctx.logs.update(sum=callback.sum)})
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    settings = {"max_steps": 12, "logging_steps": 1, "save_steps": 4}
    return small_trainer(output_dir, ds.adapt(callback, "instructlab"), show, JsonLogger(), parts=parts, **settings)


def test_state_survives_a_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert isinstance(ds.adapt(Remembers(0.0), "instructlab"), Stateful)
    assert_resume_equivalent(remembering, [FaultPlan(event=ds.Event.STEP_END, count=7)], folder=tmp_path)


class Observes(TrainerCallback):
    """Counts on another thread, which reading would disturb."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, context: Any) -> None:
        self.steps += 1


def test_what_it_counts_on_its_thread_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path, Observes(), max_steps=4, save_steps=1).train()
    assert "no checkpoint contains" not in caplog.text
