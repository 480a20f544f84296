"""CountParams: prints the number of parameters of each module."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from dalsegno.callbacks.argument_checks import whole
from dalsegno.distributed.sharded_tensors import strip_wrappers
from dalsegno.events import FlaglessCallback, contexts


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of one module and its descendants. A tied parameter counts for the module that comes first."""

    module: str
    """Its name in the model; empty for the model itself."""
    kind: str
    """Name of its class."""
    parameters: int
    trained: int
    size: int
    """Bytes of the whole parameters, over all ranks that store shards of them."""


class CountParams(FlaglessCallback):
    """Prints a table of the model's modules and their parameters when training begins, on rank 0.

    Args:
        depth: depth of the table: 1 lists the model's direct children; None every module with parameters.
    """

    ranks = "zero"

    def __init__(self, depth: int | None = 2) -> None:
        self._depth = None if depth is None else whole("CountParams", "depth", depth)

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        print(table(count_parameters(ctx.model, self._depth)), flush=True)


def count_parameters(model: nn.Module, depth: int | None = None) -> list[ParameterCount]:
    """Count the model's parameters and those of its modules down to ``depth``, in the model's order."""
    parameters: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = strip_wrappers(name).split(".")[:-1]
        for end in range(len(parts) + 1):
            module = ".".join(parts[:end])
            parameters[module] += parameter.numel()
            trained[module] += parameter.numel() if parameter.requires_grad else 0
            size[module] += parameter.numel() * parameter.element_size()
    kinds = {strip_wrappers(f"{name}.").removesuffix("."): type(module) for name, module in model.named_modules()}
    return [
        ParameterCount(name, kind.__name__.removeprefix("FSDP"), parameters[name], trained[name], size[name])
        for name, kind in kinds.items()
        if parameters[name] and (depth is None or not name or name.count(".") < depth)
    ]


def table(counts: list[ParameterCount]) -> str:
    """Format the counts as text, with the model in the last line."""
    rows = [("module", "class", "parameters", "trained", "MB")]
    for each in [*counts[1:], *counts[:1]]:
        title = each.module or "the model"
        rows.append((title, each.kind, f"{each.parameters:,}", f"{each.trained:,}", f"{each.size / 1e6:,.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e:>{widths[4]}}"
        for a, b, c, d, e in rows
    )
