"""One training, alone and on two ranks, with callbacks that measure it; their values must be the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from dalsegno.callbacks import JsonLogger
from dalsegno.distributed import collectives
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks

LAYOUTS = ("none", "ddp", "fsdp")
STEPS = 8


def sentences(count: int = 24, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"tokens": torch.randint(0, 7, (6,), generator=generator)} for _ in range(count)]


def layout_trainer(
    output_dir: Path, layout: str, callbacks: Sequence[ds.Callback], samples: int = 24, **settings: Any
) -> ds.Trainer:
    """Two micro-batches of four samples a step, over all ranks; a record every two steps, evaluation every four."""
    torch.manual_seed(0)
    given = {"logging_steps": 2, "eval_steps": 4, "save_steps": 0, "max_steps": STEPS, **settings}
    args = ds.TrainingArguments(
        output_dir,
        per_device_train_batch_size=4 // collectives.world_size(),
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        max_grad_norm=0.5,
        parallel=layout,
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    return ds.Trainer(
        Uneven(),
        args,
        train_dataset=sentences(samples),
        eval_dataset=sentences(8, seed=1),
        callbacks=[JsonLogger(), *callbacks],
    )


def train(output_dir: Path, layout: str, build: Callable[[], Sequence[ds.Callback]]) -> None:
    layout_trainer(output_dir, layout, build()).train()


def train_with_padding(output_dir: Path, layout: str, build: Callable[[], Sequence[ds.Callback]]) -> None:
    """Each third step has one sample in its second micro-batch: on the second of two ranks that is padding."""
    layout_trainer(output_dir, layout, build(), samples=21).train()


def on_every_layout(
    folder: Path, build: Callable[[], Sequence[ds.Callback]], how: Callable[..., None] | None = None
) -> dict[str, Path]:
    """Train it in every way; the folders of the runs, by layout. Both functions stand at the top of a module."""
    for layout in LAYOUTS:
        run_ranks(how or train, 1 if layout == "none" else 2, folder / layout, layout, build)
    return {layout: folder / layout for layout in LAYOUTS}


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a record, with its place."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, f"{path}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from numbers(each, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, float(value)


def values(log: Path, ignored: Sequence[str]) -> dict[str, float]:
    """All numbers of a log, but those under keys that are ignored."""
    return {
        f"{number}{place}": value
        for number, record in enumerate(read_records(log))
        for place, value in numbers({key: each for key, each in record.items() if not key.endswith(tuple(ignored))})
    }


def assert_same_values(runs: dict[str, Path], log: str, ignored: Sequence[str] = (), rel: float = 1e-5) -> None:
    alone = values(runs["none"] / log, ignored)
    assert alone
    for layout in LAYOUTS[1:]:
        spread = values(runs[layout] / log, ignored)
        assert spread.keys() == alone.keys(), layout
        wrong = {
            place: (alone[place], spread[place])
            for place in alone
            if not math.isclose(alone[place], spread[place], rel_tol=rel, abs_tol=1e-9)
        }
        assert not wrong, (layout, wrong)
