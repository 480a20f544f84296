"""Metrics of evaluation, activations, messages: against other reckonings, real servers, real files."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import BinaryROC, MulticlassAccuracy, MulticlassAUROC, MulticlassAveragePrecision
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

import dalsegno as ds
from callbacks.layouts import assert_same_values, on_every_layout, sentences, values
from dalsegno.callbacks import (
    DumpActivations,
    EarlyStopping,
    FlopUtilization,
    JsonLogger,
    ModelEvalMetrics,
    Notify,
    PeakMemory,
)
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer


def records(output_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_records(output_dir / "logs/train.jsonl") if record.get("kind") == kind]


# --- ModelEvalMetrics -------------------------------------------------------------------------------------------------


class Guessing(nn.Module):
    """Guesses the next token; gives its scores along with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.embed(tokens))
        return {
            "loss": nn.functional.cross_entropy(scores.flatten(0, 1), tokens.roll(1, -1).flatten()),
            "scores": scores,
        }


def guesses(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return outputs["scores"].flatten(0, 1), batch["tokens"].roll(1, -1).flatten()


def guessing_callbacks() -> list[ds.Callback]:
    return [ModelEvalMetrics({"accuracy": MulticlassAccuracy(7, average="micro")}, select=guesses)]


def guessing_trainer(output_dir: Path, *own: ds.Callback, evaluated: Any = None, parallel: str = "none") -> ds.Trainer:
    from dalsegno.distributed import collectives

    torch.manual_seed(0)
    args = ds.TrainingArguments(
        output_dir,
        max_steps=6,
        eval_steps=3,
        logging_steps=3,
        save_steps=0,
        learning_rate=0.1,
        per_device_train_batch_size=4 // collectives.world_size(),
        per_device_eval_batch_size=2,
        parallel=parallel,
        use_cpu=True,
        disable_tqdm=True,
    )
    data = {"train_dataset": sentences(), "eval_dataset": evaluated or sentences(9, seed=1)}
    return ds.Trainer(Guessing(), args, **data, callbacks=[JsonLogger(), *own])


def train_guessing(output_dir: Path, layout: str, build: Any) -> None:
    guessing_trainer(output_dir, *build(), parallel=layout).train()


def test_a_metric_over_all_ranks_without_padding(tmp_path: Path) -> None:
    """Nine samples in batches of two on two ranks: the last batch of one rank is padding."""
    runs = on_every_layout(tmp_path, guessing_callbacks, train_guessing)
    assert_same_values(runs, "logs/train.jsonl", ["timestamp", "peak_mem", "_runtime", "_per_second"])
    rights: dict[int, list[Tensor]] = {}

    def on_prediction_step(ctx: Any) -> None:
        scores, tokens = guesses(ctx.outputs, ctx.batch)
        rights.setdefault(ctx.state.global_step, []).append(scores.argmax(-1) == tokens)

    guessing_trainer(tmp_path / "by-hand", Listener({"on_prediction_step": on_prediction_step})).train()
    for record in records(runs["fsdp"], "eval"):
        expected = torch.cat(rights[record["global_step"]]).double().mean().item()
        assert record["eval_accuracy"] == pytest.approx(expected)


class Total(CatMetric):
    """Keeps a number of no dimension for each batch."""

    def compute(self) -> Tensor:
        return torch.as_tensor(super().compute()).sum()


def metrics_that_keep_rows() -> list[ds.Callback]:
    """Scores of two dimensions and labels that are integers, in a group too; single numbers; counts beside them."""

    def rounded(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        scores, labels = guesses(outputs, batch)
        return scores.round(decimals=3), labels  # equal scores shall be equal, however they were added up

    group = MetricCollection([MulticlassAUROC(7), MulticlassAveragePrecision(7)])
    metrics = {"area": MulticlassAUROC(7, average="none"), "group": group, "accuracy": MulticlassAccuracy(7)}
    totals = ModelEvalMetrics({"total": Total()}, select=lambda outputs, batch: (outputs["scores"].sum(),))
    totals.name = "totals"
    return [ModelEvalMetrics(metrics, select=rounded), totals]


def train_evaluating_few(output_dir: Path, layout: str) -> None:
    sets = {"one": sentences(1, seed=1), "five": sentences(5, seed=1)}
    guessing_trainer(output_dir, *metrics_that_keep_rows(), evaluated=sets, parallel=layout).train()


@pytest.mark.filterwarnings(
    "ignore:No positive samples", "ignore:Average precision score"
)  # of a label that is not there
def test_metrics_that_keep_all_rows_where_a_rank_has_padding(tmp_path: Path) -> None:
    """Of one set the second rank has nothing but padding, of the other its last batch is padding."""
    run_ranks(train_evaluating_few, 1, tmp_path / "none", "none")
    run_ranks(train_evaluating_few, 2, tmp_path / "ddp", "ddp")
    ignored = ["timestamp", "peak_mem", "_runtime", "_per_second"]
    alone, spread = (values(tmp_path / layout / "logs/train.jsonl", ignored) for layout in ("none", "ddp"))
    assert spread == pytest.approx(alone, rel=1e-4)


def test_metrics_of_several_sets_and_what_watches_them(tmp_path: Path) -> None:
    def select(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["y"], torch.zeros_like(batch["y"])

    sets = {"one": tiny_regression_data(5, seed=1), "two": tiny_regression_data(7, seed=2)}
    metrics = ModelEvalMetrics({"distance": MeanAbsoluteError()}, select=select)
    of_x = ModelEvalMetrics(
        {"width": MeanAbsoluteError()}, lambda outputs, batch: (batch["x"], 0 * batch["x"]), name="x"
    )
    watch = EarlyStopping("two_distance", patience=2)
    parts = {"eval_dataset": sets}
    trainer = small_trainer(tmp_path, JsonLogger(), metrics, of_x, watch, parts=parts, max_steps=9, eval_steps=1)
    assert trainer.train().global_step == 3
    assert all(sum(key.endswith("_width") for key in record) == 1 for record in records(tmp_path, "eval"))
    for record, data in zip(records(tmp_path, "eval"), [*sets.values()] * 3, strict=True):
        expected = float(torch.stack([data[index]["y"].abs() for index in range(len(data))]).mean())  # type: ignore[arg-type]
        (distance,) = [value for key, value in record.items() if key.endswith("_distance")]
        assert distance == pytest.approx(expected)


def test_metrics_of_several_values(tmp_path: Path) -> None:
    """Each value of a collection has a name of its own, which others can go by; a curve is a list."""

    def select(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["y"][:, 0].sigmoid(), (batch["y"][:, 0] > 0).long()

    both = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()})
    metrics = ModelEvalMetrics({"both": both, "roc": BinaryROC(thresholds=3)}, select=select)
    data = tiny_regression_data(6, seed=1)
    settings = {"max_steps": 9, "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "both_mse"}
    watch = EarlyStopping("both_mae", patience=2)
    trainer = small_trainer(tmp_path, JsonLogger(), metrics, watch, parts={"eval_dataset": data}, **settings)
    assert trainer.train().stopped_by == "EarlyStopping"
    y = torch.stack([data[index]["y"] for index in range(len(data))])[:, 0]
    predicted, right = y.sigmoid(), (y > 0).double()
    record = records(tmp_path, "eval")[0]
    assert record["eval_both_mae"] == pytest.approx(float((predicted - right).abs().mean()))
    assert record["eval_both_mse"] == pytest.approx(float((predicted - right).square().mean()))
    assert trainer.state.best_metric == pytest.approx(record["eval_both_mse"])
    assert [len(part) for part in record["eval_roc"]] == [3, 3, 3]


# --- DumpActivations --------------------------------------------------------------------------------------------------


def test_activations_of_chosen_modules(tmp_path: Path) -> None:
    seen: dict[str, Tensor] = {}

    def on_microbatch_begin(ctx: Any) -> None:
        layer = ctx.model.layers[0]
        seen[f"step-{ctx.state.global_step + 1:08d}"] = layer(ctx.batch["x"]).detach()

    callbacks = [
        Listener({"on_microbatch_begin": on_microbatch_begin}),
        DumpActivations(buffer_steps=2, modules=r"s\.0$"),
    ]
    small_trainer(tmp_path, *callbacks, max_steps=3).train()
    folder = tmp_path / "activations" / "rank-00000"
    assert sorted(path.name for path in folder.iterdir()) == [
        "steps-00000001-00000002.safetensors",
        "steps-00000003-00000003.safetensors",
    ]
    kept = {key: tensor for path in folder.iterdir() for key, tensor in load_file(path).items()}
    assert set(kept) == {f"{step}/microbatch-0/layers.0" for step in seen}
    for step, expected in seen.items():
        assert torch.equal(kept[f"{step}/microbatch-0/layers.0"], expected)


class Named(nn.Module):
    """Puts out a dict, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        guess = self.layer(x)
        return {"loss": nn.functional.mse_loss(guess, y), "guess": guess}


def test_activations_that_a_module_puts_out_by_name(tmp_path: Path) -> None:
    small_trainer(tmp_path, DumpActivations("kept"), model=Named(), max_steps=1).train()
    kept = load_file(tmp_path / "kept/rank-00000/steps-00000001-00000001.safetensors")
    place = "step-00000001/microbatch-0"
    assert kept.keys() == {f"{place}/layer", f"{place}/model", f"{place}/model#1"}
    assert torch.equal(kept[f"{place}/layer"], kept[f"{place}/model#1"])


def test_a_resumed_run_writes_the_same_activations(tmp_path: Path) -> None:
    """Broken off with steps in the buffer; no step is in two files, and none is missing."""

    def fail(ctx: Any) -> None:
        if ctx.step == 5:
            raise RuntimeError("broken off")

    def train(folder: Path, *own: ds.Callback) -> None:
        dump = DumpActivations(buffer_steps=3, modules="layers")
        small_trainer(folder, dump, *own, max_steps=9, save_steps=4).train()

    train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        train(tmp_path / "parts", Listener({"on_step_done": fail}))
    train(tmp_path / "parts")
    whole, parts = (
        {path.name: load_file(path) for path in (tmp_path / run / "activations/rank-00000").iterdir()}
        for run in ("whole", "parts")
    )
    assert sorted(whole) == [
        "steps-00000001-00000003.safetensors",
        "steps-00000004-00000004.safetensors",
        "steps-00000005-00000007.safetensors",
        "steps-00000008-00000008.safetensors",
        "steps-00000009-00000009.safetensors",
    ]
    for name, tensors in whole.items():
        assert parts[name].keys() == tensors.keys()
        assert all(torch.equal(parts[name][key], tensor) for key, tensor in tensors.items())


# --- Notify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def inbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes messages as JSON: its address for apprise, and what it was sent."""
    messages: list[dict[str, Any]] = []

    class Inbox(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Inbox)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}/", messages
    server.shutdown()
    thread.join()
    server.server_close()


def test_messages_arrive(tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    address, messages = inbox
    parts = {"eval_dataset": tiny_regression_data(4)}
    own = Notify(address, on=["begin", "evaluate", "save", "end"])
    pickle.dumps(own)  # as other libraries do; apprise's own state does not survive it
    small_trainer(tmp_path / "run", own, parts=parts, max_steps=4, eval_steps=4, save_steps=4).train()
    titles = sorted(message["title"] for message in messages)
    assert titles == ["run: begins", "run: evaluated (eval)", "run: finished", "run: saved"]
    (evaluated,) = [message["message"] for message in messages if "evaluated" in message["title"]]
    assert evaluated.startswith("step 4 on ") and "eval_loss" in evaluated


def test_a_run_that_breaks_off_says_so_once(tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    def on_step_end(ctx: Any) -> None:
        raise ValueError("no more")

    address, messages = inbox
    with pytest.raises(ValueError, match="no more"):
        small_trainer(tmp_path / "run", Listener({"on_step_end": on_step_end}), Notify([address]), max_steps=4).train()
    (message,) = messages
    assert message["title"] == "run: failed" and "ValueError: no more" in message["message"]


def test_a_message_does_not_wait_for_the_answer_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = threading.Event()
    in_time: list[bool] = []

    def notify(apprise: Any, body: str, title: str) -> bool:
        if title == "run: begins":
            in_time.append(arrived.wait(60))
        else:
            arrived.set()
        return True

    monkeypatch.setattr("apprise.Apprise.notify", notify)
    small_trainer(tmp_path / "run", Notify("json://localhost", on=["begin", "end"]), max_steps=2).train()
    assert in_time == [True]


def test_a_server_that_is_gone_is_not_felt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert small_trainer(tmp_path, Notify("json://127.0.0.1:9/"), max_steps=2).train().reason == "finished"
    assert "could not be sent" in caplog.text


def test_without_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ds.ConfigurationError, match=r"pip install 'dalsegno\[notify\]'"):
        Notify("json://localhost")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Notify("nonsense"), "does not understand the address"),
        (lambda: Notify([]), r"urls=\[\]; needs a string, or a list of strings"),
        (lambda: Notify("json://localhost", on="saved"), "unknown Notify: on 'saved'; did you mean 'save'"),
        (lambda: FlopUtilization(0), "peak_hardware_flops=0; needs a finite number over 0"),
        (lambda: DumpActivations(modules="("), "is not a regular expression"),
        (lambda: ModelEvalMetrics({"a": 1}, select=guesses), "is not a metric"),  # type: ignore[dict-item]
    ],
)
def test_wrong_arguments(build: Any, message: str) -> None:
    with pytest.raises(ds.DalsegnoError, match=message):
        build()


def test_peak_memory_has_forgathers_attributes(tmp_path: Path) -> None:
    peak = PeakMemory(do_log=True)
    small_trainer(tmp_path, peak, max_steps=1).train()
    assert (peak.rank, peak.world_size, peak.enabled, peak.do_log, peak.show_details) == (0, 1, False, True, False)
    assert peak.summary_writer is None and not peak.enable_memory_snapshot
    assert peak.max_allocated > 2**20
