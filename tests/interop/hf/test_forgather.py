"""Forgather's callbacks: the events that its own trainer fires, and with which numbers.

Its classes do not install beside these versions of everything; the ones here have their contracts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, assert_resume_equivalent
from support.listeners import Listener
from support.small import small_trainer


def base() -> Any:
    from forgather.ml.trainer.trainer_types import TrainerCallback

    return TrainerCallback


class Words(nn.Module):
    """Takes ``input_ids``, so that tokens are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: (batch, sequence)."""
        logits = self.head(self.embedding(input_ids[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def words(number: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(16, (6,), generator=generator)} for _ in range(number)]


def train(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    parts = {"train_dataset": words(40), "eval_dataset": words(8, seed=1)}
    given = {"max_steps": 9, "logging_steps": 2, "eval_steps": 4, **settings}
    trainer = small_trainer(output_dir, *callbacks, model=Words(), parts=parts, **given)
    trainer.train()
    return trainer


def journal() -> Any:
    class Journal(base()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, dict[str, Any]]] = []

        def on_train_metrics(
            self, args: Any, state: Any, control: Any, *, loss: float, grad_norm: float, tokens: int, **kwargs: Any
        ) -> None:
            given = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
            self.seen.append(("train_metrics", state.global_step, given))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(("step_end", state.global_step, {}))

        def on_log_step(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            self.seen.append(("log_step", state.global_step, dict(logs)))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            self.seen.append(("log", state.global_step, dict(logs)))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.seen.append(("evaluate", state.global_step, dict(metrics)))

    return Journal()


def test_an_evaluation_is_told_once(tmp_path: Path) -> None:
    callback = journal()
    train(tmp_path, callback)
    rest = [(name, step) for name, step, _ in callback.seen if name in ("log_step", "log", "evaluate")]
    records = {step: [("log_step", step), ("log", step)] for step in (2, 4, 6, 8)}
    evaluations = {step: [("evaluate", step)] for step in (4, 8)}
    expected = [each for step in (2, 4, 6, 8) for each in records[step] + evaluations.get(step, [])]
    assert rest == [*expected, ("log_step", 9), ("log", 9)], "the last is the final record"


def test_metrics_of_a_step_come_before_its_count(tmp_path: Path) -> None:
    native: list[dict[str, Any]] = []
    callback = journal()
    train(tmp_path, callback, Listener({"on_train_metrics": lambda ctx: native.append(dict(ctx.metrics))}))
    steps = [(name, step) for name, step, _ in callback.seen if name in ("train_metrics", "step_end")]
    assert steps == [each for step in range(9) for each in (("train_metrics", step), ("step_end", step + 1))]
    given = [metrics for name, _, metrics in callback.seen if name == "train_metrics"]
    assert given == [{name: each[name] for name in ("loss", "grad_norm", "tokens")} for each in native]
    assert {metrics["tokens"] for metrics in given} == {24}


def test_the_metrics_of_a_step_reach_a_class_of_dalsegno_under_forgathers_names(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    class Watch(ds.TrainerCallback):
        def on_train_metrics(  # type: ignore[no-untyped-def, override]
            self,
            args: Any,
            state: Any,
            control: Any,
            loss: Any = None,
            grad_norm: Any = None,
            tokens: Any = None,
            **kw: Any,
        ) -> None:
            seen.append((loss, grad_norm, tokens))
            assert kw["metrics"]["loss"] == loss

    train(tmp_path, Watch())
    assert len(seen) == 9
    assert all(loss > 0 and grad_norm > 0 and tokens == 24 for loss, grad_norm, tokens in seen)


def test_the_numbers_of_a_record_are_those_of_its_interval(tmp_path: Path) -> None:
    norms: list[float] = []
    rates: list[float] = []

    def note(ctx: Any) -> None:
        norms.append(ctx.grad_norm)
        rates.append(float(ctx.optimizer.param_groups[0]["lr"]))
        ctx.state.total_flos += 100.0

    callback = journal()
    train(tmp_path, Listener({"on_step_end": note}), callback, JsonLogger(), logging_steps=3)
    logged = [(step, logs) for name, step, logs in callback.seen if name == "log" and "loss" in logs]
    assert [step for step, _ in logged] == [3, 6, 9]
    for step, logs in logged:
        own = norms[step - 3 : step]
        assert logs["grad_norm"] == pytest.approx(math.sqrt(sum(norm**2 for norm in own) / 3), rel=1e-12)
        assert logs["max_grad_norm"] == max(own)
        assert (logs["tokens"], logs["total_tokens"], logs["total_flos"]) == (72, 24 * step, 100.0 * step)
        assert logs["learning_rate"] == rates[step - 1], "of the next step"
    ours = [record for record in read_records(tmp_path / "logs" / "train.jsonl") if "loss" in record]
    assert [(record["tokens"], record["grad_norm"]) for record in ours] == [
        (24 * step, norms[step - 1]) for step in (3, 6, 9)
    ], "dalsegno's own records are as they were"


def test_what_is_added_to_a_record_is_heard_by_those_after_it(tmp_path: Path) -> None:
    heard: list[tuple[str, Any]] = []

    class PeakMemory(base()):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logs["peak_mem"] = state.global_step

        def on_log_step(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logs["tok_per_sec"] = logs.get("tokens")

    class Later(base()):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            heard.append(("later", logs["peak_mem"]))
            heard.append(("speed", logs["tok_per_sec"]))

    before = Listener({"on_log": lambda ctx: heard.append(("before", ctx.logs.get("peak_mem")))}, name="before")
    after = Listener({"on_log": lambda ctx: heard.append(("after", ctx.logs.get("peak_mem")))}, name="after")
    train(tmp_path, before, PeakMemory(), Later(), after, max_steps=2, eval_steps=0)
    final = [("before", None), ("later", 2), ("speed", None), ("after", 2)]
    assert heard == [("before", None), ("later", 2), ("speed", 48), ("after", 2), *final]


# --- its logger -------------------------------------------------------------------------------------------------------


class JsonArray:
    """Of the contract of Forgather's JsonLogger: a new file is opened for creation only; a saved path is continued."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.last_step = -1
        self._records: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.path is not None:
            records = json.loads(Path(self.path).read_text())
            self._records = [record for record in records if record["global_step"] <= self.last_step]
            return
        Path(args.logging_dir).mkdir(parents=True, exist_ok=True)
        self.path = str(Path(args.logging_dir) / "trainer_logs.json")
        with Path(self.path).open("x") as file:
            file.write("[]")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self._write(state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        self._write(state, metrics)

    def _write(self, state: Any, data: dict[str, Any]) -> None:
        assert self.path is not None
        self._records.append({"global_step": state.global_step, **data})
        self.last_step = state.global_step
        Path(self.path).write_text(json.dumps(self._records))

    def state_dict(self) -> dict[str, Any]:
        return {"log_path": self.path, "last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.path, self.last_step = state["log_path"], state["last_step"]


def logger() -> Any:
    return type("JsonLogger", (JsonArray, base()), {})()


class Killed(Exception): ...


def killed_at(step: int) -> Listener:
    def kill(ctx: Any) -> None:
        if ctx.step == step:
            raise Killed

    return Listener({"on_step_end": kill}, name="killer")


def test_its_logger_starts_over_after_a_kill_before_the_first_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(tmp_path, logger(), killed_at(3), save_steps=4)
    with pytest.raises(Killed):
        train(tmp_path, logger(), killed_at(7), save_steps=4)
    train(tmp_path, last := logger(), save_steps=4)
    files = sorted(tmp_path.glob("runs/*/trainer_logs.json"))
    assert len(files) == 2, "the first two legs began anew; the third continued the second's"
    records = json.loads(Path(last.path).read_text())
    found = [(record["global_step"], "eval_loss" in record) for record in records]
    assert found == [(2, False), (4, False), (4, True), (6, False), (8, False), (8, True), (9, False)]


def test_a_writer_of_theirs_keeps_the_directory_of_the_checkpoint(tmp_path: Path) -> None:
    """As at home: the directory that it is given now counts only where the saved one is gone."""

    class ResumableSummaryWriter(base()):  # type: ignore[misc]
        def __init__(self, log_dir: Path) -> None:
            self.log_dir = str(log_dir)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            Path(self.log_dir).mkdir(exist_ok=True)
            (Path(self.log_dir) / f"step-{state.global_step}").touch()

        def state_dict(self) -> dict[str, str]:
            return {"log_dir": self.log_dir}

        def load_state_dict(self, state: dict[str, str]) -> None:
            if Path(state["log_dir"]).is_dir():
                self.log_dir = state["log_dir"]

    first, second = tmp_path / "first", tmp_path / "second"
    train(tmp_path / "run", ResumableSummaryWriter(first), max_steps=4, save_steps=4)
    train(tmp_path / "run", ResumableSummaryWriter(second), max_steps=8, save_steps=4)
    assert sorted(path.name for path in first.iterdir()) == ["step-2", "step-4", "step-6", "step-8"]
    assert not second.exists()


class Shown(ds.Callback):
    """Puts the numbers of Forgather's records into dalsegno's, which are compared."""

    def __init__(self) -> None:
        self.newest: dict[str, Any] = {}

    def on_log(self, ctx: Any) -> None:
        if "loss" in ctx.logs:
            ctx.logs.update({f"their_{name}": self.newest[name] for name in ("grad_norm", "tokens", "total_tokens")})


class Told:
    """Its module, and so its library, is given below."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self._shown.newest = dict(logs)


def shown(output_dir: Path) -> ds.Trainer:
    theirs = type("Told", (Told,), {"__module__": "forgather.own"})
    after = Shown()
    settings = {"max_steps": 12, "logging_steps": 5, "save_steps": 4}
    parts = {"train_dataset": words(40)}
    return small_trainer(output_dir, theirs(after), after, JsonLogger(), model=Words(), parts=parts, **settings)


def test_an_interval_survives_a_kill_inside_it(tmp_path: Path) -> None:
    assert_resume_equivalent(shown, [FaultPlan(event=ds.Event.STEP_END, count=9)], folder=tmp_path)
    records = [each for each in read_records(tmp_path / "killed" / "logs" / "train.jsonl") if "loss" in each]
    assert [(record["their_tokens"], record["tokens"]) for record in records] == [(120, 120), (120, 240)]


# --- its other callbacks ----------------------------------------------------------------------------------------------


def test_gradients_are_there_in_on_optimizer_step(tmp_path: Path) -> None:
    """Its GradLogger reads them there, at the previous count of steps."""
    seen: list[tuple[int, bool]] = []

    class GradLogger(base()):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, /, model: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, all(bool(each.grad.any()) for each in model.parameters())))

    train(tmp_path, GradLogger(), max_steps=2)
    assert seen == [(0, True), (1, True)]


def test_a_last_record_that_is_not_there_hides_no_error(tmp_path: Path) -> None:
    """Its TBLogger writes it at the end, which at home comes after a whole training only."""

    class TBLogger(base()):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.last = state.log_history[-1]

    with pytest.raises(Killed) as caught:
        train(tmp_path, TBLogger(), killed_at(1))
    assert "IndexError" in "".join(caught.value.__notes__)
    train(tmp_path, finished := TBLogger(), max_steps=2)
    assert finished.last["step"] == 2
