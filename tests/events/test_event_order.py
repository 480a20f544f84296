"""Every event in the table's order, with the payload that the table promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.events.table import Event
from dalsegno.testing import tiny_regression_data
from support.listeners import Journal, Listener
from support.models import Line
from support.small import small_trainer, weights

MICROBATCH = ["microbatch_begin", "before_forward", "after_forward", "before_backward", "after_backward"]
MICROBATCH += ["microbatch_end"]
UPDATE = ["gradients_ready", "pre_optimizer_step", "optimizer_step", "before_zero_grad", "after_zero_grad"]
UPDATE += ["before_scheduler_step", "after_scheduler_step"]
LOG = ["log_step", "log"]
EVALUATE = [
    "evaluate_begin",
    *["before_forward", "after_forward", "prediction_step"] * 2,
    "evaluate_end",
    *LOG,
    "evaluate",
]
SAVE = ["before_save", "save"]


class Oops(Exception):
    pass


def fail(ctx: Any) -> None:
    raise Oops("it broke")


def step(microbatches: int, *boundary: list[str]) -> list[str]:
    between = [event for part in boundary for event in part]
    return ["step_begin", *MICROBATCH * microbatches, *UPDATE, "step_end", "train_metrics", *between, "step_done"]


def saved_step(microbatches: int, *boundary: list[str]) -> list[str]:
    return [*step(microbatches, *boundary), *SAVE]


def two_epochs(output_dir: Path, *callbacks: ds.Callback, **settings: Any) -> ds.Trainer:
    """Three steps an epoch under accumulation 2, the third of one micro-batch; two batches of evaluation."""
    schedule = {"logging_steps": 2, "eval_steps": 3, "save_steps": 4, "num_train_epochs": 2}
    schedule["save_in_background"] = False  # else on_save fires when the disk is done
    parts = {"eval_dataset": tiny_regression_data(10, seed=1)}
    return small_trainer(output_dir, *callbacks, parts=parts, gradient_accumulation_steps=2, **{**schedule, **settings})


FIRST_EPOCH = ["epoch_begin", *step(2), *step(2, LOG), *step(1, EVALUATE), "epoch_end"]
SECOND_EPOCH = ["epoch_begin", *saved_step(2, LOG), *step(2), *step(1, LOG, EVALUATE), "epoch_end"]


def test_the_whole_table_in_order(tmp_path: Path) -> None:
    journal = Journal()
    two_epochs(tmp_path, journal).train()
    beginning, end = ["init_end", "before_load", "train_begin"], [*SAVE, *LOG, "train_end"]
    assert journal.fired == [*beginning, *FIRST_EPOCH, *SECOND_EPOCH, *end]
    # What this run has no reason to fire.
    others = {"load", "step_skipped", "predict", "rollback", "exception"}
    assert {event.handler.removeprefix("on_") for event in Event} - set(journal.fired) == others


def test_a_resumed_leg_goes_on_inside_its_epoch(tmp_path: Path) -> None:
    stopper = Listener({"on_step_end": lambda ctx: ctx.control.stop("enough") if ctx.step == 5 else None})
    two_epochs(tmp_path, stopper).train()
    journal = Journal()
    two_epochs(tmp_path, journal).train()
    rest = [*step(1, LOG, EVALUATE), "epoch_end", *SAVE, *LOG, "train_end"]
    assert journal.fired == ["init_end", "before_load", "load", "train_begin", *rest]


def test_epoch_events_fire_once_in_a_run_of_many_legs(tmp_path: Path) -> None:
    """Also where a leg ends on an epoch's last step, before the epoch's end."""
    epochs: list[str] = []
    for _ in range(20):
        handlers = {
            "on_epoch_begin": lambda ctx: epochs.append(f"begin {ctx.epoch}"),
            "on_epoch_end": lambda ctx: epochs.append(f"end {ctx.epoch}"),
            "on_step_end": lambda ctx: ctx.control.stop("a step at a time"),
        }
        if two_epochs(tmp_path, Listener(handlers)).train().reason == "finished":
            break
    assert epochs == ["begin 0", "end 0", "begin 1", "end 1"]


def test_a_stop_takes_effect_at_its_steps_end_and_saves(tmp_path: Path) -> None:
    journal = Journal()
    stopper = Listener({"on_before_forward": lambda ctx: ctx.control.stop("enough")})
    two_epochs(tmp_path, stopper, journal).train()
    beginning = ["init_end", "before_load", "train_begin", "epoch_begin"]
    assert journal.fired == [*beginning, *saved_step(2), *LOG, "train_end"]


def test_an_exception_ends_everything_at_once(tmp_path: Path) -> None:
    journal = Journal()
    with pytest.raises(Oops):
        two_epochs(tmp_path, journal, Listener({"on_after_backward": fail})).train()
    beginning = ["init_end", "before_load", "train_begin", "epoch_begin", "step_begin"]
    assert journal.fired == [*beginning, *MICROBATCH[:-1], "exception", "train_end"]


def test_finished_steps_are_counted_from_on_step_end_on(tmp_path: Path) -> None:
    journal = Journal(note=lambda ctx: ctx.state.global_step)
    two_epochs(tmp_path, journal).train()
    before = {"step_begin", *MICROBATCH, *UPDATE} - {"before_forward", "after_forward"}
    steps = [number for event, number in journal.notes if event == "step_end"]
    assert steps == [1, 2, 3, 4, 5, 6]
    present = 0
    for event, number in journal.notes:
        present += event == "step_end"
        if event in before or event in ("step_end", "train_metrics", "step_done", *SAVE, *LOG):
            assert number == present, event


def test_what_a_step_will_do_is_known_when_it_begins(tmp_path: Path) -> None:
    foreseen: dict[int, str] = {}
    happened = dict.fromkeys(range(1, 7), "")

    def foresee(ctx: Any) -> None:
        will = [ctx.state.will_log, ctx.state.will_evaluate, ctx.state.will_save]
        foreseen[ctx.state.global_step + 1] = "".join(letter for letter, due in zip("les", will, strict=True) if due)

    def note(letter: str) -> Any:
        def handler(ctx: Any) -> None:
            if getattr(ctx, "kind", "train") == "train":
                happened[ctx.state.global_step] += letter

        return handler

    handlers = {"on_step_begin": foresee, "on_log": note("l"), "on_evaluate": note("e"), "on_save": note("s")}
    two_epochs(tmp_path, Listener(handlers)).train()
    assert foreseen == happened == {1: "", 2: "l", 3: "e", 4: "ls", 5: "", 6: "les"}


def test_what_falls_due_at_an_epochs_end_is_known_too(tmp_path: Path) -> None:
    foreseen: list[tuple[bool, bool, bool]] = []
    journal = Journal(without=("on_train_metrics",))
    by_epoch = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch"}
    watch = Listener(
        {
            "on_optimizer_step": lambda ctx: foreseen.append(
                (ctx.state.will_log, ctx.state.will_evaluate, ctx.state.will_save)
            )
        }
    )
    two_epochs(tmp_path, journal, watch, **by_epoch).train()
    assert foreseen == [(False,) * 3, (False,) * 3, (True,) * 3] * 2
    after = journal.fired[journal.fired.index("epoch_end") + 1 :]
    assert after[: len(LOG + EVALUATE + SAVE)] == LOG + EVALUATE + SAVE


def test_gradients_are_there_from_the_first_backward_to_the_optimizers_step(tmp_path: Path) -> None:
    journal = Journal(note=lambda ctx: all(each.grad is not None for each in ctx.model.parameters()))
    small_trainer(tmp_path, journal, max_steps=2, gradient_accumulation_steps=2).train()
    seen = dict.fromkeys([event for event, _ in journal.notes])
    notes = [(event, there) for event, there in journal.notes if event in (*MICROBATCH, *UPDATE, "step_end")]
    first_step = notes[: len(notes) // 2]
    expected = [False] * 4 + [True] * 8 + [True] * 4 + [False] * 4
    assert [there for _, there in first_step] == expected, seen


def test_grad_norm_is_that_before_clipping(tmp_path: Path) -> None:
    norms: dict[str, list[float]] = {"ready": [], "reported": [], "clipped": [], "at the end": []}

    def norm(ctx: Any) -> float:
        return float(torch.nn.utils.get_total_norm([each.grad for each in ctx.model.parameters()]))

    def clipped(ctx: Any) -> None:
        norms["reported"].append(ctx.grad_norm)
        norms["clipped"].append(norm(ctx))

    handlers = {
        "on_gradients_ready": lambda ctx: norms["ready"].append(norm(ctx)),
        "on_pre_optimizer_step": clipped,
        "on_step_end": lambda ctx: norms["at the end"].append(ctx.grad_norm),
    }
    small_trainer(tmp_path, Listener(handlers), max_steps=3, max_grad_norm=0.01).train()
    assert norms["reported"] == norms["at the end"]
    assert norms["reported"] == pytest.approx(norms["ready"], rel=1e-6), "summed up anew, and perhaps in another order"
    assert min(norms["ready"]) > 0.1
    assert norms["clipped"] == pytest.approx([0.01] * 3, rel=1e-3)


def test_lr_is_the_one_that_the_update_used(tmp_path: Path) -> None:
    used: list[float] = []
    reported: list[float] = []
    logged: list[float] = []
    handlers = {
        "on_optimizer_step": lambda ctx: used.append(ctx.optimizer.param_groups[0]["lr"]),
        "on_step_end": lambda ctx: reported.append(ctx.lr),
        "on_log": lambda ctx: logged.append(ctx.logs["learning_rate"]) if ctx.kind == "train" else None,
    }
    small_trainer(tmp_path, Listener(handlers), max_steps=4, logging_steps=1).train()
    assert used == reported == logged == [0.01, 0.0075, 0.005, 0.0025]


def test_payloads_of_a_microbatch(tmp_path: Path) -> None:
    seen: list[Any] = []
    handlers = {
        "on_microbatch_begin": lambda ctx: seen.append(("begin", ctx.index, ctx.batch["x"].shape[0])),
        "on_before_forward": lambda ctx: seen.append(("call", sorted(ctx.call_kwargs), ctx.call_args)),
        "on_microbatch_end": lambda ctx: seen.append(
            ("end", ctx.index, ctx.is_last, ctx.loss == ctx.outputs["loss"].item())
        ),
    }
    settings = {"max_steps": 2, "gradient_accumulation_steps": 2, "length": 10}
    small_trainer(tmp_path, Listener(handlers), **settings).train()
    call = ("call", ["x", "y"], [])
    both = [("begin", 0, 4), call, ("end", 0, False, True), ("begin", 1, 4), call, ("end", 1, True, True)]
    assert seen == [*both, ("begin", 0, 2), call, ("end", 0, True, True)]


def test_a_handler_may_change_the_call_and_the_loss(tmp_path: Path) -> None:
    def zero_input(ctx: Any) -> None:
        ctx.call_kwargs["x"] = torch.zeros_like(ctx.call_kwargs["x"])

    def no_loss(ctx: Any) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * 0

    changed = small_trainer(tmp_path / "x", Listener({"on_before_forward": zero_input}), model=Line(), max_steps=1)
    before = weights(changed)
    changed.train()
    assert torch.equal(before["layer.weight"], weights(changed)["layer.weight"])
    assert not torch.equal(before["layer.bias"], weights(changed)["layer.bias"])

    silenced = small_trainer(tmp_path / "loss", Listener({"on_before_backward": no_loss}), model=Line(), max_steps=1)
    silenced.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(silenced).items())


def test_a_context_is_reused_and_its_copy_is_kept(tmp_path: Path) -> None:
    contexts: list[Any] = []
    copies: list[Any] = []

    def keep(ctx: Any) -> None:
        contexts.append(ctx)
        copies.append(ctx.copy())

    small_trainer(tmp_path, Listener({"on_step_end": keep}), max_steps=3).train()
    assert contexts[0] is contexts[1] is contexts[2]
    assert [copy.step for copy in copies] == [1, 2, 3]
    assert [copy.state.global_step for copy in copies] == [1, 2, 3]
    assert len({copy.loss for copy in copies}) == 3


def test_a_handler_that_removes_its_callback_skips_no_other_and_is_named(tmp_path: Path) -> None:
    seen: list[int] = []

    def leave(ctx: Any) -> None:
        ctx.trainer.remove_callback("leaver")
        ctx.control.stop("nothing is left to do")

    leaver = Listener({"on_step_end": leave}, name="leaver")
    stayer = Listener({"on_step_end": lambda ctx: seen.append(ctx.step)}, name="stayer")
    result = small_trainer(tmp_path, leaver, stayer, max_steps=3).train()
    assert (seen, result.stopped_by) == ([1], "leaver")


def test_log_step_may_add_to_a_record_and_every_kind_comes_through(tmp_path: Path) -> None:
    records: list[tuple[str, bool]] = []
    handlers = {
        "on_log_step": lambda ctx: ctx.logs.update(mine=ctx.state.global_step),
        "on_log": lambda ctx: records.append((ctx.kind, ctx.logs["mine"] == ctx.state.global_step)),
        "on_step_done": lambda ctx: ctx.trainer.log({"seen": ctx.step}) if ctx.step == 1 else None,
    }
    two_epochs(tmp_path, Listener(handlers), max_steps=3).train()
    assert records == [("user", True), ("train", True), ("eval", True), ("final", True)]


def test_a_loss_changed_after_forward_is_the_one_that_counts(tmp_path: Path) -> None:
    def no_loss(ctx: Any) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * 0

    parts = {"eval_dataset": tiny_regression_data(4, seed=1)}
    trainer = small_trainer(tmp_path, Listener({"on_after_forward": no_loss}), model=Line(), parts=parts, max_steps=1)
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert trainer.evaluate()["eval_loss"] == 0
