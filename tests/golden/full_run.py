"""A run with every stateful callback that works on a CPU, whose checkpoints are kept for ever. Nothing here may change.

It uses public names only, so the same file runs under any layout of the package. Callbacks of other libraries come from
``tests/interop/<library>/golden_callbacks.py``; the state of a library that has gone is carried forward.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.analysis import open_log
from dalsegno.checkpoint import Checkpoint, read_tensors, saved_states
from dalsegno.logs import read_records
from dalsegno.testing import DataOrder

SAVED, CRASH, LAST = 34, 36, 38
"""Steps: of the checkpoint that is kept, where the first leg crashes, and of the end."""
INTEROP = Path(__file__).parent.parent / "interop"
LIBRARIES = sorted(path.parent.name for path in INTEROP.glob("*/golden_callbacks.py"))
TIMED = ("timestamp", "_runtime", "_per_second", "tok_per_sec", "mfu", "peak_mem")
NOT_COMPARED = ("generator", "generators", "offset", "tail", "files", *TIMED)
"""Endings of names in states: random generators, positions in files that hold times, names of files, and times."""


class Letters:
    """The plainest tokenizer: a letter is a token."""

    alphabet = "abcdefgh"

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.alphabet[number] for number in ids)


class Speller(nn.Module):
    """A causal model with dropout. Returns logits, and the loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(8, 6)
        self.hidden = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(6, 8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        """Both of shape (batch, length), int64."""
        x = self.letters(input_ids)
        logits = self.head(x + torch.tanh(self.dropout(self.hidden(x.cumsum(1) / 4))))
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Words(Dataset[dict[str, Tensor]]):
    """20 words of 5 letters that need no random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(5) * (index % 3 + 1) % 8
        return {"input_ids": ids, "labels": ids}


class ShuffledBatches:
    """A user's own loader: batches of two in an order of its own, with a state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.order: list[int] = []

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        words = Words()
        if not self.order:
            self.order = torch.randperm(len(words), generator=self.generator).tolist()
        while self.order:
            pair = [words[self.order.pop()] for _ in range(2)]
            yield {name: torch.stack([each[name] for each in pair]) for name in pair[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])
        self.generator.set_state(state["generator"])


class EndOfFirstLeg(Exception):
    pass


class Crash(ds.Callback):
    def on_step_begin(self, ctx: Any) -> None:
        if ctx.state.global_step == CRASH:
            raise EndOfFirstLeg


class Loaded(ds.Callback):
    """Keeps the keys of the states that found no callback."""

    carried: list[str]

    def on_load(self, ctx: Any) -> None:
        self.carried = ctx.report.carried


class LetterAccuracy:
    """A metric as ModelEvalMetrics takes it, over all ranks."""

    def __init__(self) -> None:
        self.reset()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.right += int((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
        self.count += labels[:, 1:].numel()

    def compute(self) -> float:
        total = torch.tensor([self.right, self.count])
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total[0] / total[1])

    def reset(self) -> None:
        self.right = self.count = 0


def listeners(world_size: int) -> list[Any]:
    """Every stateful callback, and those without a state that add to the records."""
    writer = callbacks.ResumableSummaryWriter("logs/board")
    alone = [callbacks.GradientNoiseScale(decay=0.8)] if world_size == 1 else []  # it refuses sharded weights
    own = [
        callbacks.JsonLogger(run="full"),
        writer,
        callbacks.TBLogger(experiment_info={"about": "every callback"}),
        callbacks.TBLogger(writer, scalars={"score": "spike_score/loss"}, name="BoardLogger"),
        callbacks.DivergenceDetector(warmup=2, threshold=100.0),
        callbacks.EarlyStopping(patience=50),
        callbacks.EMA(0.9, every=2, warmup=True),
        callbacks.GradHistogram(every=12),
        callbacks.GradNormLogger(),
        callbacks.LearningDynamics(every=9),
        callbacks.ParameterNormLogger(power_iter_steps=20),
        callbacks.SkipSamples(3),
        callbacks.StabilityMonitor(deviations=2.0),
        callbacks.TextgenCallback(
            prompts=["ab", "c"], generation_config={"do_sample": True}, generation_steps=12, max_new_tokens=3
        ),
        callbacks.ComputeNorm(),
        callbacks.LogOptimizerParamGroup(["lr", "weight_decay"]),
        callbacks.ModelEvalMetrics(
            {"accuracy": LetterAccuracy()}, select=lambda out, batch: (out["logits"], batch["labels"])
        ),
        callbacks.SamplesStreamedInfo(),
        DataOrder(),
        *alone,
    ]
    foreign = [importlib.import_module(f"interop.{library}.golden_callbacks") for library in LIBRARIES]
    return [*own, *(each for module in foreign for each in module.golden_callbacks(world_size))]


def data_and_schedule(model: Speller, world_size: int) -> dict[str, Any]:
    """Alone: a user's own loader, optimizer and schedule. On several ranks: a DataLoader that is read again."""
    if world_size > 1:
        shuffled = DistributedSampler(Words(), world_size, dist.get_rank(), seed=3)
        return {"train_dataloader": DataLoader(Words(), batch_size=2, sampler=shuffled)}
    rest = [*model.hidden.parameters(), *model.head.parameters()]
    groups = [{"params": [model.letters.weight], "weight_decay": 0.0}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAST)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [4])
    return {"train_dataloader": ShuffledBatches(), "optimizer": optimizer, "lr_scheduler": schedule}


def trainer(output_dir: Path, parallel: str, *more: ds.Callback) -> ds.Trainer:
    torch.manual_seed(0)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = Speller()
    args = ds.TrainingArguments(
        output_dir,
        max_steps=LAST,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=1,
        eval_steps=6,
        save_steps=17,
        metric_for_best_model="eval_loss",
        parallel=parallel,
        use_cpu=True,
        disable_tqdm=True,
    )
    return ds.Trainer(
        model,
        args,
        eval_dataset=Words(),
        processing_class=Letters(),
        callbacks=[*listeners(world_size), *more],
        **data_and_schedule(model, world_size),
    )


def first_leg(output_dir: Path, parallel: str) -> None:
    """Crashes after the checkpoint that is kept, so that its logs have tails."""
    with contextlib.suppress(EndOfFirstLeg):
        trainer(output_dir, parallel, Crash()).train()


def last_leg(output_dir: Path, parallel: str) -> list[str]:
    """From that checkpoint to the end, which is saved too. Returns the keys of the states that were carried forward."""
    loaded = Loaded()
    result = trainer(output_dir, parallel, loaded).train()
    assert result.global_step == LAST, result
    return loaded.carried


def contents(output_dir: Path) -> dict[str, Any]:
    """Tensors and states of the last checkpoint, records and curves, as JSON can hold them."""
    checkpoint = Checkpoint.open(output_dir / f"checkpoints/step-{LAST:08d}")
    states = {key: state for key, state in saved_states(checkpoint).items() if key not in ("rng", "clock")}
    logs = sorted((output_dir / "logs").glob("*.json*"))
    return {
        "tensors": plain(read_tensors(checkpoint)),
        "states": plain(states),
        "records": {path.name: plain(list(read_records(path))) for path in logs},
        "curves": {name: curves(output_dir / "logs" / name) for name in ("board", "tensorboard")},
    }


def curves(folder: Path) -> dict[str, Any]:
    """Steps and values of each scalar in TensorBoard's files."""
    log = open_log(folder)
    return {
        name: [list(map(int, log.metric(name).steps)), list(map(float, log.metric(name).values))]
        for name in log.metrics()
    }


def plain(value: Any) -> Any:
    """A state as nested lists, dicts and scalars."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items() if not str(key).endswith(NOT_COMPARED)}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
