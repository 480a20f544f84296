"""TBLogger: writes logged values as curves in TensorBoard."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from dalsegno.callbacks.argument_checks import Spec, mapping, merge_specs
from dalsegno.callbacks.loggers.json_logger import warn_not_writing
from dalsegno.callbacks.loggers.summary_writer import ResumableSummaryWriter, check_rewound, checked_writer
from dalsegno.errors import ConfigurationError
from dalsegno.events import Binder, Event, FlaglessCallback, contexts
from dalsegno.logs.event_files import EventPosition
from dalsegno.state import Handler

Transform = Callable[[float, Mapping[str, Any]], float | None]
"""``transform(value, metrics)``: the point to draw for a value of a record; None: no point."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """Source of a curve's values: a name in the records, and a transformation."""

    source: str
    transform: Transform | None = None


def perplexity(loss: float, metrics: Mapping[str, Any]) -> float:
    """Return exp(loss); infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def default_tb_scalars() -> dict[str, Spec]:
    """Return the curves that :class:`TBLogger` writes by default, by tag, in the form of its argument ``scalars``."""
    return {
        "train-loss": {"source": "loss"},
        "learning-rate": {},
        "grad-norm": {},
        "eval-loss": {},
        "eval-perplexity": {"source": "eval_loss", "transform": perplexity},
    }


class TBLoggerState(TypedDict):
    described: bool
    writer: EventPosition | None


class TBLogger(FlaglessCallback):
    """Logs selected values of each record to TensorBoard, and once texts that describe the run.

    With several evaluation sets, a curve of ``eval_...`` is written for each set, as ``<tag>/<set>``.

    Args:
        summary_writer: a :class:`ResumableSummaryWriter` that is also among the trainer's callbacks, or any object with
            torch's ``add_scalar`` and ``add_text``; None: create one for ``logs/tensorboard``.
        scalars: curves by tag, merged over those of :func:`default_tb_scalars`: ``{"source": name in the records,
            "transform": function}``, or None to remove a default one. Without ``source``, the name is the tag with
            ``_`` for ``-``. ``transform(value, metrics)`` gets the value and the whole record, and returns the point to
            draw; None: no point. Short for a source alone: its name.
        experiment_info: a text in Markdown, or a mapping of titles to such texts or to JSON values; written once per
            run.
        name: the key of its state in checkpoints; None: the class's name.
    """

    ranks = "zero"
    state_compared = False
    state_schema = TBLoggerState

    def __init__(
        self,
        summary_writer: Any = None,
        scalars: Mapping[str, Mapping[str, Any] | str | None] | None = None,
        experiment_info: str | Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.name = name
        self._own = ResumableSummaryWriter(name=name or "TBLogger") if summary_writer is None else None
        self._writer = self._own or checked_writer("TBLogger", summary_writer, "add_scalar", "add_text")
        given = mapping("TBLogger", "scalars", {} if scalars is None else scalars)
        specs = merge_specs(default_tb_scalars(), given, "source")
        self._scalars = {tag: _scalar(tag, spec) for tag, spec in specs.items()}
        info: Any = {} if experiment_info is None else experiment_info
        self._texts = {"experiment": info} if isinstance(info, str) else mapping("TBLogger", "experiment_info", info)
        self._has_described = False
        self._is_training = False

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        own = [] if self._own is None else self._own.bound_handlers(binder)
        return [*own, *super().bound_handlers(binder)]

    @staticmethod
    def mapping_as_markdown(mapping: Any) -> str:
        """Return a mapping, or any other JSON value, as a block of JSON in Markdown; a string unchanged."""
        return mapping if isinstance(mapping, str) else f"```json\n{json.dumps(mapping, indent=2, default=str)}\n```"

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._is_training = True
        check_rewound("TBLogger", self._writer)

    def on_log(self, ctx: contexts.LogContext) -> None:
        if not self._is_training:
            warn_not_writing(self)
            return
        if not self._has_described:  # not earlier: a kill before the first record would lose the texts
            self._has_described = True
            for title, text in self._texts.items():
                self._writer.add_text(title, self.mapping_as_markdown(text), 0)
        sets = ctx.eval_dataloader if isinstance(ctx.eval_dataloader, Mapping) else {}
        for tag, scalar in _of_each_set(self._scalars, sets):
            value = ctx.logs.get(scalar.source)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                point = float(value) if scalar.transform is None else scalar.transform(float(value), ctx.logs)
                if point is not None:
                    self._writer.add_scalar(tag, point, ctx.state.global_step)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._is_training = False

    def state_dict(self) -> dict[str, Any]:
        return {"described": self._has_described, "writer": None if self._own is None else self._own.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._has_described = state["described"]
        if self._own is not None and state["writer"] is not None:  # else it wrote through a writer that was passed in
            self._own.load_state_dict(state["writer"])

    def make_durable(self) -> None:
        if self._own is not None:
            self._own.make_durable()


def _of_each_set(scalars: Mapping[str, Scalar], sets: Iterable[str]) -> Iterator[tuple[str, Scalar]]:
    """Yield the curves; with several evaluation sets, also ``<tag>/<set>`` for each curve of ``eval_...``."""
    for tag, scalar in scalars.items():
        yield tag, scalar
        if scalar.source.startswith("eval_"):
            for name in sets:
                yield f"{tag}/{name}", Scalar(f"eval_{name}_{scalar.source.removeprefix('eval_')}", scalar.transform)


def _scalar(tag: str, spec: Spec) -> Scalar:
    source, transform = spec.get("source"), spec.get("transform")
    if source is None or source == "":
        source = tag.replace("-", "_")
    if not spec.keys() <= {"source", "transform"}:
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]={spec!r}; needs a name in the records, a mapping that may have 'source' and "
            "'transform', or None"
        )
    if not isinstance(source, str):
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]: source={source!r}; needs a name in the records, or None to remove the curve"
        )
    if transform is not None and not _takes_value_and_metrics(transform):
        raise ConfigurationError(
            f"TBLogger: scalars[{tag!r}]: transform={transform!r}; needs a function (value, metrics), where metrics is "
            "the whole record"
        )
    return Scalar(source, transform)


def _takes_value_and_metrics(transform: Any) -> bool:
    try:
        inspect.signature(transform).bind(0.0, {})
    except TypeError:  # also where it cannot be called at all
        return False
    except ValueError:  # a builtin may have no signature
        return True
    return True
