"""What tests of all bridges use: callbacks to run there, their records, the verdict on a resume, the bridges' page."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dalsegno as ds
from dalsegno.callbacks import EMA, DivergenceDetector, EarlyStopping, GradHistogram, GradNormLogger, JsonLogger
from dalsegno.checkpoint import Checkpoint, read_tensors, saved_states
from dalsegno.logs import read_records
from dalsegno.logs.values import drop_wall_clock
from support.builtins import NAMES, build
from support.languages import Speller


def several() -> list[Any]:
    """Callbacks with state of each kind: numbers, positions in logs, tensors."""
    stopping = [DivergenceDetector(patience=100), EarlyStopping(patience=100)]
    return [JsonLogger(run="bridged"), GradNormLogger(), GradHistogram(every=3), EMA(0.9), *stopping]


def records(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each log, without times."""
    logs = sorted((output_dir / "logs").glob("*.jsonl"))
    return {log.name: [drop_wall_clock(record) for record in read_records(log)] for log in logs}


def states_in(folder: Path) -> dict[str, Any]:
    """The saved states of callbacks, with their tensors; without positions in logs, whose records have times."""
    found = Checkpoint.open(folder)
    tensors = {
        key: {name: tensor.tolist() for name, tensor in named.items()} for key, named in read_tensors(found).items()
    }
    numbers = {key: [_without_positions(each) for each in saved] for key, saved in saved_states(found).items()}
    return {key: (numbers[key], tensors.get(key)) for key in numbers if key not in ("clock", "bridge")}


def _without_positions(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    return state["records"] if "offset" in state else {key: _without_positions(each) for key, each in state.items()}


def alone() -> None:
    """Forget the job of one rank in which a test has started this process: accelerate would start a process group."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]


class Verdict(ds.Callback):
    proof: Any = None
    reason = ""
    ended_at = 0

    def on_train_end(self, ctx: Any) -> None:
        self.proof, self.reason, self.ended_at = ctx.state.resume_proof, ctx.reason, ctx.state.global_step

    @property
    def found(self) -> tuple[str, str | None, int | None]:
        return self.proof.verdict, self.proof.what, self.proof.differs_at


class Left(Exception):
    """Training was left in the middle."""


def leave(*_: Any) -> None:
    raise Left


# --- what a model is trained on ---------------------------------------------------------------------------------------

PAGES, LENGTH, STEPS = 22, 12, 7
"""With batches of 4, two of them a step: an epoch's last batch has two samples on one rank, and its last step six."""


class Reader(Speller):
    """Counts what it is trained on, on this rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.given: list[tuple[int, int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training and input_ids.device.type != "meta":
            self.given.append((len(input_ids), input_ids.numel()))
        return super().forward(input_ids, labels)


def pages() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(27, (PAGES, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def by_step(given: Sequence[tuple[int, int]], batches_of_epoch: int) -> list[tuple[int, int]]:
    """Samples and tokens of each step: of two batches, or of an epoch's last one."""
    steps: list[list[tuple[int, int]]] = []
    for index, each in enumerate(given):
        if index % batches_of_epoch % 2 == 0:
            steps.append([])
        steps[-1].append(each)
    return [(sum(samples for samples, _ in step), sum(tokens for _, tokens in step)) for step in steps]


def sums(of_steps: Sequence[int]) -> list[int]:
    return [sum(of_steps[: step + 1]) for step in range(len(of_steps))]


def training_records(folder: Path) -> list[dict[str, Any]]:
    found = read_records(folder / "logs" / "train.jsonl")
    return [record for record in found if record.get("kind", "train") == "train" and "loss" in record]


# --- docs/coming-from -------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"


def section(library: str) -> str:
    """What the page of one library says of its bridge."""
    page = (FOLDER / f"{library}.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^## dalsegno's callbacks there\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    return str(text)


def examples(library: str) -> list[str]:
    """The examples of one library, which continue one another."""
    return re.findall(r"```python\n(.*?)```", section(library), flags=re.DOTALL)


def refused_builtins(build_bridge: Callable[[list[object]], object]) -> list[str]:
    """The built-in callbacks that a Bridge refuses."""
    refused = []
    for name in NAMES:
        try:
            build_bridge([build(name)])
        except ds.EventNotFired:
            refused.append(name)
    return refused


def assert_rows(library: str, rows: Mapping[str, list[str]]) -> None:
    """Each row of a table of ``library`` lists exactly these names."""
    for title, names in rows.items():
        row = f"| {title} | {', '.join(f'`{name}`' for name in names)} |"
        assert row in section(library), f"docs/coming-from/{library}.md lacks: {row}"
