"""TensorBoard's curves, read back with TensorBoard's own reader: each step once, whatever became of the run."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dalsegno as ds
from callbacks.layouts import layout_trainer
from dalsegno.callbacks import (
    JsonLogger,
    PeakMemory,
    ProfilerCallback,
    ResumableSummaryWriter,
    TBLogger,
    TextgenCallback,
)
from dalsegno.callbacks.loggers.tensorboard import default_tb_scalars
from dalsegno.distributed import collectives
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, run_ranks, start_ranks, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer

STEPS = 12
EVENTS = "logs/tensorboard"


def trainer(output_dir: Path, *own: ds.Callback, **settings: Any) -> ds.Trainer:
    given = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 4, "save_steps": 5, **settings}
    return small_trainer(output_dir, *own, parts={"eval_dataset": tiny_regression_data(6, seed=1)}, **given)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to steps and values, as they were written. Files of one second are read in any order: .9 is after .10."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    written = {tag: sorted(reader.Scalars(tag), key=lambda each: each.wall_time) for tag in reader.Tags()["scalars"]}
    return {tag: [(each.step, each.value) for each in events] for tag, events in written.items()}


def records(output_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_records(output_dir / "logs/train.jsonl") if record.get("kind") == kind]


def test_the_default_curves(tmp_path: Path) -> None:
    trainer(tmp_path, TBLogger(), JsonLogger()).train()
    drawn = curves(tmp_path / EVENTS)
    assert set(drawn) == {"train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity"}
    assert dict(drawn["train-loss"]) == pytest.approx({r["global_step"]: r["loss"] for r in records(tmp_path)})
    assert [step for step, _ in drawn["eval-loss"]] == [4, 8, 12]
    perplexities = {r["global_step"]: math.exp(r["eval_loss"]) for r in records(tmp_path, "eval")}
    assert dict(drawn["eval-perplexity"]) == pytest.approx(perplexities)


def test_its_curves_are_read_under_the_names_of_the_records(tmp_path: Path) -> None:
    trainer(tmp_path, TBLogger(), JsonLogger()).train()
    log, drawn = ds.open_log(tmp_path), ds.open_log(tmp_path / EVENTS)
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        assert drawn.metric(name).values == pytest.approx(log.metric(name).values, rel=1e-6)
    assert drawn.summary().loss is not None
    assert {"eval_loss", "eval_perplexity"} <= {metric.name for metric in drawn.summary().evaluation}


def test_a_json_log_of_any_name_is_preferred_to_event_files(tmp_path: Path) -> None:
    trainer(tmp_path / "run", TBLogger(), JsonLogger(path="metrics.jsonl")).train()
    assert ds.open_log(tmp_path / "run").source.program == "JSON lines"
    assert [run.source.program for run in ds.open_log(tmp_path)] == ["JSON lines"]


def test_other_json_beside_event_files_is_not_taken_for_the_log(tmp_path: Path) -> None:
    trainer(tmp_path, TBLogger()).train()
    (tmp_path / "config.json").write_text('{"lr": 0.1, "step": 1000, "steps": 100}')
    log = ds.open_log(tmp_path)
    assert (log.source.program, log.summary().step) == ("TensorBoard", STEPS)


def test_each_of_several_evaluation_sets_has_its_curves(tmp_path: Path) -> None:
    class Drawn:
        def __init__(self) -> None:
            self.points: dict[str, list[float]] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.points.setdefault(tag, []).append(value)

        def add_text(self, *args: object) -> None: ...

    drawn = Drawn()
    sets = {"one": tiny_regression_data(4, seed=1), "two": tiny_regression_data(4, seed=2)}
    own = [TBLogger(drawn), JsonLogger()]
    small_trainer(tmp_path, *own, parts={"eval_dataset": sets}, max_steps=2, eval_steps=1).train()
    records = list(read_records(tmp_path / "logs/train.jsonl"))
    for name in sets:
        losses = [each[f"eval_{name}_loss"] for each in records if f"eval_{name}_loss" in each]
        assert drawn.points[f"eval-loss/{name}"] == losses and len(losses) == 2
        assert drawn.points[f"eval-perplexity/{name}"] == pytest.approx([math.exp(loss) for loss in losses])


def test_curves_of_ones_own_and_zeros(tmp_path: Path) -> None:
    """As Forgather specifies them: without a source it is the tag, and a transformation gets the record, too."""

    def add(ctx: Any) -> None:
        ctx.logs |= {"flat_line": 0, "steps": ctx.state.global_step}

    scalars: dict[str, Any] = {
        "zero": "flat_line",
        "flat-line": {},
        "per-rate": {"source": "loss", "transform": lambda loss, metrics: loss / metrics["learning_rate"]},
        "early": {"source": "loss", "transform": lambda loss, metrics: loss if metrics["steps"] < 2 else None},
        "train-loss": {"transform": lambda loss, metrics: loss / 2},
        "eval-perplexity": None,
        "grad-norm": None,
    }
    trainer(tmp_path, Listener({"on_log_step": add}), TBLogger(scalars=scalars), JsonLogger()).train()
    drawn, record = curves(tmp_path / EVENTS), records(tmp_path)[0]
    assert set(drawn) == {"train-loss", "learning-rate", "eval-loss", "zero", "flat-line", "per-rate", "early"}
    assert drawn["zero"] == drawn["flat-line"] and drawn["zero"][0] == (1, 0.0)
    assert drawn["train-loss"][0][1] == pytest.approx(record["loss"] / 2)
    assert drawn["per-rate"][0][1] == pytest.approx(record["loss"] / record["learning_rate"])
    assert [step for step, _ in drawn["early"]] == [1]


def test_the_default_curves_can_be_changed_one_by_one() -> None:
    defaults = default_tb_scalars()
    assert list(defaults) == ["train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity"]
    defaults["train-loss"]["source"] = "changed"
    assert default_tb_scalars()["train-loss"] == {"source": "loss"}
    TBLogger(scalars=default_tb_scalars())


def test_texts_are_written_once_a_run(tmp_path: Path) -> None:
    info = {"about": "# A run\n\nwith **bold** words", "settings": {"width": 16}}
    for steps in (6, STEPS):
        trainer(tmp_path, TBLogger(experiment_info=info), max_steps=steps).train()
    reader = EventAccumulator(str(tmp_path / EVENTS))
    reader.Reload()
    (about,) = reader.Tensors("about/text_summary")
    assert about.tensor_proto.string_val[0].decode() == info["about"]
    (settings,) = reader.Tensors("settings/text_summary")
    assert '"width": 16' in settings.tensor_proto.string_val[0].decode()


def train_to_the_end(output_dir: Path, plan: FaultPlan | None) -> None:
    if plan is not None:
        plan.arm()
    writer = ResumableSummaryWriter()
    trainer(output_dir, writer, TBLogger(writer), JsonLogger()).train()


def test_killed_and_resumed_each_step_is_there_once(tmp_path: Path) -> None:
    """Killed behind a checkpoint, before the first one, and in a save: one curve, and the tails beside it."""
    train_to_the_end(tmp_path / "whole", None)
    for plan in (
        FaultPlan(event=ds.Event.STEP_DONE, count=3),
        FaultPlan(event=ds.Event.STEP_DONE, count=8),
        FaultPlan(operation="write", path="step-00000010.partial"),
        None,
    ):
        (outcome,) = start_ranks(train_to_the_end, 1, tmp_path / "killed", plan).wait()
        assert outcome.was_killed == (plan is not None), outcome
    assert curves(tmp_path / "killed" / EVENTS) == curves(tmp_path / "whole" / EVENTS)
    rewound = [path.name for path in (tmp_path / "killed/logs/rewound").iterdir() if path.name.startswith("events")]
    assert len(rewound) == 3 and not any("tfevents" in name for name in rewound)


def test_a_tensorboard_that_looks_on_forgets_the_tail(tmp_path: Path) -> None:
    def stop(ctx: Any) -> None:
        if ctx.step == 8:
            raise RuntimeError("killed")

    reader = EventAccumulator(str(tmp_path / EVENTS), size_guidance={"scalars": 0})
    with pytest.raises(RuntimeError, match="killed"):
        trainer(tmp_path, TBLogger(), Listener({"on_step_done": stop})).train()
    reader.Reload()
    assert [each.step for each in reader.Scalars("train-loss")] == [*range(1, 9)]
    second = int(time.time())  # in the names of event files, which TensorBoard reads in their order
    while int(time.time()) == second:
        time.sleep(0.01)
    trainer(tmp_path, TBLogger()).train()
    reader.Reload()
    assert [each.step for each in reader.Scalars("train-loss")] == [*range(1, STEPS + 1)]


def test_other_callbacks_write_through_the_same_writer(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter("logs/board")

    def on_step_end(ctx: Any) -> None:
        writer.add_scalar("mine", ctx.step**2, ctx.step)

    trainer(tmp_path, writer, PeakMemory(summary_writer=writer), Listener({"on_step_end": on_step_end})).train()
    drawn = curves(tmp_path / "logs/board")
    assert drawn["mine"][:3] == [(1, 1.0), (2, 4.0), (3, 9.0)]
    assert len(drawn["peak-mem/rank-0"]) == STEPS


def on_two_ranks(output_dir: Path) -> None:
    writer = ResumableSummaryWriter()

    def on_step_end(ctx: Any) -> None:
        writer.add_scalar("rank", collectives.rank() + 1, ctx.step)

    layout_trainer(output_dir, "ddp", [writer, Listener({"on_step_end": on_step_end}), TBLogger(writer)]).train()


def test_rank_zero_writes(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    assert {value for _, value in curves(tmp_path / EVENTS)["rank"]} == {1.0}
    assert len(list((tmp_path / EVENTS).iterdir())) == 1


def write_together(output_dir: Path, plan: FaultPlan | None) -> None:
    """Two loggers with writers of their own, and curves that lie in folders below."""
    if plan is not None:
        plan.arm()
    writer = ResumableSummaryWriter(name="mine")

    def on_step_end(ctx: Any) -> None:
        writer.add_scalars("pair", {"one": ctx.step, "two": 2 * ctx.step}, ctx.step)

    second = TBLogger(name="second", scalars={**dict.fromkeys(default_tb_scalars()), "again": "loss"})
    own = [TBLogger(), second, writer, Listener({"on_step_end": on_step_end}, name="pairs")]
    trainer(output_dir, *own, save_in_background=False).train()  # so that the kill finds the checkpoint of step 5


def test_several_share_a_folder(tmp_path: Path) -> None:
    """Each goes back with its own files; what is none of theirs is left alone."""
    for plan in (FaultPlan(event=ds.Event.STEP_DONE, count=8), None):
        (outcome,) = start_ranks(write_together, 1, tmp_path, plan).wait()
        assert outcome.was_killed == (plan is not None), outcome
        (tmp_path / EVENTS / "events.out.tfevents.1.other").touch()
    assert len([path for path in (tmp_path / EVENTS).iterdir() if path.is_file()]) == 2 * 3 + 1
    every_step = [*range(1, STEPS + 1)]
    drawn = curves(tmp_path / EVENTS)
    assert [step for step, _ in drawn["train-loss"]] == [step for step, _ in drawn["again"]] == every_step
    for name in ("one", "two"):
        assert [step for step, _ in curves(tmp_path / EVENTS / f"pair_{name}")["pair"]] == every_step
    assert (tmp_path / EVENTS / "events.out.tfevents.1.other").exists()


def test_another_directory_is_given_and_the_curves_continue_in_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill at step 8 leaves steps after the checkpoint of 5; scripts often name a new directory at each start."""

    def kill(ctx: Any) -> None:
        if ctx.step == 8:
            raise KeyboardInterrupt

    def run(log_dir: str, *others: ds.Callback, **settings: Any) -> None:
        writer = ResumableSummaryWriter(log_dir)
        draw = {"on_log": lambda ctx: writer.add_scalar("loss", ctx.logs.get("loss", 0.0), ctx.state.global_step)}
        trainer(tmp_path, writer, Listener(draw, name="draws"), *others, eval_steps=0, **settings).train()

    with pytest.raises(KeyboardInterrupt):
        run("first", Listener({"on_step_end": kill}))
    caplog.set_level("INFO", "dalsegno")
    run("second")
    assert not (tmp_path / "second").exists()
    every_step = [*range(1, STEPS + 1), STEPS]
    assert [step for step, _ in curves(tmp_path / "first")["loss"]] == every_step, "with the final record"
    assert "continues in first, the directory of the checkpoint, not second" in caplog.text
    assert list(tmp_path.glob("rewound/*")), "what came after the checkpoint is kept"
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    run("third", max_steps=STEPS + 1)
    assert "first no longer exists; its events are lost, and new ones are in" in caplog.text
    assert [step for step, _ in curves(tmp_path / "third")["loss"]] == [STEPS + 1] * 2


def test_programs_may_flush_and_close_it(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter()

    def on_step_end(ctx: Any) -> None:
        writer.add_scalar("mine", 1.0, ctx.step)
        writer.flush()
        assert len(curves(tmp_path / EVENTS)["mine"]) == ctx.step
        writer.close()

    trainer(tmp_path, writer, Listener({"on_step_end": on_step_end}), max_steps=3).train()
    assert len(curves(tmp_path / EVENTS)["mine"]) == 3
    assert len(list((tmp_path / EVENTS).iterdir())) == 1


def test_before_and_after_training_it_writes_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Into a file that no resume touches. TBLogger's curves are of the training; texts that describe the run wait."""
    writer = ResumableSummaryWriter(name="shared")

    def note(ctx: Any) -> None:
        writer.add_scalar("mine", ctx.metrics["eval_loss"], ctx.state.global_step)

    def drawn(tag: str) -> list[int]:
        return [step for step, _ in curves(tmp_path / EVENTS)[tag]]

    own = [TBLogger(experiment_info="about"), writer, Listener({"on_evaluate": note})]
    evaluated = trainer(tmp_path, *own, max_steps=4)
    assert evaluated.evaluate().keys() >= {"eval_loss"}
    assert drawn("mine") == [0], "on disk at once"
    evaluated.train()
    evaluated.evaluate()
    warning = "writes while training runs; what is logged before or after is not kept"
    assert [record.message for record in caplog.records] == [f"TBLogger {warning}"]
    assert (drawn("eval-loss"), sorted(drawn("mine"))) == ([4], [0, 4, 4])
    reader = EventAccumulator(str(tmp_path / EVENTS))
    reader.Reload()
    assert "experiment/text_summary" in reader.Tags()["tensors"]

    again = ResumableSummaryWriter(name="shared")
    trainer(tmp_path, again, max_steps=6).train()
    assert sorted(drawn("mine")) == [0, 4, 4], "a resume moves nothing of it"
    assert not (tmp_path / "logs/rewound").exists()


def test_it_is_a_writer_without_any_trainer_too(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter(tmp_path / "board")
    writer.add_scalar("mine", 1.0, 7)
    writer.close()
    assert [step for step, _ in curves(tmp_path / "board")["mine"]] == [7]


@pytest.mark.parametrize("use", [TBLogger, PeakMemory, lambda writer: TextgenCallback(writer, ["a"])])
def test_a_writer_that_no_resume_would_rewind_is_refused(use: Any, tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="its summary_writer mine is in no trainer's list of callbacks"):
        trainer(tmp_path, use(ResumableSummaryWriter(tmp_path / "board", name="mine")), max_steps=1).train()


def test_nothing_is_opened_where_nothing_is_written(tmp_path: Path) -> None:
    trainer(tmp_path, ResumableSummaryWriter()).train()
    assert not (tmp_path / EVENTS).exists()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TBLogger(summary_writer=1), "it has no add_scalar"),
        (lambda: TBLogger(scalars={"a": {"transform": abs}}), r"scalars\['a'\]: transform=.*\(value, metrics\)"),
        (lambda: TBLogger(scalars={"a": {"sauce": "b"}}), r"scalars\['a'\]=.*; needs a name in the records"),
        (lambda: TBLogger(scalars={"a": {"source": 3}}), r"scalars\['a'\]: source=3; needs a name"),
        (lambda: TBLogger(scalars={"a": False}), r"scalars\['a'\]: source=False; .*, or None to remove the curve"),
        (lambda: ResumableSummaryWriter().add_scalar("a", 1), "relative to the run's output_dir.*callbacks="),
        (lambda: ProfilerCallback(num_steps=0), "num_steps=0; needs an integer of at least 1"),
    ],
)
def test_wrong_use(build: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        build()


# --- ProfilerCallback -------------------------------------------------------------------------------------------------


def traces(folder: Path) -> dict[str, list[str]]:
    """Trace files, with the names of the operations in them."""
    found = {}
    for path in sorted(folder.glob("*.trace.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name.removesuffix(".trace.json.gz")] = [str(event.get("name")) for event in events]
    return found


def counted(names: Sequence[str]) -> int:
    return sum("Optimizer.step" in name for name in names)


def test_some_steps_of_each_leg_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def profiled(**settings: Any) -> ds.Trainer:
        return trainer(tmp_path, ProfilerCallback(start_step=2, num_steps=3, with_stack=False), **settings)

    profiled(max_steps=6).train()
    assert {name: counted(names) for name, names in traces(tmp_path / "profile").items()} == {
        "step-00000003-rank-00000": 3
    }
    assert "aten::" in capsys.readouterr().out
    assert "Self CPU" in (tmp_path / "profile" / "step-00000003-rank-00000.txt").read_text()
    profiled(max_steps=STEPS).train()
    assert list(traces(tmp_path / "profile")) == ["step-00000003-rank-00000", "step-00000009-rank-00000"]


def profile_on_ranks(output_dir: Path, rank: int | None) -> None:
    profiler = ProfilerCallback(start_step=2, num_steps=1, with_stack=False, rank=rank)
    layout_trainer(output_dir, "ddp", [profiler], max_steps=4).train()


@pytest.mark.parametrize(("rank", "expected"), [(0, [0]), (1, [1]), (None, [0, 1])])
def test_one_rank_is_profiled_or_all(tmp_path: Path, rank: int | None, expected: list[int]) -> None:
    run_ranks(profile_on_ranks, 2, tmp_path, rank)
    assert {name: counted(names) for name, names in traces(tmp_path / "profile").items()} == {
        f"step-00000003-rank-{number:05d}": 1 for number in expected
    }


def test_a_training_that_ends_before_its_steps_has_no_trace(tmp_path: Path) -> None:
    trainer(tmp_path, ProfilerCallback(start_step=4, with_stack=False), max_steps=4).train()
    assert not (tmp_path / "profile").exists()


def test_a_training_that_ends_early_is_exported_too(tmp_path: Path) -> None:
    def stop(ctx: Any) -> None:
        if ctx.step == 4:
            raise RuntimeError("in the middle")

    stopper = Listener({"on_step_end": stop})
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer(tmp_path, ProfilerCallback(start_step=1, num_steps=50, with_stack=False), stopper).train()
    assert {name: counted(names) for name, names in traces(tmp_path / "profile").items()} == {
        "step-00000002-rank-00000": 3
    }


def test_mappings_become_markdown() -> None:
    assert TBLogger.mapping_as_markdown({"lr": 1}) == '```json\n{\n  "lr": 1\n}\n```'
    assert TBLogger.mapping_as_markdown("# A title") == "# A title"
