"""dalsegno's callbacks in an Ignite Engine: resumed exactly, also on two ranks, and requests in both directions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import EarlyStopping, GradientNoiseScale, JsonLogger
from dalsegno.testing import run_ranks, start_ranks, tiny_regression_data
from support.listeners import Journal, Listener, Trace
from support.threads import one_thread

pytest.importorskip("ignite")
from dalsegno.interop.ignite import Bridge, Request
from dalsegno.interop.ignite.bridge import UNSUPPORTED_EVENTS
from interop.ignite.bridged import PER_EPOCH, Script, records, run_on_a_rank, run_until_killed, several, states
from interop.pages import assert_rows, examples, refused_builtins

UNSUPPORTED = tuple(event.handler for event in UNSUPPORTED_EVENTS)


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def numbers(checkpoint: Path) -> dict[str, Any]:
    """States that have no times in them."""
    saved, tensors = states(checkpoint)
    kept = {key: saved[key] for key in ("callbacks.DivergenceDetector", "callbacks.EarlyStopping", "callbacks.EMA")}
    return kept | {name: tensor.tolist() for name, tensor in tensors["callbacks.EMA"].items()}


def assert_same(output_dir: Path, uninterrupted: Path) -> None:
    found, expected = records(output_dir), records(uninterrupted)
    assert found == expected
    assert [len(found[name]) for name in sorted(found)] == [6, 4, 16]
    assert numbers(output_dir / "checkpoint_20.pt") == numbers(uninterrupted / "checkpoint_20.pt")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with one_thread():
        Script(folder, several()).run()
    return folder


def test_a_killed_run_resumes_with_the_logs_and_states_of_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path
) -> None:
    (outcome,) = start_ranks(run_until_killed, 1, tmp_path, 13).wait(300)
    assert outcome.was_killed
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint_10.pt", "checkpoint_5.pt"]
    Script(tmp_path, several()).load("checkpoint_10.pt").run()
    assert_same(tmp_path, uninterrupted)
    assert list((tmp_path / "logs" / "rewound").glob("train.jsonl*"))
    assert list((tmp_path / ".dalsegno").iterdir()) == []


def test_an_older_checkpoint_rewinds_the_logs(tmp_path: Path, uninterrupted: Path) -> None:
    Script(tmp_path, several()).run()
    Script(tmp_path, several()).load("checkpoint_5.pt").run()
    assert_same(tmp_path, uninterrupted)


def test_epochs_are_counted_over_a_resume_inside_one(tmp_path: Path) -> None:
    seen: list[Any] = []
    note = {
        "on_epoch_begin": lambda ctx: seen.append(("begin", ctx.epoch, ctx.state.global_step)),
        "on_epoch_end": lambda ctx: seen.append(("end", ctx.epoch, ctx.state.global_step)),
    }
    Script(tmp_path, [Listener(note)], saves=Events.ITERATION_COMPLETED(every=7)).run(2)
    assert seen == [("begin", 0, 0), ("end", 0, 5), ("begin", 1, 5), ("end", 1, 10)]
    seen.clear()
    Script(tmp_path, [Listener(note)]).load("checkpoint_7.pt").run(3)
    assert seen == [("end", 1, 10), ("begin", 2, 10), ("end", 2, 15)]


def test_a_checkpoint_from_before_the_bridge_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Script(tmp_path, [])
    del first.to_save["calls"]
    first.run(2)
    trace = Trace()
    second = Script(tmp_path, [trace])
    own = second.to_save.pop("calls")
    second.load("checkpoint_10.pt").to_save["calls"] = own
    with caplog.at_level(logging.WARNING, "dalsegno"):
        second.run(3)
    assert "was saved without a Bridge" in caplog.text
    assert trace.steps == 5


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    Script(tmp_path, several()).run(1)
    content = torch.load(tmp_path / "checkpoint_5.pt", weights_only=True)
    content["calls"]["dalsegno"]["shared.json"][20] ^= 1
    torch.save(content, tmp_path / "checkpoint_5.pt")
    with pytest.raises(ds.DamagedCheckpoint, match=r"shared\.json: has checksum"):
        Script(tmp_path, several()).load("checkpoint_5.pt").run()


def test_a_resume_inside_a_step_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Script(tmp_path, [Trace()], gradient_accumulation_steps=2).run(2)
    trace = Trace()
    resumed = Script(tmp_path, [trace], gradient_accumulation_steps=2).load("checkpoint_5.pt")
    with caplog.at_level(logging.WARNING, "dalsegno"):
        resumed.run(2)
    assert "resumes at iteration 5, inside a step of 2 iterations" in caplog.text
    assert trace.steps == 5


def test_what_a_handler_requests_is_done(tmp_path: Path) -> None:
    def request(ctx: Any) -> None:
        ctx.control.should_save = ctx.control.should_log = ctx.control.should_evaluate = ctx.step == 3
        ctx.control.should_epoch_stop = ctx.step == 6
        if ctx.step == 8:
            ctx.control.stop("enough")

    logged: list[Any] = []
    ends: list[str] = []
    asking = Listener(
        {
            "on_step_end": request,
            "on_log": lambda ctx: logged.append((ctx.kind, ctx.state.global_step)),
            "on_train_end": lambda ctx: ends.append(ctx.reason),
        }
    )
    script = Script(tmp_path, [asking], logging_steps=100).run()
    assert logged == [("eval", 3), ("train", 3), ("eval", 5), ("eval", 6), ("final", 8)]
    assert (script.trainer.state.iteration, ends) == (8, ["stopped"])
    names = {path.name for path in tmp_path.glob("*.pt")}
    assert names == {f"checkpoint_{step}.pt" for step in (3, 5, 6, 8)}


def test_a_request_that_no_handler_does_is_not_ignored(tmp_path: Path) -> None:
    def ask(ctx: Any) -> None:
        ctx.control.should_save = True

    with pytest.raises(ds.ConfigurationError, match=r"trainer\.add_event_handler\(Request\.SAVE"):
        Script(tmp_path, [Listener({"on_step_end": ask})], saves=PER_EPOCH).run()


def test_early_stopping_ends_the_run(tmp_path: Path) -> None:
    script = Script(tmp_path, [EarlyStopping(patience=2)])
    script.optimizer.param_groups[0]["lr"] = 0.0
    script.run(10)
    assert script.trainer.state.epoch == 3
    assert (tmp_path / "checkpoint_15.pt").exists()


def test_numbers_of_a_step(tmp_path: Path) -> None:
    """Losses, and gradients before and after clipping, with accumulation over the ends of epochs."""
    seen: dict[str, list[float]] = {"ready": [], "clipped": [], "loss": [], "micro": [], "norm": []}

    def total(ctx: Any) -> float:
        return float(sum(float((each.grad.double() ** 2).sum()) for each in ctx.model.parameters()) ** 0.5)

    def numbers(ctx: Any) -> None:
        seen["loss"].append(ctx.loss)
        seen["norm"].append(ctx.grad_norm)

    look = Listener(
        {
            "on_gradients_ready": lambda ctx: seen["ready"].append(total(ctx)),
            "on_pre_optimizer_step": lambda ctx: seen["clipped"].append(total(ctx)),
            "on_microbatch_end": lambda ctx: seen["micro"].append(ctx.loss),
            "on_step_end": numbers,
        }
    )
    script = Script(tmp_path, [look], gradient_accumulation_steps=2)
    script.optimizer.param_groups[0]["lr"] = 0.0
    script.run(2)
    batches = [*DataLoader(tiny_regression_data(20), batch_size=4)] * 2
    losses = [script.model(**batch).item() for batch in batches]
    assert seen["micro"] == pytest.approx(losses, rel=1e-5)
    assert seen["loss"] == pytest.approx([sum(losses[at : at + 2]) / 2 for at in range(0, 10, 2)], rel=1e-5)
    assert seen["ready"] == pytest.approx(seen["norm"], rel=1e-5)
    assert min(seen["ready"]) > 0.5
    assert seen["clipped"] == pytest.approx([0.5] * 5, rel=1e-3)


def test_ignites_own_training_step_has_all_events(tmp_path: Path) -> None:
    """``create_supervised_trainer``, which does not clip, with accumulation."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.MSELoss(), gradient_accumulation_steps=2)
    journal = Journal(without=UNSUPPORTED)
    Bridge([journal], trainer, model=model, optimizer=optimizer, output_dir=tmp_path, gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    trainer.run(DataLoader(data, batch_size=4))
    step = [
        *["step_begin", "microbatch_begin", "microbatch_end", "microbatch_begin"],
        *["gradients_ready", "pre_optimizer_step", "optimizer_step", "microbatch_end", "step_end", "step_done"],
    ]
    begin = ["init_end", "before_load", "train_begin", "epoch_begin"]
    assert journal.fired == [*begin, *step, *step, "epoch_end", "log_step", "log", "train_end"]


def test_a_skipped_update(tmp_path: Path) -> None:
    skipped: list[int] = []
    look = Listener({"on_step_skipped": lambda ctx: skipped.append(ctx.state.global_step)})
    script = Script(tmp_path, [look])
    step = script.optimizer.step
    script.optimizer.step = lambda: None if script.trainer.state.iteration == 3 else step()  # as a GradScaler does
    script.run(1)
    assert skipped == [3]


def test_an_exception_is_passed_on(tmp_path: Path) -> None:
    journal = Journal(without=UNSUPPORTED)
    with pytest.raises(ZeroDivisionError):
        Script(tmp_path / "a", [journal]).at(3, lambda: 1 / 0).run()
    assert journal.fired[-2:] == ["exception", "train_end"]

    reasons: list[str] = []
    handled = Script(tmp_path / "b", [Listener({"on_train_end": lambda ctx: reasons.append(ctx.reason)})])
    handled.trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: None)
    handled.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: handled.trainer.terminate())
    handled.at(3, lambda: 1 / 0).run()
    assert reasons == ["stopped"], "Ignite's own handling of exceptions is the same with a Bridge"


def test_a_failed_evaluation_restores_the_trained_weights(tmp_path: Path) -> None:
    from dalsegno.callbacks import EMA

    script = Script(tmp_path, [EMA(0.5)], evaluates=None)
    weights: list[Any] = []

    def evaluate() -> None:
        weights.append([each.tolist() for each in script.model.parameters()])
        script.evaluator.run(script.valid)

    script.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 / 0)
    script.trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)
    with pytest.raises(ZeroDivisionError):
        script.run(1)
    assert [each.tolist() for each in script.model.parameters()] == weights[0]


def test_an_interrupted_run_is_continued(tmp_path: Path) -> None:
    trace, journal = Trace(), Journal(without=UNSUPPORTED)
    script = Script(tmp_path, [trace, journal])
    script.at(7, script.trainer.interrupt)
    script.run(2)
    assert (trace.steps, journal.fired.count("train_end")) == (7, 0)
    script.trainer.run()
    assert (trace.steps, journal.fired.count("train_end")) == (10, 1)
    assert journal.fired.count("train_begin") == 1


def test_a_checkpoint_in_the_middle_of_a_step_or_evaluation_is_refused(tmp_path: Path) -> None:
    class Early(Script):
        """Adds its handlers before the Bridge's."""

        def __init__(self, output_dir: Path, engine: str) -> None:
            self.early = engine
            super().__init__(output_dir, [Trace()], saves=None)

        def save(self) -> None:
            self.checkpoint(self.trainer)

    first = Early(tmp_path / "a", "trainer")
    handlers = first.trainer._event_handlers[Events.ITERATION_COMPLETED]
    first.trainer.add_event_handler(Events.ITERATION_COMPLETED, first.save)
    handlers.insert(0, handlers.pop())
    with pytest.raises(ds.ConfigurationError, match="before callbacks have seen the end of this step"):
        first.run()
    second = Early(tmp_path / "b", "evaluator")
    second.evaluator.add_event_handler(Events.EPOCH_COMPLETED, second.save)
    with pytest.raises(ds.ConfigurationError, match="this step or evaluation"):
        second.run()


def test_an_evaluation_after_the_checkpoint_of_its_step_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(tmp_path, [Trace()], evaluates=None)
    script.trainer.add_event_handler(PER_EPOCH, lambda: script.evaluator.run(script.valid))
    with caplog.at_level(logging.WARNING, "dalsegno"):
        script.run(3)
    (record,) = caplog.records
    assert "step 5 is evaluated after its checkpoint was saved" in record.getMessage()


def test_several_sets(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = Listener({"on_evaluate": lambda ctx: seen.append((ctx.name, sorted(ctx.all_metrics), ctx.is_last))})
    sets = {name: Engine(lambda engine, batch: None) for name in ("a", "b")}
    script = Script(tmp_path, [look, JsonLogger()], evaluators=sets, evaluates=None)

    def evaluate() -> None:
        for evaluator in sets.values():
            evaluator.run([1])
            evaluator.state.metrics = {}

    for evaluator in sets.values():
        evaluator.add_event_handler(
            Events.EPOCH_COMPLETED,
            lambda engine: engine.state.metrics.update(loss=torch.tensor(0.5), matrix=torch.zeros(2, 2), name="none"),
        )
    script.trainer.add_event_handler(PER_EPOCH, evaluate)
    script.run(1)
    assert seen == [("a", ["eval_a_loss"], False), ("b", ["eval_a_loss", "eval_b_loss"], True)]


def test_a_tensor_in_a_record_is_refused_naming_the_callback(tmp_path: Path) -> None:
    logged: list[Any] = []
    one = {"on_log_step": lambda ctx: ctx.logs.update(own=torch.ones(1)), "on_log": lambda ctx: logged.append(ctx.logs)}
    Script(tmp_path, [Listener(one)]).run(1)
    assert logged[0]["own"] == 1.0 and isinstance(logged[0]["own"], float)
    adder = Listener({"on_log_step": lambda ctx: ctx.logs.update(own=torch.ones(3))}, name="adder")
    with pytest.raises(ds.CannotSave, match=r"record key 'own': a tensor of shape \(3,\), logged by one of: adder"):
        Script(tmp_path, [adder]).run(1)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.EventNotFired, match=r"GradientNoiseScale needs on_before_backward, which Ignite"):
        Script(tmp_path, [GradientNoiseScale()])
    with pytest.raises(ds.ConfigurationError, match="EarlyStopping needs evaluations"):
        Script(tmp_path, [EarlyStopping()], evaluators=None).run()
    with pytest.raises(ds.ConfigurationError, match=r"output is a dict, not a loss; pass output_transform="):
        Script(tmp_path, [Trace()], output_transform=lambda output: {"loss": output}).run()
    script = Script(tmp_path, [Trace()])
    Bridge([Trace()], script.trainer, model=script.model, optimizer=script.optimizer, output_dir=tmp_path)
    with pytest.raises(ds.ConfigurationError, match="two bridges take part"):
        script.run()
    silent = Script(tmp_path, [Listener({"on_step_end": lambda ctx: ctx.loss})], output_transform=lambda output: None)
    with pytest.raises(ds.EventNotFired, match=r"ctx\.loss is unknown here"):
        silent.run()


def test_training_is_the_same_with_a_bridge(tmp_path: Path, uninterrupted: Path) -> None:
    Script(tmp_path, []).run()
    ours, theirs = (
        torch.load(folder / "checkpoint_20.pt", weights_only=True)["model"] for folder in (uninterrupted, tmp_path)
    )
    assert {name: each.tolist() for name, each in ours.items()} == {
        name: each.tolist() for name, each in theirs.items()
    }


def test_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(run_on_a_rank, 2, tmp_path)
    assert first == second, "gradients are reduced, and the stop of rank 1 is one of both"
    assert first["ended at"] == 7
    for record in records(tmp_path)["gradient_norms.jsonl"]:
        assert record["norms"] == pytest.approx(first["norms"][record["global_step"]], rel=1e-5)
    resumed, _ = run_ranks(run_on_a_rank, 2, tmp_path, "checkpoint_7.pt")
    assert resumed["ended at"] == 10
    logs = records(tmp_path)
    assert logs["gradient_norms.jsonl"][-1]["norms"] == pytest.approx(resumed["norms"][10], rel=1e-5)
    written = [(record.get("kind", "train"), record["global_step"]) for record in logs["train.jsonl"][1:]]
    trained = [("train", 2), ("train", 4), ("eval", 5), ("train", 6), ("train", 8), ("train", 10), ("eval", 10)]
    assert written == [*trained, ("final", 10)]
    assert [record["global_step"] for record in logs["gradient_norms.jsonl"]] == [5, 10]


# --- docs/bridges.md --------------------------------------------------------------------------------------------------


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples("Ignite")), {"__name__": "example"})
    steps = [record["global_step"] for record in records(tmp_path / "runs/ig")["train.jsonl"] if "loss" in record]
    assert steps == [*range(2, 21, 2)]


def test_the_page_lists_what_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def build(callbacks: list[object]) -> Bridge:
        engine = Engine(lambda engine, batch: None)
        return Bridge(callbacks, engine, model=model, optimizer=optimizer, output_dir=tmp_path)

    assert_rows(
        "Ignite",
        {
            "events that are never fired": [event.handler for event in UNSUPPORTED_EVENTS],
            "built-ins that are refused": refused_builtins(build),
        },
    )


def test_requests_are_events_of_the_engine() -> None:
    assert str(Request.SAVE) == "Request.SAVE"
