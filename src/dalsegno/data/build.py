"""Builds this rank's loaders from TrainingArguments and the data passed to a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

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


IGNORED_LABEL = -100
"""Of a token that losses leave out, in torch and in Hugging Face's models."""
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED_LABEL}
"""Values that a loss and a model ignore, by column."""


class PaddedRows:
    """torch's ``default_collate``; and rows of lists, as Hugging Face's datasets have them, of which it makes tensors.

    Rows of different lengths are padded where a column's value for that is known: the tokenizer's for ``input_ids``,
    or 0 beside an ``attention_mask``. A tokenizer that makes masks gets the one that is missing.
    """

    def __init__(self, processing_class: Any = None) -> None:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        token, segment = getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "pad_token_type_id", 0)
        self._values = {**_PADDING, "token_type_ids": segment, **({"input_ids": token} if token is not None else {})}
        self._is_left = getattr(tokenizer, "padding_side", "right") == "left"
        self._masks = "attention_mask" in getattr(tokenizer, "model_input_names", ())

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], Mapping) and list in map(type, rows[0].values()):
            return self._columns(rows)
        try:
            return default_collate(rows)
        except RuntimeError as error:
            if isinstance(rows[0], Mapping):
                return self._columns(rows)
            raise ConfigurationError(
                f"the samples of a batch cannot be stacked: {error}; pass data_collator=, a function from a list of "
                "samples to a batch"
            ) from error

    def _columns(self, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        if self._masks and "input_ids" in rows[0] and "attention_mask" not in rows[0]:
            rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
        values = self._values if "attention_mask" not in rows[0] else {"input_ids": 0, **self._values}
        return {name: self._column(name, [row[name] for row in rows], values.get(name)) for name in rows[0]}

    def _column(self, name: str, values: list[Any], padding: int | None) -> Any:
        try:
            tensors = [torch.tensor(each or [0])[: len(each)] if _is_numbers(each) else each for each in values]
            lengths = {len(each) for each in tensors if isinstance(each, torch.Tensor) and each.ndim}
            if len(lengths) > 1 and padding is not None:
                tensors = [self._padded(each, max(lengths), padding) for each in tensors]
            return default_collate(tensors)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the column {name!r} of a batch's rows cannot be stacked: {error}. Pass data_collator=, a function "
                "from a list of rows to a batch, or processing_class=, the tokenizer, which pads rows of tokens"
            ) from error

    def _padded(self, row: torch.Tensor, length: int, padding: int) -> torch.Tensor:
        missing = row.new_full((length - len(row), *row.shape[1:]), padding)
        return torch.cat([missing, row] if self._is_left else [row, missing])


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and (not value or isinstance(value[0], int | float | list))


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
    batch, parts = args.per_device_train_batch_size, parts_of_batch(args.parallel)
    if batch % parts:
        fitting = ", ".join(str(number) for number in range(1, batch + 1) if batch % number == 0)
        raise ConfigurationError(
            f"parallel={args.parallel}: a batch of {batch} samples (per_device_train_batch_size) does not divide into "
            f"{parts} micro-batches; {fitting} fit"
        )
    return train_loader(
        dataset,
        batch_size=batch,
        seed=args.shuffle_seed,
        drop_last=args.dataloader_drop_last,
        persistent_workers=args.dataloader_persistent_workers,
        **_reading(args, layout, collator),
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
    return {
        "rank": layout.data_rank,
        "world_size": layout.data_size,
        "collate_fn": collator,
        "num_workers": args.dataloader_num_workers,
        "pin_memory": args.dataloader_pin_memory and accelerator.can_pin() and not args.use_cpu,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
