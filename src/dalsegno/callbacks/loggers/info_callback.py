"""InfoCallback, CountParams: print what is restored and trained, how training ended, and the model's parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dalsegno.callbacks.argument_checks import flag, whole
from dalsegno.callbacks.printing import STDOUT
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import device_of, strip_wrappers
from dalsegno.distributed.stage_places import is_cut
from dalsegno.events import Callback, FlaglessCallback, contexts


class InfoCallback(Callback):
    """Prints, on rank 0, what was restored from a checkpoint, what is trained, and why training ended.

    Args:
        verbose: also print every restored component, every argument and the model's modules.
    """

    ranks = "zero"

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = flag("InfoCallback", "verbose", verbose)
        self._error: BaseException | None = None

    def on_load(self, ctx: contexts.LoadContext) -> None:
        report = ctx.report
        parts = "1 component" if len(report.restored) == 1 else f"{len(report.restored)} components"
        _print("restored", f"{parts} from {_relative(ctx.path, ctx)}")
        if self._verbose:
            _print("", report.table())
            return
        for what, which in [("new", report.fresh), ("carried", report.carried)]:
            if which:
                _print(what, ", ".join(which))
        for change in report.changes:
            _print("changed", str(change))
        for note in report.notes:
            _print("note", note)
        if 0 < ctx.state.max_steps <= ctx.state.global_step:
            _print("finished", f"at step {ctx.state.global_step:,} already; raise max_steps to train further")

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._error = None
        _print("model", _model_line(ctx.model))
        _print("device", _device_line(ctx))
        _print("batch", _batch_line(ctx))
        _print("steps", _steps_line(ctx))
        _print("output", str(ctx.args.output_dir))
        if ctx.memory_checkpoints is not None:
            _print("memory", ctx.memory_checkpoints)
        if self._verbose:
            _print("arguments", "\n".join(f"{name} = {value!r}" for name, value in ctx.args.to_dict().items()))
            _print("modules", str(ctx.model))

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        self._error = ctx.exception

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        control, checkpoint, why = ctx.control, ctx.checkpoint, ""
        if self._error is not None:
            why = f" by {type(self._error).__name__}: {self._error}"
        elif control.stopped_by is not None:
            why = f" by {control.stopped_by}: {control.stop_reason or 'no reason given'}"
        newest = "no checkpoint" if checkpoint is None else f"newest checkpoint {_relative(checkpoint, ctx)}"
        in_memory = _weights_line(ctx) if self._error is None else ""
        _print(ctx.reason, f"at step {ctx.state.global_step:,}{why}; {newest}{in_memory}")
        self._error = None


def _print(what: str, text: str) -> None:
    STDOUT.say(f"{what:<10} " + text.replace("\n", "\n" + " " * 11))


def _relative(path: Path, ctx: contexts.Context) -> str:
    """Return a checkpoint's path, relative to the run's directory if it is inside."""
    directory = ctx.args.directory
    return str(path.relative_to(directory) if path.is_relative_to(directory) else path)


def _weights_line(ctx: contexts.TrainEndContext) -> str:
    """Describe the weights that training leaves in memory, if an evaluation has measured a best metric."""
    state, name = ctx.state, ctx.args.best_metric_name
    if state.best_metric is None:
        return ""
    best = f"{name} {state.best_metric:g} at step {state.best_global_step:,}"
    if ctx.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        return f"; in memory: the best weights ({best})"
    if state.best_global_step == state.global_step:
        return f"; in memory: the last weights, which are the best so far ({best})"
    return f"; in memory: the last weights, not the best ({best})"


def _model_line(model: nn.Module) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    count, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    model = getattr(model, "_orig_mod", model)  # unwrap torch.compile
    # fully_shard derives a new class from FSDPModule and the model's class
    kind = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)
    return f"{kind.__name__}, {count:,} parameters" + (f", {trained:,} of them trained" * (trained != count))


def _device_line(ctx: contexts.Context) -> str:
    parameters = list(ctx.model.parameters())
    device = str(device_of(ctx.model)) if parameters else "none"
    if collectives.world_size() == 1:
        return device
    spread = "sharded over them" if any(isinstance(each, DTensor) for each in parameters) else "whole on each"
    if is_cut(ctx.model):
        spread = "cut into stages" + ", each sharded" * spread.startswith("sharded")
    sizes = ctx.layout.dimensions.items()
    mesh = " x ".join(f"{name} {size}" for name, size in sizes) if len(sizes) > 1 else ""
    return f"{device}, {collectives.world_size()} ranks{mesh and f' ({mesh})'}, parameters {spread}"


def _batch_line(ctx: contexts.Context) -> str:
    schedule, data_size = ctx.args.accumulation.values, ctx.layout.data_size
    accumulated = schedule[0]
    changes = f" at first; micro-batches by step: {schedule}" * (len(schedule) > 1)
    is_own = not hasattr(ctx.train_dataloader, "next_epoch")  # else it was built from the arguments
    size = getattr(ctx.train_dataloader, "batch_size", None) if is_own else ctx.args.per_device_train_batch_size
    ranks = "ranks" if ctx.layout.sharing == 1 else f"groups of {ctx.layout.sharing} ranks"
    factors = f" x {accumulated} micro-batches" * (accumulated > 1) + f" x {data_size} {ranks}" * (data_size > 1)
    if size is None:
        return "as the loader gives it" + factors + changes
    product = f"{factors} = {size * accumulated * data_size} samples" if factors else " samples"
    return f"{size}{product} a step{changes}"


def _steps_line(ctx: contexts.TrainBeginContext) -> str:
    done, planned = ctx.state.global_step, ctx.state.max_steps
    origin = "" if ctx.resumed_from is None else f" (resumed from {_relative(ctx.resumed_from, ctx)})"
    end = f"{planned:,}" if planned > 0 else f"the end of {ctx.state.num_train_epochs:g} epoch(s)"
    return f"{done + 1:,} to {end}{origin}"


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
        STDOUT.say(table(count_parameters(ctx.model, self._depth)))


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
