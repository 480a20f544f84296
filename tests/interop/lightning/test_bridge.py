"""dalsegno's callbacks in Lightning's Trainer: resumed exactly, also on two ranks, and flags in both directions."""

from __future__ import annotations

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
    GradNormLogger,
    JsonLogger,
    NaNChecker,
    TBLogger,
    TextgenCallback,
)
from dalsegno.testing import run_ranks, tiny_regression_data
from support.languages import WORDS, Letters, Speller
from support.listeners import Listener, Trace

pytest.importorskip("pytorch_lightning")

from dalsegno.interop.lightning import Bridge
from interop.bridges import records
from interop.lightning.bridged import (
    At,
    Auditor,
    Module,
    data,
    fit,
    pl,
    states,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore")


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
    assert list((tmp_path / ".dalsegno").iterdir()) == [], "states lie there only while they are packed or unpacked"


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


def test_losses_of_double_precision_are_not_rounded(tmp_path: Path) -> None:
    micro: list[float] = []
    whole: list[float] = []
    look = Listener(
        {
            "on_microbatch_end": lambda ctx: micro.append(float(ctx.loss)),
            "on_step_end": lambda ctx: whole.append(float(ctx.loss)),
        }
    )
    fit(tmp_path, [look], max_epochs=1, precision="64-true")
    assert whole == micro


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
    steps = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert seen["loss"] == pytest.approx(steps, rel=1e-5), "the epoch's last step has one batch"
    assert len(seen["ready"]) == 3 and min(seen["ready"]) > 0.1
    assert seen["clipped"] == pytest.approx([0.01] * 3, rel=1e-3)


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(ds.ConfigurationError, match="automatic optimization"):
        trainer(tmp_path, Bridge([Trace()]), gradient_clip_val=None).fit(manual, data()[0])


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
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
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
    averages = states(tmp_path / "checkpoints" / "step=7.ckpt")["callbacks.EMA"][1]
    for name, average in first["average"].items():
        torch.testing.assert_close(torch.tensor(averages[name]), torch.tensor(average))


def end_on_a_rank(output_dir: Path, detector: ds.Callback, bias: float = 0.0, **settings: Any) -> int:
    """Where training ends if it learns nothing, and rank 1's model is changed in step 4."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
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
