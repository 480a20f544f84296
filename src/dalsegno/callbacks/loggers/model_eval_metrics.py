"""ModelEvalMetrics: metrics of torchmetrics, at each evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dalsegno.callbacks.argument_checks import mapping
from dalsegno.distributed.sharded_tensors import device_of
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts


class ModelEvalMetrics(FlaglessCallback):
    """Computes metrics of the model's outputs, such as accuracy, in each evaluation::

        ModelEvalMetrics(
            {"accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=10)},
            select=lambda outputs, batch: (outputs["logits"], batch["labels"]),
        )

    They are in the evaluation's record under ``<set>_<name>``: ``eval_accuracy``; a metric with several values has an
    entry for each, ``eval_<name>_<value>``. They cover all ranks, without padding, and data that several ranks read
    once.

    Args:
        metrics: metrics by name: of torchmetrics, or objects with ``update``, ``compute`` and ``reset`` whose
            ``compute`` returns the same value on all ranks.
        select: (outputs, batch) → arguments of the metrics' ``update``. Outputs contain ``"loss"`` and what else the
            model returned.
        name: the callback's key; None: the class's name. Two callbacks, each with a ``select``, need two names.
    """

    def __init__(
        self, metrics: Mapping[str, Any], select: Callable[[Any, Any], tuple[Any, ...]], *, name: str | None = None
    ) -> None:
        self.name = name
        for name, metric in mapping("ModelEvalMetrics", "metrics", metrics).items():
            missing = [needed for needed in ("update", "compute", "reset") if not hasattr(metric, needed)]
            if missing or isinstance(metric, type):
                raise ConfigurationError(
                    f"ModelEvalMetrics: metrics[{name!r}]={metric!r} is not a metric; needs {missing or 'an instance'}"
                )
        if not callable(select):
            raise ConfigurationError(f"ModelEvalMetrics: select={select!r}; needs a function of (outputs, batch)")
        self._metrics = dict(metrics)
        self._select = select
        self._prefix = "eval"
        self._measuring = False

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._prefix = "eval" if ctx.name == "eval" else f"eval_{ctx.name}"
        self._measuring = True
        device = device_of(ctx.model)
        for metric in self._metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(device)

    def on_prediction_step(self, ctx: contexts.PredictionStepContext) -> None:
        if not self._measuring:
            return
        selected = self._select(ctx.outputs, ctx.batch)
        for metric in self._metrics.values():
            if ctx.samples and ctx.layout.is_primary:
                metric.update(*selected)
            else:
                _update_without_rows(metric, selected)

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != "eval" or not self._measuring:
            return
        self._measuring = False
        for name, metric in self._metrics.items():
            _give_scalars_a_row(metric)
            ctx.logs |= _entries(f"{self._prefix}_{name}", metric.compute())
            metric.reset()


# torchmetrics gathers a list state tensor by tensor, after concatenating states that are reduced by concatenation. It
# treats an empty list as fp32 of one dimension, and gathers a single scalar differently from rows. So each rank needs
# tensors of the same dtype and dimensions in its lists; otherwise the ranks' collectives do not match.


def _update_without_rows(metric: Any, batch: tuple[Any, ...]) -> None:
    """Update a metric of torchmetrics with padding: append tensors without rows to its lists, keep other states."""
    inner = _inner_metrics(metric)
    before = [{name: _copied(getattr(each, name)) for name in each._reductions} for each in inner]
    if inner:
        metric.update(*batch)
    for each, states in zip(inner, before, strict=True):
        for name, state in states.items():
            if isinstance(state, list):
                added = getattr(each, name)[len(state) :]
                state += [_with_rows(tensor)[:0] for tensor in added if isinstance(tensor, Tensor)]
            setattr(each, name, state)


def _copied(state: list[Tensor] | Tensor) -> list[Tensor] | Tensor:
    return list(state) if isinstance(state, list) else state.clone()  # an update may change it in place


def _give_scalars_a_row(metric: Any) -> None:
    for each in _inner_metrics(metric):
        for name, reduction in each._reductions.items():
            state = getattr(each, name)
            if isinstance(state, list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
                setattr(each, name, [_with_rows(tensor) for tensor in state])


def _with_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _inner_metrics(metric: Any) -> list[Any]:
    """Return the metrics of torchmetrics inside: itself, those of a collection, those that it wraps."""
    return [each for each in metric.modules() if hasattr(each, "add_state")] if isinstance(metric, nn.Module) else []


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a metric's value as entries of a record: one for each value of a mapping."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(f"{name}_{key}", each)
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
