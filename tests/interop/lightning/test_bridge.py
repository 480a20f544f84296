"""dalsegno's callbacks in Lightning's Trainer: resumed exactly, also on two ranks, and flags in both directions."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import (
    EMA,
    DivergenceDetector,
    EarlyStopping,
    GradHistogram,
    GradientNoiseScale,
    GradNormLogger,
    JsonLogger,
    NaNChecker,
    TBLogger,
    TextgenCallback,
)
from dalsegno.testing import run_ranks, start_ranks, tiny_regression_data
from support.languages import WORDS, Letters, Speller
from support.listeners import Journal, Listener, Trace

pytest.importorskip("pytorch_lightning")
from dalsegno.interop.lightning import Bridge
from dalsegno.interop.lightning.bridge import UNSUPPORTED_EVENTS
from interop.lightning.bridged import (
    At,
    Auditor,
    Module,
    data,
    fit,
    fit_until_killed,
    newest,
    pl,
    records,
    several,
    states,
    trainer,
)
from interop.pages import assert_rows, examples, refused_builtins

pytestmark = pytest.mark.filterwarnings("ignore")

UNSUPPORTED = tuple(event.handler for event in UNSUPPORTED_EVENTS)


def numbers(checkpoint: Path) -> dict[str, Any]:
    """States that have no times in them."""
    saved, tensors = states(checkpoint)
    kept = {key: saved[key] for key in ("callbacks.DivergenceDetector", "callbacks.EarlyStopping", "callbacks.EMA")}
    return kept | {name: tensor.tolist() for name, tensor in tensors["callbacks.EMA"].items()}


def assert_same(output_dir: Path, uninterrupted: Path) -> None:
    found, expected = records(output_dir), records(uninterrupted)
    assert found == expected
    assert [len(found[name]) for name in sorted(found)] == [6, 4, 16]
    assert numbers(newest(output_dir)) == numbers(newest(uninterrupted))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    fit(folder, several())
    return folder


def test_a_killed_run_resumes_with_the_logs_and_states_of_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path
) -> None:
    (outcome,) = start_ranks(fit_until_killed, 1, tmp_path, 13).wait(300)
    assert outcome.was_killed
    assert newest(tmp_path).name == "epoch=1-step=10.ckpt"
    fit(tmp_path, several(), ckpt=newest(tmp_path))
    assert_same(tmp_path, uninterrupted)
    assert list((tmp_path / "logs" / "rewound").glob("train.jsonl*"))
    assert list((tmp_path / ".dalsegno").iterdir()) == []


def test_an_older_checkpoint_rewinds_the_logs(tmp_path: Path, uninterrupted: Path) -> None:
    fit(tmp_path, several())
    fit(tmp_path, several(), ckpt=tmp_path / "checkpoints" / "epoch=0-step=5.ckpt")
    assert_same(tmp_path, uninterrupted)


def test_epochs_are_counted_over_a_resume(tmp_path: Path) -> None:
    """Saved after an epoch's last step, before on_train_epoch_end: on_epoch_end fires in the next process."""

    class Epochs(Trace):
        seen: list[Any]

        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def on_epoch_begin(self, ctx: Any) -> None:
            self.seen.append(("begin", ctx.epoch, ctx.state.global_step))

        def on_epoch_end(self, ctx: Any) -> None:
            self.seen.append(("end", ctx.epoch, ctx.state.global_step))

        def state_dict(self) -> Any:
            return {"steps": self.steps, "seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.steps, self.seen = state["steps"], state["seen"]

    saver = pl.callbacks.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    fit(tmp_path, [Epochs()], saver=saver, max_epochs=2)
    resumed = Epochs()
    again = pl.callbacks.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    fit(tmp_path, [resumed], saver=again, max_epochs=2, ckpt=tmp_path / "checkpoints" / "epoch=0-step=5.ckpt")
    assert resumed.seen == [("begin", 0, 0), ("end", 0, 5), ("begin", 1, 5), ("end", 1, 10)]


def test_a_checkpoint_from_before_the_bridge_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = trainer(tmp_path, max_epochs=2)
    one.fit(Module(), *data())
    trace = Trace()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        fit(tmp_path, [trace], ckpt=newest(tmp_path))
    assert "was saved without a Bridge" in caplog.text
    assert trace.steps == 10


def test_damaged_states_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, several(), max_epochs=1)
    path = newest(tmp_path)
    content = torch.load(path, weights_only=True)
    content["callbacks"]["Bridge"]["dalsegno"]["shared.json"][20] ^= 1
    torch.save(content, path)
    with pytest.raises(ds.DamagedCheckpoint, match=r"shared\.json: has checksum"):
        fit(tmp_path, several(), ckpt=path)


def test_what_a_handler_requests_the_trainer_does(tmp_path: Path) -> None:
    def request(ctx: Any) -> None:
        ctx.control.should_save = ctx.control.should_log = ctx.step == 3
        if ctx.step == 7:
            ctx.control.stop("enough")

    logged: list[int] = []
    ends: list[str] = []
    asking = Listener(
        {
            "on_step_end": request,
            "on_log": lambda ctx: logged.append(ctx.state.global_step) if ctx.kind == "train" else None,
            "on_train_end": lambda ctx: ends.append(ctx.reason),
        }
    )
    one = fit(tmp_path, [asking], log_every_n_steps=100)
    assert (one.global_step, logged, ends) == (7, [3], ["stopped"])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"step=3.ckpt", "step=7.ckpt"}


def test_what_lightning_cannot_do_is_not_ignored(tmp_path: Path) -> None:
    def ask(ctx: Any) -> None:
        ctx.control.should_evaluate = True

    with pytest.raises(ds.ConfigurationError, match=r"should_evaluate"):
        fit(tmp_path, [Listener({"on_step_end": ask})])


def test_numbers_of_a_step(tmp_path: Path) -> None:
    """Losses, and gradients before and after clipping, with accumulation."""
    seen: dict[str, list[float]] = {"ready": [], "clipped": [], "loss": [], "micro": []}

    def total(ctx: Any) -> float:
        return float(sum(float((each.grad.double() ** 2).sum()) for each in ctx.model.parameters()) ** 0.5)

    look = Listener(
        {
            "on_gradients_ready": lambda ctx: seen["ready"].append(total(ctx)),
            "on_pre_optimizer_step": lambda ctx: seen["clipped"].append(total(ctx)),
            "on_microbatch_end": lambda ctx: seen["micro"].append(ctx.loss),
            "on_step_end": lambda ctx: seen["loss"].append(ctx.loss),
        }
    )
    module = Module(lr=0.0)
    one = trainer(tmp_path, Bridge([look]), max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.01)
    one.fit(module, *data())
    losses = [float(module.loss(batch)) for batch in data()[0]]
    assert seen["micro"] == pytest.approx(losses, rel=1e-5)
    assert seen["loss"][:2] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2], rel=1e-5)
    assert len(seen["ready"]) == 3 and min(seen["ready"]) > 0.1
    assert seen["clipped"] == pytest.approx([0.01] * 3, rel=1e-3)


def test_an_exception_is_passed_on(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("of theirs")

    journal = Journal(without=UNSUPPORTED)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, [journal], At(3, fail))
    assert journal.fired[-2:] == ["exception", "train_end"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ds.EventNotFired, match=r"GradientNoiseScale needs on_before_backward, which Lightning"):
        Bridge([GradientNoiseScale()])
    with pytest.raises(ds.ConfigurationError, match="EarlyStopping needs evaluations"):
        trainer(tmp_path, Bridge([EarlyStopping()])).fit(Module(), data()[0])
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(ds.ConfigurationError, match="automatic optimization"):
        trainer(tmp_path, Bridge([Trace()]), gradient_clip_val=None).fit(manual, data()[0])

    class Second(Bridge):  # Lightning itself refuses two callbacks of one class with state
        pass

    with pytest.raises(ds.ConfigurationError, match="two bridges take part"):
        trainer(tmp_path, Bridge([Trace()]), Second([Trace()])).fit(Module(), data()[0])


# --- two ranks --------------------------------------------------------------------------------------------------------


class Language(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.speller = Speller()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.speller(input_ids)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.speller(batch, labels=batch)["loss"]

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.speller(batch, labels=batch)["loss"], sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit_on_a_rank(output_dir: Path) -> dict[str, Any]:
    """What this rank has seen, and what the auditor has computed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE="2")
    auditor, rank = Auditor(0.8), int(os.environ["RANK"])

    class OnRankOne(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if rank == 1 and ctx.step == 7:
                ctx.control.stop("seen by rank 1")

    ours = [
        *[JsonLogger(), GradNormLogger(), GradHistogram(every=2), EMA(0.8), NaNChecker(), OnRankOne()],
        TBLogger(),
        *[EarlyStopping(patience=50), TextgenCallback(prompts=["the c"], max_new_tokens=5)],
    ]
    ids = torch.tensor(Letters().encode(WORDS * 4))
    pages = [ids[start : start + 24] for start in range(0, 224, 7)]
    one = trainer(
        output_dir,
        auditor,
        Bridge(ours, processing_class=Letters()),
        strategy="ddp",
        devices=2,
        val_check_interval=2,
        max_epochs=2,
    )
    one.fit(Language(), DataLoader(pages, batch_size=2), DataLoader(pages[:8], batch_size=4))
    return {
        "ended at": one.global_step,
        "norms": auditor.norms,
        "bins": auditor.bins,
        "average": {name: each.tolist() for name, each in auditor.average.items()},
    }


def test_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(fit_on_a_rank, 2, tmp_path)
    assert (first["ended at"], second["ended at"]) == (7, 7)
    assert first == second, "gradients are reduced"
    logs = records(tmp_path)
    written = [(record.get("kind", "train"), record["global_step"]) for record in logs["train.jsonl"][1:]]
    both = [(kind, step) for step in (2, 4, 6) for kind in ("train", "eval")]
    assert written == [*both, ("eval", 7), ("final", 7)], "Lightning evaluates before it stops"
    evaluated = [record["evaluated_weights"] for record in logs["train.jsonl"] if record.get("kind") == "eval"]
    assert evaluated == ["EMA"] * 4
    for record in logs["gradient_norms.jsonl"]:
        assert record["norms"] == pytest.approx(first["norms"][record["global_step"]], rel=1e-4)
    for record in logs["grad_histograms.jsonl"]:
        for name, counts in record["counts"].items():
            found = {number - 40: count for number, count in enumerate(counts) if count}
            assert found == first["bins"][record["global_step"]][name]
    steps = {name: [record["global_step"] for record in logs[f"{name}.jsonl"]] for name in ("grad_histograms", "texts")}
    assert steps == {"grad_histograms": [2, 4, 6], "texts": [2, 4, 6, 7]}
    curves = EventAccumulator(str(tmp_path / "logs" / "tensorboard")).Reload()
    assert [event.step for event in curves.Scalars("train-loss")] == [2, 4, 6]
    averages = states(tmp_path / "checkpoints" / "step=7.ckpt")[1]["callbacks.EMA"]
    for name, average in first["average"].items():
        torch.testing.assert_close(averages[name], torch.tensor(average))


def end_on_a_rank(output_dir: Path, detector: ds.Callback, bias: float = 0.0, **settings: Any) -> int:
    """Where training ends if it learns nothing, and rank 1's model is changed in step 4."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE="2")
    module, rank = Module(lr=0.0), int(os.environ["RANK"])

    def change() -> None:
        if rank == 1:
            module.layers[2].bias.data += bias

    one = trainer(output_dir, At(3, change), Bridge([detector]), strategy="ddp", devices=2, max_epochs=3, **settings)
    loaders = [DataLoader(tiny_regression_data(rows, seed=seed), batch_size=4) for seed, rows in ((0, 40), (1, 8))]
    one.fit(module, *loaders)
    return int(one.global_step)


def end_by_each_detector_on_a_rank(output_dir: Path) -> dict[str, int]:
    def detector() -> DivergenceDetector:
        return DivergenceDetector(smoothing=1.0, threshold=10.0, patience=2, warmup=1)

    return {
        "early stopping": end_on_a_rank(output_dir / "a", EarlyStopping(patience=2), val_check_interval=2),
        "NaN": end_on_a_rank(output_dir / "b", NaNChecker(), float("nan")),
        "divergence": end_on_a_rank(output_dir / "c", detector(), 20.0),
        "divergence in bfloat16": end_on_a_rank(output_dir / "d", detector(), 20.0, precision="bf16-mixed"),
    }


def test_each_detector_ends_both_ranks(tmp_path: Path) -> None:
    ends = {"early stopping": 7, "NaN": 4, "divergence": 6, "divergence in bfloat16": 6}
    assert run_ranks(end_by_each_detector_on_a_rank, 2, tmp_path) == [ends] * 2


# --- docs/bridges.md --------------------------------------------------------------------------------------------------


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples("Lightning")), {"__name__": "example"})
    steps = [record["global_step"] for record in records(tmp_path / "runs/pl")["train.jsonl"] if "loss" in record]
    assert steps == [*range(2, 21, 2)]


def test_the_page_lists_what_is_refused() -> None:
    assert_rows(
        "Lightning",
        {
            "events that are never fired": [event.handler for event in UNSUPPORTED_EVENTS],
            "built-ins that are refused": refused_builtins(Bridge),
        },
    )
