"""Builds this rank's loaders from TrainingArguments and the data passed to a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dalsegno.args import TrainingArguments
from dalsegno.distributed import accelerator
from dalsegno.distributed.layout import Layout
from dalsegno.distributed.modes import parts_of_batch
from dalsegno.errors import ConfigurationError, EmptyDataset

from . import (
    EvalBatches,
    EvalLoader,
    ResumableLoader,
    check_same_length,
    eval_loader,
    resumable_eval_loader,
    resumable_loader,
    train_loader,
)

Collator = Callable[[list[Any]], Any]


class EvaluationSet(NamedTuple):
    """One evaluation set, possibly of several."""

    name: str
    prefix: str
    """Prefix of its metrics' names."""
    loader: EvalLoader


def train_loader_from_args(
    args: TrainingArguments, layout: Layout, dataset: Any, loader: Iterable[Any] | None, collator: Collator | None
) -> ResumableLoader:
    """Build the training data. Collective. Raises ConfigurationError unless exactly one of dataset and loader is given
    and of a supported kind, if the ranks' datasets differ in length, or if a batch does not divide into the
    micro-batches of a pipeline; EmptyDataset if there is no batch."""
    if (dataset is None) == (loader is None):
        raise ConfigurationError("give exactly one of train_dataset= and train_dataloader=")
    if loader is not None:
        return resumable_loader(loader, seed=args.shuffle_seed, world_size=layout.data_size)
    check_same_length("train_dataset", dataset)
    _expect_divisible(args)
    return train_loader(
        dataset,
        batch_size=args.per_device_train_batch_size,
        seed=args.shuffle_seed,
        drop_last=args.dataloader_drop_last,
        persistent_workers=args.dataloader_persistent_workers,
        **_reading(args, layout, collator),
    )


def _expect_divisible(args: TrainingArguments) -> None:
    batch, parts = args.per_device_train_batch_size, parts_of_batch(args.parallel)
    if batch % parts:
        fitting = ", ".join(str(number) for number in range(1, batch + 1) if batch % number == 0)
        raise ConfigurationError(
            f"parallel={args.parallel}: a batch of {batch} samples (per_device_train_batch_size) does not divide into "
            f"{parts} micro-batches; {fitting} fit"
        )


def evaluation_sets_from_args(
    args: TrainingArguments, layout: Layout, datasets: Any, loaders: Any, collator: Collator | None
) -> list[EvaluationSet]:
    """Build one set from a dataset or a loader, several from a dict of them, none from None. Collective. Raises
    ConfigurationError if both datasets and loaders are given, or an unsupported kind; or if the ranks' datasets differ
    in length; EmptyDataset if one has no sample."""
    if datasets is not None and loaders is not None:
        raise ConfigurationError("give eval_dataset= or eval_dataloader=, not both")
    given = datasets if datasets is not None else loaders
    if given is None:
        return []

    def loader_of(source: Any) -> EvalLoader:
        if datasets is None:
            return resumable_eval_loader(source, seed=args.seed, world_size=layout.data_size)
        check_same_length("eval_dataset", source)
        return eval_loader(
            source,
            batch_size=args.per_device_eval_batch_size,
            seed=args.seed,
            **_reading(args, layout, collator),
        )

    if not isinstance(given, dict):
        return [EvaluationSet("eval", "eval", loader_of(given))]
    sets = []
    for name, source in given.items():
        try:
            sets.append(EvaluationSet(name or "eval", f"eval_{name}" if name else "eval", loader_of(source)))
        except EmptyDataset as error:
            raise EmptyDataset(f"the set {name!r}: {error}") from error
    return sets


def eval_batches(sets: Sequence[EvaluationSet], device: torch.device) -> EvalBatches | dict[str, EvalBatches]:
    """Return the evaluation sets as callbacks see them: the only one, or several by name."""
    loaders = {each.name: EvalBatches(each.loader, device) for each in sets}
    return loaders.get("eval", loaders) if len(loaders) == 1 else loaders


def _reading(args: TrainingArguments, layout: Layout, collator: Collator | None) -> dict[str, Any]:
    """Return the loader arguments that training and evaluation share on this rank."""
    return {
        "rank": layout.data_rank,
        "world_size": layout.data_size,
        "collate_fn": collator,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and accelerator.can_pin() and not args.use_cpu,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
