"""Feeds: what TrainingArguments make of the data that a Trainer is given, for this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dalsegno.args import TrainingArguments
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError

from . import (
    EvalBatches,
    EvalLoader,
    ResumableLoader,
    eval_loader,
    expect_same_length,
    resumable_eval_loader,
    resumable_loader,
    train_loader,
)

Collator = Callable[[list[Any]], Any]


class EvaluationSet(NamedTuple):
    """What the model is measured on, alone or beside others."""

    name: str
    prefix: str
    """Of its metrics' names."""
    feed: EvalLoader


def train_loader_from_args(
    args: TrainingArguments, dataset: Any, loader: Iterable[Any] | None, collator: Collator | None
) -> ResumableLoader:
    """Collective.

    Raises:
        ConfigurationError: if there is not just one of dataset and loader, or it is none; or if the ranks are given
            datasets of different lengths.
        EmptyDataset: if there is not a single batch.
    """
    if (dataset is None) == (loader is None):
        raise ConfigurationError("give train_dataset= or train_dataloader=, one of them")
    if loader is not None:
        return resumable_loader(loader, seed=args.shuffle_seed, world_size=collectives.world_size())
    expect_same_length("train_dataset", dataset)
    return train_loader(
        dataset,
        batch_size=args.per_device_train_batch_size,
        seed=args.shuffle_seed,
        drop_last=args.dataloader_drop_last,
        persistent_workers=args.dataloader_persistent_workers,
        **_reading(args, collator),
    )


def evaluation_sets_from_args(
    args: TrainingArguments, datasets: Any, loaders: Any, collator: Collator | None
) -> list[EvaluationSet]:
    """One of a dataset or a loader, several of a dict of them, none of None. Collective.

    Raises:
        ConfigurationError: if there are both datasets and loaders, or something else; or if the ranks are given
            datasets of different lengths.
        EmptyDataset: if there is not a single sample in one.
    """
    if datasets is not None and loaders is not None:
        raise ConfigurationError("give eval_dataset= or eval_dataloader=, not both")
    given = datasets if datasets is not None else loaders
    if given is None:
        return []

    def feed(source: Any) -> EvalLoader:
        if datasets is None:
            return resumable_eval_loader(source, seed=args.seed, world_size=collectives.world_size())
        expect_same_length("eval_dataset", source)
        return eval_loader(
            source,
            batch_size=args.per_device_eval_batch_size,
            seed=args.seed,
            **_reading(args, collator),
        )

    if not isinstance(given, dict):
        return [EvaluationSet("eval", "eval", feed(given))]
    return [
        EvaluationSet(name or "eval", f"eval_{name}" if name else "eval", feed(source))
        for name, source in given.items()
    ]


def eval_batches(sets: Sequence[EvaluationSet], device: torch.device) -> EvalBatches | dict[str, EvalBatches]:
    """The evaluation sets as callbacks are shown them: the only one, or several by name."""
    loaders = {each.name: EvalBatches(each.feed, device) for each in sets}
    return loaders.get("eval", loaders) if len(loaders) == 1 else loaders


def _reading(args: TrainingArguments, collator: Collator | None) -> dict[str, Any]:
    """How a dataset is read on this rank, whatever for."""
    return {
        "rank": collectives.rank(),
        "world_size": collectives.world_size(),
        "collate_fn": collator,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available() and not args.use_cpu,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
