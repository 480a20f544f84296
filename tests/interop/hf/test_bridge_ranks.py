"""dalsegno's callbacks in Hugging Face's Trainer on two ranks (DDP): their numbers, held against other computations."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
from dalsegno.checkpoint import Checkpoint, read_tensors
from dalsegno.interop.hf import Bridge
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks
from support.languages import WORDS, Letters, Speller


class Alphabet(Letters):
    """Their trainer writes it into each checkpoint."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "alphabet.txt").write_text(self.alphabet)


def pages(count: int, length: int = 24) -> list[dict[str, torch.Tensor]]:
    ids = torch.tensor(Letters().encode(WORDS * 4))
    cut = [ids[start : start + length] for start in range(0, 7 * count, 7)]
    return [{"input_ids": page, "labels": page} for page in cut]


class Auditor(transformers.TrainerCallback):
    """Computes what dalsegno's callbacks compute, in a plain way."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}
        self.norms: dict[int, dict[str, float]] = {}
        self.bins: dict[int, dict[str, Counter[int]]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.average = {name: each.detach().clone() for name, each in model.named_parameters()}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        gradients = {name: each.grad.flatten().tolist() for name, each in model.named_parameters()}
        step = state.global_step + 1
        self.norms[step] = {name: math.sqrt(sum(x * x for x in each)) for name, each in gradients.items()}
        self.bins[step] = {
            name: Counter(min(max(math.frexp(x)[1] - 1, -40), 15) for x in each if x)
            for name, each in gradients.items()
        }

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        for name, each in model.named_parameters():
            self.average[name].lerp_(each.detach(), 1 - self.decay)


def train_on_a_rank(output_dir: Path) -> dict[str, Any]:
    """What this rank has seen, and what the auditor has computed."""
    torch.manual_seed(0)
    auditor = Auditor(0.8)
    args = transformers.TrainingArguments(
        str(output_dir),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        learning_rate=0.05,
        max_steps=30,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    trainer = transformers.Trainer(
        Speller(),
        args,
        train_dataset=pages(32),
        eval_dataset=pages(8),
        processing_class=Alphabet(),
        callbacks=[auditor],
    )

    class OnRankOne(ds.Callback):
        def on_step_end(self, ctx: Any) -> None:
            if args.process_index == 1 and ctx.step == 7:
                ctx.control.stop("seen by rank 1")

    ours = [
        *[JsonLogger(), GradNormLogger(), GradHistogram(every=2), EMA(0.8), NaNChecker(), OnRankOne()],
        TBLogger(),
        *[EarlyStopping(patience=50), DivergenceDetector(patience=50)],
        TextgenCallback(prompts=["the c"], max_new_tokens=5),
    ]
    trainer.add_callback(Bridge(ours, trainer=trainer))
    trainer.train()
    return {
        "ended at": trainer.state.global_step,
        "norms": auditor.norms,
        "bins": auditor.bins,
        "average": {name: each.tolist() for name, each in auditor.average.items()},
        "evaluated": [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each],
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The output directory, and what each rank returns."""
    output_dir = tmp_path_factory.mktemp("run")
    first, second = run_ranks(train_on_a_rank, 2, output_dir)
    return output_dir, first, second


def log(output_dir: Path, name: str) -> list[dict[str, Any]]:
    return list(read_records(output_dir / "logs" / f"{name}.jsonl"))


def test_one_ranks_request_ends_training_on_all(run: Any) -> None:
    output_dir, first, second = run
    assert (first["ended at"], second["ended at"]) == (7, 7)
    assert (output_dir / "checkpoint-7" / "dalsegno" / "manifest.json").exists()


def test_records_are_written_once(run: Any) -> None:
    output_dir, *_ = run
    written = [(record.get("kind", "train"), record["global_step"]) for record in log(output_dir, "train")[1:]]
    both = [(kind, step) for step in (2, 4, 6) for kind in ("train", "eval")]
    assert written == [*both, ("final", 7)]


def test_gradient_norms(run: Any) -> None:
    output_dir, first, second = run
    assert first["norms"] == second["norms"], "gradients are reduced"
    records = log(output_dir, "gradient_norms")
    assert [record["global_step"] for record in records] == [2, 4, 6]
    for record in records:
        assert record["norms"] == pytest.approx(first["norms"][record["global_step"]], rel=1e-5)


def test_gradient_histograms(run: Any) -> None:
    output_dir, first, _ = run
    records = log(output_dir, "grad_histograms")
    assert [record["global_step"] for record in records] == [2, 4, 6]
    for record in records:
        for name, counts in record["counts"].items():
            found = {number - 40: count for number, count in enumerate(counts) if count}
            assert found == first["bins"][record["global_step"]][name]


def test_averages(run: Any) -> None:
    output_dir, first, second = run
    assert first["average"] == second["average"]
    saved = read_tensors(Checkpoint.open(output_dir / "checkpoint-7" / "dalsegno"))["callbacks.EMA"]
    for name, average in first["average"].items():
        torch.testing.assert_close(saved[name], torch.tensor(average))


def test_evaluations_measure_the_averages(run: Any) -> None:
    """The last evaluation, at step 6, of the averages of step 6: those of step 7 without the last update."""
    output_dir, first, _ = run
    model = Speller().eval()
    seventh = {name: torch.tensor(each) for name, each in first["average"].items()}
    weights = load_file(output_dir / "checkpoint-7" / "model.safetensors")
    model.load_state_dict({name: (seventh[name] - 0.2 * weights[name]) / 0.8 for name in seventh})
    batch = {name: torch.stack([page[name] for page in pages(8)]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        expected = float(model(**batch)["loss"])
    records = [record for record in log(output_dir, "train") if record.get("kind") == "eval"]
    assert records[-1]["evaluated_weights"] == "EMA"
    assert records[-1]["eval_loss"] == first["evaluated"][-1] == pytest.approx(expected, rel=1e-4)


def test_text(run: Any) -> None:
    output_dir, *_ = run
    records = log(output_dir, "texts")
    assert [record["global_step"] for record in records] == [2, 4, 6]
    assert all(len(record["texts"][0]["text"]) == 5 for record in records)


def end_on_a_rank(output_dir: Path, detector: ds.Callback, bias: float = 0.0, **settings: Any) -> tuple[int, list[str]]:
    """Where training ends if it learns nothing, and rank 1's model is changed in step 4; and the checkpoints."""
    torch.manual_seed(0)
    model = Speller()
    model.dropout.p = 0.0

    class Break(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3 and args.process_index == 1:
                model.head.bias.data[0] += bias

    args = transformers.TrainingArguments(
        str(output_dir),
        per_device_train_batch_size=2,
        learning_rate=0.0,
        max_steps=12,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=3,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        ddp_find_unused_parameters=False,
        **settings,
    )
    trainer = transformers.Trainer(model, args, train_dataset=pages(32), eval_dataset=pages(8), callbacks=[Break()])
    trainer.add_callback(Bridge([detector]))
    trainer.train()
    return trainer.state.global_step, sorted(path.name for path in output_dir.glob("checkpoint-*"))


def end_by_each_detector_on_a_rank(output_dir: Path) -> dict[str, Any]:
    return {
        "early stopping": end_on_a_rank(output_dir / "a", EarlyStopping(patience=2)),
        "NaN": end_on_a_rank(output_dir / "b", NaNChecker(), float("nan")),
        "divergence": end_on_a_rank(output_dir / "c", detector(), 20.0),
        "divergence in bfloat16": end_on_a_rank(output_dir / "d", detector(), 20.0, bf16=True),
        "divergence to NaN": end_on_a_rank(
            output_dir / "e", DivergenceDetector(), float("nan"), logging_nan_inf_filter=False
        ),
    }


def detector() -> DivergenceDetector:
    return DivergenceDetector(smoothing=1.0, threshold=1.0, patience=2, warmup=1)


def test_each_detector_ends_both_ranks(tmp_path: Path) -> None:
    ends = {
        "early stopping": (6, ["checkpoint-3", "checkpoint-6"]),
        "NaN": (4, ["checkpoint-3"]),
        "divergence": (6, ["checkpoint-3", "checkpoint-6"]),
        "divergence in bfloat16": (6, ["checkpoint-3", "checkpoint-6"]),
        "divergence to NaN": (4, ["checkpoint-3"]),
    }
    assert run_ranks(end_by_each_detector_on_a_rank, 2, tmp_path) == [ends] * 2


def test_a_tracker_gets_each_record_once(run: Any) -> None:
    output_dir, *_ = run
    found = EventAccumulator(str(output_dir / "logs" / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train-loss")] == [2, 4, 6]
