"""``ds.Run`` around a hand-written loop: the same events, state and checkpoints as the Trainer's."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.logs import drop_wall_clock, read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent, run_ranks, tiny_regression_data
from support.builtins import NAMES, build
from support.models import Line
from support.own_loops import OwnLoop
from support.small import rows


class Listener(ds.Callback):
    """Records the events that it receives."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        self.heard.append("train_begin")

    def on_epoch_begin(self, ctx: ds.EpochContext) -> None:
        self.heard.append(f"epoch_begin {ctx.epoch}")

    def on_step_begin(self, ctx: ds.Context) -> None:
        self.heard.append("step_begin")

    def on_microbatch_begin(self, ctx: ds.MicrobatchBeginContext) -> None:
        self.heard.append(f"microbatch_begin {ctx.index} of {ctx.samples} samples")

    def on_pre_optimizer_step(self, ctx: ds.PreOptimizerStepContext) -> None:
        gradients = [parameter.grad is not None for parameter in ctx.model.parameters()]
        self.heard.append(f"pre_optimizer_step {all(gradients)}")

    def on_optimizer_step(self, ctx: ds.Context) -> None:
        self.heard.append("optimizer_step")

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.heard.append(f"step_end {ctx.step} lr {ctx.lr:g}")

    def on_train_end(self, ctx: ds.TrainEndContext) -> None:
        self.heard.append(f"train_end {ctx.reason}")


def test_killed_and_resumed_it_is_as_if_it_had_never_been_killed(tmp_path: Path) -> None:
    moments = [
        FaultPlan(event=ds.Event.STEP_END, count=3),  # before the first checkpoint
        FaultPlan(event=ds.Event.STEP_END, count=17),  # in the second epoch
        FaultPlan(operation="write", path=".partial", count=6),
    ]
    assert_resume_equivalent(OwnLoop, moments, folder=tmp_path)
    assert (tmp_path / "killed" / "logs" / "rewound").is_dir(), "nothing was ever rewound, so nothing was shown"


def test_events_come_in_order_with_gradients_and_the_rate_that_was_used(tmp_path: Path) -> None:
    listener = Listener()
    OwnLoop(tmp_path, listener, max_steps=2).train()
    assert listener.heard == [
        "train_begin",
        "epoch_begin 0",
        "step_begin",
        "microbatch_begin 0 of 4 samples",
        "pre_optimizer_step True",
        "optimizer_step",
        "step_end 1 lr 0.01",
        "step_begin",
        "microbatch_begin 0 of 4 samples",
        "pre_optimizer_step True",
        "optimizer_step",
        "step_end 2 lr 0.01",
        "train_end finished",
    ]


def test_a_finished_run_has_no_batches_left_and_tells_its_result(tmp_path: Path) -> None:
    first = OwnLoop(tmp_path).train()
    before = (tmp_path / "logs" / "train.jsonl").read_bytes()
    again = OwnLoop(tmp_path)
    with again.run() as run:
        assert list(run.batches()) == []
    assert run.result is not None and first is not None
    assert (run.result.reason, run.result.global_step, run.result.metrics) == ("finished", 40, first.metrics)
    assert (tmp_path / "logs" / "train.jsonl").read_bytes() == before


def test_a_leg_that_cannot_begin_has_no_result(tmp_path: Path) -> None:
    run = OwnLoop(tmp_path).run()
    with pytest.raises(ZeroDivisionError), run:
        next(run.batches())
        1 / 0  # noqa: B018
    assert run.result is not None and run.result.reason == "exception"
    with pytest.raises(ds.ConfigurationError, match="there is no checkpoint to resume from"), run:
        pass
    assert run.result is None


def test_a_callback_that_needs_what_the_loop_cannot_fire_is_refused(tmp_path: Path) -> None:
    class NeedsBackward(ds.Callback):
        def on_after_backward(self, ctx: ds.BackwardContext) -> None: ...

    with pytest.raises(ds.EventNotFired, match=r"NeedsBackward needs on_after_backward, which a loop around"):
        OwnLoop(tmp_path, NeedsBackward()).run()


def test_a_step_that_is_not_ended_is_an_error_that_says_so(tmp_path: Path) -> None:
    said = r"step 1 did not end before .* run.is_last_microbatch is true.* To accumulate .*gradient_accumulation_steps"
    with (
        pytest.raises(ds.ConfigurationError, match=said),
        OwnLoop(tmp_path).run() as run,
    ):
        for _ in run.batches():
            pass


class Accumulating(OwnLoop):
    """Three batches a step; of the 13 in an epoch one is left, with two samples. In double precision."""

    def __init__(self, output_dir: Path, *callbacks: ds.Callback, **settings: object) -> None:
        chosen = {
            "gradient_accumulation_steps": 3,
            "max_steps": -1,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "eval_steps": 0,
        }
        super().__init__(output_dir, *callbacks, **{**chosen, **settings})
        self.model = Line().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)
        self.loader = DataLoader(tiny_regression_data(50), batch_size=4)

    def train(self) -> ds.TrainResult | None:
        with self.run() as run:
            total = 0.0
            for batch in run.batches():
                with run.accumulate():
                    loss = self.model(**{name: tensor.double() for name, tensor in batch.items()})
                    loss = loss * run.microbatch_weight
                    loss.backward()
                total += loss.item()
                if run.is_last_microbatch:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    run.step_end(loss=total)
                    total = 0.0
        return run.result


def test_several_batches_a_step_and_what_is_left_at_an_epochs_end(tmp_path: Path) -> None:
    """As by whole steps of 12 samples, and one of the 2 that are left: each the mean over its samples."""
    loop = Accumulating(tmp_path, JsonLogger())
    result = loop.train()
    assert result is not None and (result.reason, result.global_step) == ("finished", 10)

    model, losses = Line().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = tiny_regression_data(50)
    for _ in range(2):
        for first in range(0, 50, 12):
            batch = rows(data, range(first, min(first + 12, 50)))
            loss = model(**{name: tensor.double() for name, tensor in batch.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for mine, whole in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    logged = [record["loss"] for record in read_records(tmp_path / "logs" / "train.jsonl") if "loss" in record]
    assert logged == pytest.approx(losses, rel=1e-5)  # a float is kept in the model's default precision


def test_a_step_that_is_ended_too_early_is_an_error_that_says_so(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path, gradient_accumulation_steps=4)
    with pytest.raises(ds.ConfigurationError, match=r"after 1 of the 4 batches .* only if run.is_last_microbatch"):
        loop.train()


def accumulate_on_ranks(wrapping: str) -> list[tuple[bool, float, float]]:
    """After each micro-batch: is it the last, its weight, and this rank's part of the gradient."""
    seen = []
    model = Line()
    called: torch.nn.Module = DistributedDataParallel(model) if wrapping == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.0)
    data = [rows(tiny_regression_data(8), [2 * collectives.rank() + 4 * index]) for index in range(2)]
    with TemporaryDirectory() as folder:
        folder = collectives.broadcast(folder, "where the run is")
        args = ds.TrainingArguments(folder, max_steps=1, gradient_accumulation_steps=2, save_steps=0, disable_tqdm=True)
        with ds.Run(args, model=called, optimizer=optimizer, loader=data) as run:
            for batch in run.batches():
                with run.accumulate():
                    loss = called(**batch) * run.microbatch_weight
                    loss.backward()
                gradient = model.layer.bias.grad
                if gradient is None:  # FSDP2 keeps what is not reduced to itself
                    value = float("nan")
                else:
                    value = float(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
                seen.append((run.is_last_microbatch, run.microbatch_weight, value))
                if run.is_last_microbatch:
                    optimizer.step()
                    norm = torch.nn.utils.clip_grad_norm_(called.parameters(), 1e9)
                    run.step_end(loss=loss, grad_norm=norm)
                    seen.append((True, 0.0, float(run.state.global_step)))
    return seen


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp"])
def test_gradients_are_reduced_in_a_steps_last_batch_only(wrapping: str) -> None:
    first, second = run_ranks(accumulate_on_ranks, 2, wrapping)
    assert [each[:2] for each in first] == [(False, 0.5), (True, 0.5), (True, 0.0)]
    assert str(first[0][2]) == "nan" or first[0][2] != second[0][2]  # each its own, as yet
    model = Line()
    model(**rows(tiny_regression_data(8), [0, 2, 4, 6])).backward()
    assert model.layer.bias.grad is not None
    assert first[1][2] == second[1][2] == pytest.approx(float(model.layer.bias.grad), rel=1e-5)


@pytest.mark.parametrize("loss", [torch.ones(3), "much", None])
def test_what_is_no_loss_is_refused(tmp_path: Path, loss: Any) -> None:
    with OwnLoop(tmp_path).run() as run:
        next(run.batches())
        with pytest.raises(ds.ConfigurationError, match=r"step_end\(loss=…\): .*; needs one number"):
            run.step_end(loss=loss)


@pytest.mark.parametrize("returned", [3.0, None, {"eval_loss": "3.0"}, {"eval_loss": torch.ones(2)}])
def test_what_is_no_evaluation_is_refused(tmp_path: Path, returned: Any) -> None:
    loop = OwnLoop(tmp_path, eval_steps=1)
    loop.evaluate = lambda: returned  # type: ignore[method-assign]
    with pytest.raises(ds.ConfigurationError, match=r"evaluate= returned .*; it must return numbers by name"):
        loop.train()


def test_metrics_may_be_tensors_and_counts(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path, eval_steps=40)
    loop.evaluate = lambda: {"eval_loss": torch.tensor(0.5), "eval_samples": 3}  # type: ignore[dict-item,method-assign]
    loop.train()
    (record,) = [each for each in read_records(tmp_path / "logs" / "train.jsonl") if each.get("kind") == "eval"]
    assert (record["eval_loss"], record["eval_samples"]) == (0.5, 3)


def test_without_with_there_are_no_batches(tmp_path: Path) -> None:
    """Nothing would be restored, saved or ended."""
    run = OwnLoop(tmp_path).run()
    with pytest.raises(ds.ConfigurationError, match=r"with ds.Run\(…\) as run: for batch in run.batches\(\)"):
        next(run.batches())
    assert not (tmp_path / "run.json").exists()
    with run:
        pass
    with pytest.raises(ds.ConfigurationError, match=r"with ds.Run\(…\) as run"):
        next(run.batches())


def test_the_page_says_which_builtins_are_refused(tmp_path: Path) -> None:
    refused = []
    for name in NAMES:
        try:
            OwnLoop(tmp_path, build(name)).run()
        except ds.EventNotFired:
            refused.append(name)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md").read_text()
    assert "| built-ins that are refused | " + ", ".join(f"`{name}`" for name in refused) + " |" in page


def test_a_step_that_has_not_begun_cannot_end(tmp_path: Path) -> None:
    with (
        pytest.raises(ds.ConfigurationError, match="no step has begun"),
        OwnLoop(tmp_path).run() as run,
    ):
        run.step_end(loss=torch.tensor(1.0))


def test_a_loop_over_epochs_is_told_that_one_pass_has_them_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, steps = OwnLoop(tmp_path), []
    with loop.run() as run:
        for _ in range(2):
            for batch in run.batches():
                run.step_end(loss=loop.update(batch))
                if run.state.global_step == 9:
                    break
            steps.append(run.state.global_step)
        assert "no batch is left" not in caplog.text  # a pass that was left goes on in the next one
        assert [*run.batches()] == []
    assert steps == [9, 40] and "the one before ended behind step 40" in caplog.text


def test_leaving_the_loop_early_is_told_as_such_and_can_be_gone_on_with(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path)
    with loop.run() as run:
        for batch in run.batches():
            run.step_end(loss=loop.update(batch))
            if run.state.global_step == 9:
                break
    assert run.result is not None
    assert (run.result.reason, run.result.stopped_by, run.result.global_step) == ("stopped", "the loop", 9)
    result = OwnLoop(tmp_path).train()
    assert result is not None and (result.reason, result.global_step) == ("finished", 40)


def test_an_exception_in_the_loop_ends_the_leg_and_goes_up_unchanged(tmp_path: Path) -> None:
    listener = Listener()
    loop = OwnLoop(tmp_path, listener)
    with pytest.raises(ZeroDivisionError), loop.run() as run:
        for _ in run.batches():
            _ = 1 / 0
    assert listener.heard[-1] == "train_end exception"
    assert run.result is not None and run.result.why == "ZeroDivisionError: division by zero"


def test_stop_save_and_log_from_within_the_loop(tmp_path: Path) -> None:
    loop = OwnLoop(tmp_path, save_steps=1000)
    with loop.run() as run:
        for batch in run.batches():
            if run.state.global_step == 4:
                run.save()
                run.log({"note": 4})
            if run.state.global_step == 8:
                run.stop("seen enough")
            run.step_end(loss=loop.update(batch))
    assert run.result is not None
    assert (run.result.reason, run.result.why, run.result.stopped_by) == ("stopped", "seen enough", "the program")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000009"]
    notes = [record for record in read_records(tmp_path / "logs" / "train.jsonl") if record.get("kind") == "user"]
    assert [(note["global_step"], note["note"]) for note in notes] == [(4, 4)]


def test_state_of_the_users_own_is_saved_by_name(tmp_path: Path) -> None:
    class Counter:
        total = 0

        def state_dict(self) -> dict[str, int]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.total = state["total"]

    def train(steps: int) -> Counter:
        loop, counter = OwnLoop(tmp_path, max_steps=steps), Counter()
        with loop.run({"counter": counter}) as run:
            for batch in run.batches():
                counter.total += 1
                run.step_end(loss=loop.update(batch))
        return counter

    assert train(5).total == 5
    assert train(9).total == 9


def test_variables_of_the_loop_are_saved_and_loaded_into_the_objects_that_it_knows(tmp_path: Path) -> None:
    def train(steps: int) -> dict[str, Any]:
        loop, losses, recent, sums = OwnLoop(tmp_path, max_steps=steps), [], deque(maxlen=3), {"all": 0.0}
        table, pair, mean = np.zeros(20), ([0], "a"), torch.zeros(2)
        kept = {"losses": losses, "hidden": torch.zeros(2), "best": None, "sums": sums, "mean": mean, "pair": pair}
        kept |= {"twin": None, "table": table, "tail": table[5:], "longer": torch.zeros(1), "old": losses}
        with loop.run({"kept": kept, "recent": recent}) as run:
            for batch in run.batches():
                loss = loop.update(batch)
                losses.append(loss.item())
                recent.append(loss.item())
                sums["all"] += loss.item()
                table[len(losses)] = loss.item()
                pair[0][0] += 1
                mean.add_(1)
                kept["hidden"] = kept["twin"] = kept["hidden"] + 1
                kept["best"] = min(losses)
                kept["longer"] = torch.zeros(len(losses))
                kept["old"] = []
                run.step_end(loss=loss)
        assert kept["losses"] is losses and kept["sums"] is sums and kept["table"] is table and kept["mean"] is mean
        return kept | {"recent": recent}

    first, second = train(5), train(9)
    assert len(second["losses"]) == 9 and second["losses"][:5] == first["losses"]
    assert second["hidden"].tolist() == [9.0, 9.0] and second["best"] == min(second["losses"])
    assert [*second["recent"]] == second["losses"][-3:]
    assert second["sums"] == {"all": sum(second["losses"])}
    assert second["table"][1:10].tolist() == second["losses"] and second["tail"][:5].tolist() == second["losses"][4:]
    assert second["pair"] == ([9], "a") and second["mean"].tolist() == [9.0, 9.0]
    assert second["twin"] is second["hidden"] and len(second["longer"]) == 9 and second["old"] == []


def test_what_shares_memory_at_a_save_does_so_after_a_resume(tmp_path: Path) -> None:
    def train(steps: int) -> dict[str, Any]:
        loop, kept = OwnLoop(tmp_path, max_steps=steps), {"now": torch.zeros(2), "all": []}
        with loop.run({"kept": kept}) as run:
            for batch in run.batches():
                kept["now"] += 1
                if run.state.global_step % 2 == 0:
                    kept["now"] = kept["now"].clone()
                    kept["all"].append(kept["now"])
                run.step_end(loss=loop.update(batch))
        return kept

    train(5)
    assert [each[0].item() for each in train(8)["all"]] == [3.0, 5.0, 7.0, 8.0]


@pytest.mark.parametrize("due", [{"save_steps": 13}, {"save_strategy": "epoch"}], ids=["at the step", "at the epoch"])
def test_a_loop_left_at_an_epochs_last_step_has_its_checkpoint(tmp_path: Path, due: dict[str, object]) -> None:
    """The checkpoint is taken at the epoch's end, which comes when the next batch is asked for; here it never is."""
    settings = {"max_steps": 20, "eval_steps": 0, **due}
    unbroken, broken = OwnLoop(tmp_path / "a", **settings), OwnLoop(tmp_path / "b", **settings)
    unbroken.train()
    with broken.run() as run:
        for batch in run.batches():
            run.step_end(loss=broken.update(batch))
            if run.state.global_step == 13:
                break
    assert run.result is not None
    assert run.result.checkpoint == tmp_path / "b/checkpoints/step-00000013"
    again = OwnLoop(tmp_path / "b", **settings)
    with again.run() as run:
        for batch in run.batches():
            run.step_end(loss=again.update(batch))
    assert run.resumed_from == tmp_path / "b/checkpoints/step-00000013"
    for one, other in zip(unbroken.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    logs = [[drop_wall_clock(record) for record in read_records(tmp_path / run / "logs/train.jsonl")] for run in "ab"]
    assert logs[0] == logs[1]


def test_a_loop_left_in_the_middle_saves_nothing(tmp_path: Path) -> None:
    """Behind an epoch's last step: the batch that is asked for next belongs to the epoch after it."""
    loop = OwnLoop(tmp_path, eval_steps=0, save_steps=14)
    with loop.run() as run:
        for batch in run.batches():
            if run.state.global_step == 13:
                break
            run.step_end(loss=loop.update(batch))
    assert run.result is not None
    assert run.result.checkpoint is None
