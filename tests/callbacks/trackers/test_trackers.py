"""Trackers: one run over all legs, and every point once, as the trackers' own readers find them."""

from __future__ import annotations

import collections
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from analysis.formats.odd_files import history, write_wandb
from callbacks.trackers import tracked_runs
from callbacks.trackers.tracked_runs import STEPS, trainer
from dalsegno.analysis.formats.source import Skipped
from dalsegno.analysis.formats.trackers import _messages, wandb_files
from dalsegno.callbacks import MLflowLogger, TBLogger
from dalsegno.callbacks.trackers.tracker import Entry, Status, Text, TrackedRun, Tracker, public, without_secrets
from dalsegno.callbacks.trackers.tracker_logger import Outbox, Sender
from dalsegno.testing import start_ranks
from support.loopback import Loopback
from support.small import small_trainer

Points = dict[tuple[str, int], list[Any]]
"""By name and step, the values (of a histogram, anything) in the order in which they were written."""


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr("dalsegno.callbacks.trackers.tracker_logger.FIRST_PAUSE_S", 0.05)


def of_wandb(output_dir: Path) -> Points:
    """Read with W&B's own classes; only the framing of the file is read by dalsegno."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits for its service, which still writes after a run's finish() has returned
    points: Points = collections.defaultdict(list)
    ids = set()
    for path in wandb_files(output_dir / "logs" / "wandb"):
        skipped = Skipped()
        for message in _messages(path, skipped):
            record = wandb_internal_pb2.Record.FromString(message)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_") and (isinstance(value, (int, float)) or value == "histogram"):
                    points[name.removesuffix("._type"), row["global_step"]].append(value)
    assert len(ids) == 1, "one run over all legs"
    return {key: values for key, values in points.items() if key[0] != "global_step"}


def of_mlflow(output_dir: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    points: Points = collections.defaultdict(list)
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            points[name, metric.step].append(metric.value)
    return points


READERS: dict[str, Callable[[Path], Points]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


PLACES = {"wandb": "run/logs/wandb", "mlflow": "mlruns/*/????????????????*"}
"""What ``dalsegno logs`` reads."""


@pytest.fixture(params=READERS)
def tracked(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def kill(output_dir: Path, name: str, step: int, **settings: Any) -> None:
    (outcome,) = start_ranks(tracked_runs.train_until_killed, 1, output_dir, name, step, settings).wait(500)
    assert outcome.was_killed, outcome


def test_a_run_that_is_killed_three_times_has_every_point_once(tracked: str, tmp_path: Path) -> None:
    for step in (3, 6, 7):
        kill(tmp_path / "run", tracked, step)
    if tracked == "wandb":  # what a file contains is never believed
        file = wandb_files(tmp_path / "run/logs/wandb")[0]
        (odd := file.parent.with_name("offline-run-0")).mkdir()
        write_wandb(odd / file.name, [history({"global_step": "[1]", "_odd": "1"})])
    trainer(tmp_path / "run", tracked_runs.LOGGERS[tracked]()).train()
    points = READERS[tracked](tmp_path / "run")
    assert {step for name, step in points if name == "loss"} == set(range(1, STEPS + 1))
    assert {step for name, step in points if name == "eval_loss"} == {4, 8, 12}
    if tracked == "wandb":  # MLflow has them as files, which are replaced
        assert {step for name, step in points if name == "gradients/layers.3.bias"} == {3, 6, 9, 12}
    assert {key: values for key, values in points.items() if len(values) != 1} == {}
    (log,) = ds.open_logs(tmp_path.glob(PLACES[tracked]))
    assert [record["global_step"] for record in log.records("train")] == list(range(1, STEPS + 1))
    assert [record["global_step"] for record in log.records("eval")] == [4, 8, 12]
    assert list(log.series(["loss"])["loss"].values) == [points["loss", step][0] for step in range(1, STEPS + 1)]


def test_a_step_and_its_evaluation_in_one_millisecond_are_two_records(tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient()
    run = client.create_run("0")
    values = {"loss": 0.5, "eval_loss": 0.7, "epoch": 2.0}
    client.log_batch(run.info.run_id, [Metric(name, value, 1_700_000_000_000, 8) for name, value in values.items()])
    (log,) = ds.open_logs(tmp_path.glob(PLACES["mlflow"]))
    place = {"timestamp": 1_700_000_000.0, "global_step": 8, "epoch": 2.0}
    assert list(log.records()) == [
        {**place, "kind": "train", "loss": 0.5},
        {**place, "kind": "eval", "eval_loss": 0.7},
    ]


def test_a_return_to_an_older_checkpoint_is_marked(tracked: str, tmp_path: Path) -> None:
    kill(tmp_path / "run", tracked, 7)
    trainer(tmp_path / "run", tracked_runs.LOGGERS[tracked](), learning_rate=0.02).train()
    points = READERS[tracked](tmp_path / "run")
    losses = {step: values for (name, step), values in points.items() if name == "loss"}
    assert losses.keys() == set(range(1, STEPS + 1))
    assert points["dalsegno/timeline", 4] == [2]
    twice = {step for step, values in losses.items() if len(values) == 2}
    assert twice == {5, 6, 7} if tracked == "mlflow" else twice <= {5, 6, 7}  # other clients may lose them at a kill


# --- a tracker that does not answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuses", "hangs", "answers 500"])
def test_entries_wait_for_a_server_that_does_not_answer(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"MAX_RETRIES": "0", "TIMEOUT": "600", "BACKOFF_FACTOR": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "of-the-tracker")
    with Loopback(fault) as server, caplog.at_level(logging.WARNING, "dalsegno"):
        uri = f"http://user:hidden@127.0.0.1:{server.port}/of-the-tracker"
        result = trainer(tmp_path / "run", MLflowLogger("tests", uri, wait_s=0.2), max_steps=8).train()
        assert [each for each in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(each)] == []
    assert (result.reason, result.global_step) == ("finished", 8)
    assert "19 entries wait in" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "dalsegno-MLflowLogger":
            thread.join()
    written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    for secret in ("hidden", "of-the-tracker"):
        assert secret not in caplog.text and secret.encode() not in written
    trainer(tmp_path / "run", tracked_runs.mlflow()).train()
    points = of_mlflow(tmp_path / "run")
    assert [points["loss", step] for step in range(1, STEPS + 1) if len(points["loss", step]) != 1] == []


class Memory(Tracker):
    """Keeps the tags of the texts that it is given."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def open(self, run: TrackedRun) -> None: ...

    def has(self, entry: Entry) -> bool:
        return False

    def send(self, entries: Sequence[Entry]) -> None:
        self.tags += [entry.tag for entry in entries if isinstance(entry, Text)]

    def close(self, status: Status) -> None: ...


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_entries_that_a_failed_thread_leaves_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def describe() -> TrackedRun:
        raise TypeError("not serializable")

    outbox = Outbox(tmp_path)
    outbox.add(Text(1, 0.0, "sample", "hello"))
    Sender("Memory", Memory(), outbox, describe).close("finished", 600)
    assert "Memory: the sender's thread has failed; 1 entries wait in" in caplog.text
    outbox.close()


def test_a_timeline_that_begins_while_a_batch_is_sent_sends_nothing_twice(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.add(Text(1, 0.0, "sample", "hello"))
    checkpoint = outbox.position
    outbox.add(Text(2, 0.0, "sample", "before"))
    batch = outbox.claim(500)
    outbox.replay_from(checkpoint)
    outbox.add(Text(2, 0.0, "sample", "now"))
    outbox.handed_over(batch)
    outbox.all_stored()
    assert [type(each).__name__ for each in outbox.claim(500).entries] == ["Return", "Text"]
    outbox.close()


def test_damaged_lines_do_not_wait_for_ever(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.add(Text(1, 0.0, "sample", "hello"))
    outbox.close()
    path = tmp_path / "outbox.jsonl"
    path.write_bytes(b"{\n{\n" + path.read_bytes())
    outbox = Outbox(tmp_path)
    outbox.replay_from(0)  # the text is awaited: only damaged lines wait
    run = TrackedRun("0" * 16, "run", tmp_path, {}, {})
    Sender("Memory", Memory(), outbox, lambda: run).close("finished", 600)
    assert outbox.waiting() == 0
    outbox.close()


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert without_secrets("GET http://me:pw@host/x?key=0123456789abcdef") == "GET http://***@host/x?key=***"
    settings = {"hub_token": "abc", "optim_args": {"api_key": "x", "eps": 1e-8}, "adam_beta1": 0.9}
    assert public(settings) == {"hub_token": "***", "optim_args": {"api_key": "***", "eps": 1e-8}, "adam_beta1": 0.9}


# --- texts, cards, settings -------------------------------------------------------------------------------------------


def test_mlflow_has_settings_cards_and_texts(tmp_path: Path) -> None:
    import mlflow

    class Speaker(ds.Callback):
        def on_step_end(self, ctx: ds.StepEndContext) -> None:
            if ctx.step == 3:
                logger.add_text("sample", "*hello*", 3)
                logger.add_histogram_raw("weights", 0, 2, 11, 17, 23, [1, 2], [5, 6], 3)

    logger = tracked_runs.mlflow()
    trainer(tmp_path / "run", logger, Speaker()).train()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.data.params["max_steps"] == str(STEPS)
    assert run.info.status == "FINISHED"
    texts = {path: mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}") for path in artifacts(client, run)}
    assert texts.pop("sample/step-00000003.md") == "*hello*"
    assert json.loads(texts.pop("weights/step-00000003.json")) == {"edges": [0, 1, 2], "counts": [5, 6]}
    assert sorted(name for name in texts if "gradients" not in name) == [
        f"checkpoints/step-{step:08}.md" for step in (4, 8, 12)
    ]
    assert "- step: 12\n" in texts["checkpoints/step-00000012.md"]


def artifacts(client: Any, run: Any, folder: str | None = None) -> Iterator[str]:
    for each in client.list_artifacts(run.info.run_id, folder):
        if each.is_dir:
            yield from artifacts(client, run, each.path)
        else:
            yield each.path


def test_a_summary_writer_must_be_among_the_callbacks(tmp_path: Path) -> None:
    board = TBLogger(summary_writer=tracked_runs.mlflow())
    with pytest.raises(ds.ConfigurationError, match="its summary_writer MLflowLogger is in no trainer's list"):
        small_trainer(tmp_path / "run", board, max_steps=1).train()


# --- report_to --------------------------------------------------------------------------------------------------------


def keys(tmp_path: Path, *callbacks: Any, **settings: Any) -> list[str]:
    return [callback.key for callback in small_trainer(tmp_path / "run", *callbacks, **settings).callbacks]


def test_trackers_are_named_in_the_settings(tmp_path: Path) -> None:
    assert keys(tmp_path, report_to=["tensorboard", "mlflow"])[-2:] == ["TBLogger", "MLflowLogger"]
    assert keys(tmp_path, report_to="tensorboard")[-1] == "TBLogger"
    own = MLflowLogger("tests")
    assert keys(tmp_path, own, report_to="mlflow").count("MLflowLogger") == 1
    assert not {"TBLogger", "MLflowLogger"} & {*keys(tmp_path, report_to="none"), *keys(tmp_path, report_to=[])}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("wandbb", "'wandb'"),
        ("all", "name those that you want"),
        (["clearml"], "transformers' callback"),
        (3, "needs a name, several, or 'none'"),
    ],
)
def test_a_tracker_that_is_not_known_is_refused(names: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        ds.TrainingArguments("runs/a", report_to=names)


def test_a_resume_with_another_tracker_is_not_another_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path / "run", max_steps=4, save_steps=2).train()
    caplog.clear()
    small_trainer(tmp_path / "run", max_steps=6, save_steps=2, report_to="tensorboard").train()
    assert "report_to" not in caplog.text
