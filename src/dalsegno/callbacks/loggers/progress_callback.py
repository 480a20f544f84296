"""ProgressCallback: shows the progress of training, as a bar in interactive use, else as lines of columns."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TextIO

from tqdm.auto import tqdm

from dalsegno.args import TrainingArguments
from dalsegno.callbacks.argument_checks import Spec, merge_specs, whole
from dalsegno.callbacks.printing import Output
from dalsegno.errors import ConfigurationError
from dalsegno.events import Event, FlaglessCallback, contexts
from dalsegno.state import ResumeProof


class ProgressCallback(FlaglessCallback):
    """Shows each training record on rank 0: a line of aligned columns, or a bar on a terminal and in a notebook.

    Evaluations and records of ``trainer.log`` are one line each, with all their values. A long evaluation says every 10
    seconds how far it is. From the first 10 seconds of a leg on, the lines of records end with the number of steps in
    all, the present speed, and the time left at the leg's mean speed. Before the first record after the steps that a
    resumed leg repeats, a line says that they were the same, or which reason they had not to be; if they had none, that
    was a warning.

    Args:
        use_tqdm: True: always a bar; False: never; None: on a terminal and in a notebook.
        output_stream: stream for all output, ``"stdout"`` or ``"stderr"``; None: lines to ``sys.stdout``, the bar to
            ``sys.stderr``.
        step_columns: columns by name, merged over the default ones (step, epoch, loss, grad_norm, learning_rate and
            tok_per_sec, as far as they are logged): a format such as ``".3f"``, ``"si"`` (12.3K), ``"gib"`` or a
            function; a mapping that may have ``fmt``, ``label`` and ``width``; or None to remove a default column. A
            list of names shows exactly these, in this order.
        final_metrics: values of the final record, in the same way; ``suffix`` in place of ``width``. By default mean
            loss, seconds, samples and steps per second.
        header_interval: number of lines between headers.
    """

    ranks = "zero"
    optional_events = (Event.EVALUATE_BEGIN,)

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: TextIO | Literal["stdout", "stderr"] | None = None,
        step_columns: Specs | None = None,
        final_metrics: Specs | None = None,
        header_interval: int = 20,
    ) -> None:
        if use_tqdm not in (True, False, None):
            raise ConfigurationError(f"ProgressCallback: use_tqdm={use_tqdm!r}; allowed are True, False and None")
        stream: Any = {"stdout": sys.stdout, "stderr": sys.stderr}.get(str(output_stream), output_stream)
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise ConfigurationError(
                f"ProgressCallback: output_stream={output_stream!r}; needs a stream to write to, 'stdout' or 'stderr'"
            )
        whole("ProgressCallback", "header_interval", header_interval)
        self._use_tqdm = use_tqdm
        self._output, self._bar_output = Output(stream), Output(stream, "stderr")
        self._columns = columns("ProgressCallback: step_columns", step_columns, STEP_COLUMNS)
        self._final = columns("ProgressCallback: final_metrics", final_metrics, FINAL_METRICS)
        is_listed = isinstance(step_columns, Sequence)
        self._lines = Lines(self._output, self._columns, header_interval, shows_absent=is_listed)
        self._display: Lines | Bar = self._lines
        self._began = self._first_step = self._spoke = 0.0
        self._proof: ResumeProof | None = None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._lines.until_header = 0
        self._proof = ctx.state.resume_proof  # of an earlier leg
        self._began, self._first_step = ctx.state.elapsed(), ctx.state.global_step
        if self._wants_bar(ctx.args):
            self._display = Bar(
                self._output, self._bar_output, self._columns, ctx.state.global_step, ctx.state.max_steps
            )

    def idle_events(self) -> Collection[Event]:
        return (Event.STEP_END,) if self._display is self._lines else ()

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        if isinstance(self._display, Bar):
            self._display.advance(ctx.state.global_step, ctx.state.max_steps)

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        if isinstance(self._display, Bar):
            self._display.advance(ctx.to_step, ctx.state.max_steps)

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._spoke, step, name = time.monotonic(), ctx.state.global_step, ctx.name
        of = "" if ctx.batches is None else f" of {ctx.batches:,}"

        def show(done: int) -> None:
            if time.monotonic() - self._spoke >= SILENCE_S:
                self._spoke = time.monotonic()
                self._display.say(f"{step:>{WIDTH}}  {name}: {done:,}{of} batches")

        ctx.between_batches.append(show)

    def on_log(self, ctx: contexts.LogContext) -> None:
        state, logs = ctx.state, ctx.logs
        self._say_proof(state.resume_proof)
        if ctx.kind == "train":
            self._display.record({"step": state.global_step, "epoch": state.epoch, **logs}, self._outlook(ctx))
            return
        wanted = self._final if ctx.kind == "final" else {key: Column(key) for key in logs}
        values = ", ".join(f"{column.label} {column.text(logs[key])}" for key, column in wanted.items() if key in logs)
        if values:
            kind = f"{ctx.kind} of {ctx.evaluated_weights}" if ctx.evaluated_weights else ctx.kind
            self._display.say(f"{state.global_step:>{WIDTH}}  {kind}: {values}")

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._say_proof(ctx.state.resume_proof)
        if isinstance(self._display, Bar):
            self._display.close()
        self._display = self._lines

    def _say_proof(self, proof: ResumeProof | None) -> None:
        if proof is not None and proof != self._proof and proof.verdict in ("exact", "changed"):
            self._display.say(proof.line)
        self._proof = proof

    def _outlook(self, ctx: contexts.LogContext) -> str:
        """What follows a record in a line: steps in all, speed and time left."""
        elapsed, done = ctx.state.elapsed() - self._began, ctx.state.global_step - self._first_step
        left = ctx.state.max_steps - ctx.state.global_step
        if elapsed < SILENCE_S or done <= 0 or left <= 0:
            return ""
        speed = "" if "tok_per_sec" in ctx.logs else f"{shown(done / elapsed)} steps/s, "
        return f"  of {ctx.state.max_steps:,}, {speed}{timedelta(seconds=round(left * elapsed / done))} left"

    def _wants_bar(self, args: TrainingArguments) -> bool:
        if args.disable_tqdm:
            return False
        if self._use_tqdm is not None:
            return self._use_tqdm
        return self._bar_output.isatty() or _in_notebook()


SILENCE_S = 10.0
"""Seconds after which an evaluation says how far it is, and lines of records say how long the run takes."""


class Lines:
    """Prints a line for each record, in columns under a header.

    A column that has had no value yet is left out; with ``shows_absent``, it shows "-".
    """

    def __init__(
        self, output: Output, wanted: Mapping[str, Column], header_interval: int, *, shows_absent: bool
    ) -> None:
        self.say = output.say
        self._wanted = wanted
        self._header_interval = header_interval
        self._columns = dict(wanted) if shows_absent else {}
        self.until_header = 0
        """Lines before the next header."""

    def record(self, values: Mapping[str, Any], outlook: str) -> None:
        present = {key: column for key, column in self._wanted.items() if key in self._columns or key in values}
        if self.until_header == 0 or len(present) != len(self._columns):
            self._columns, self.until_header = present, self._header_interval
            self.say(_aligned([(column, column.label) for column in present.values()]))
        self.until_header -= 1
        self.say(_aligned([(column, column.text(values.get(key))) for key, column in present.items()]) + outlook)


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A tqdm bar of the steps done, followed by the last record's values.

    First drawn after the first step, so that earlier prints do not break it.
    """

    monitor_interval = 0  # no monitor thread, which would outlive training

    def __init__(
        self, output: Output, bar_output: Output, wanted: Mapping[str, Column], done: int, planned: int
    ) -> None:
        self.say = output.say
        self._wanted = {key: column for key, column in wanted.items() if key != "step"}
        super().__init__(
            total=planned if planned > 0 else None,
            initial=done,
            unit="step",
            file=bar_output,
            dynamic_ncols=True,
            miniters=1,
            mininterval=0.2,  # seconds
            delay=1e-9,  # practically none, but postpones the first drawing
        )

    def advance(self, step: int, planned: int) -> None:
        """Show that ``step`` of ``planned`` steps (-1: unknown) are done. Called after each step: must be cheap."""
        self.total = planned if planned > 0 else None  # a command may change it
        self.update(step - self.n)

    def record(self, values: Mapping[str, Any], outlook: str) -> None:
        """A bar has an outlook of its own."""
        texts = [f"{column.label} {column.text(values[key])}" for key, column in self._wanted.items() if key in values]
        self.set_postfix_str(", ".join(texts), refresh=False)


def _aligned(cells: Iterable[tuple[Column, str]]) -> str:
    return "  ".join([text.rjust(column.full_width) for column, text in cells])


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


Format = str | Callable[[Any], str]
"""A format of a number such as ``".3f"``, a name in :data:`FORMATS`, a function, or ``""``: chosen by magnitude."""
Specs = Sequence[str] | Mapping[str, Format | Spec | None]
"""Names alone, in order; or specifications by name, merged over the default ones."""

WIDTH = 9
"""Minimum width of a column in characters; a longer label widens it."""


def _si(value: float) -> str:
    """``12.3K``, ``4.57M``: three digits, powers of 1000."""
    for power, symbol in enumerate(("", "K", "M", "B", "T")):
        if abs(value) < 999.5 * 1000**power or symbol == "T":
            return f"{value / 1000**power:.3g}{symbol}"
    raise AssertionError("the last symbol takes any value")


_OF_WHOLE_NUMBERS = "bcdoxX"
"""Last letters of formats that refuse a float."""

FORMATS: Mapping[str, Callable[[float], str]] = {"si": _si, "gib": lambda value: f"{value / 2**30:.3f} GiB"}


@dataclass(frozen=True, slots=True)
class Column:
    """How a value is shown."""

    label: str
    fmt: Format = ""
    width: int = WIDTH
    suffix: str = ""

    @property
    def full_width(self) -> int:
        """In characters, wide enough for the label."""
        return max(self.width, len(self.label))

    def text(self, value: Any) -> str:
        return f"{shown(value, self.fmt)}{self.suffix if value is not None else ''}"


STEP_COLUMNS: Mapping[str, Spec] = {
    "step": {"fmt": ".0f"},
    "epoch": {"fmt": ".2f"},
    "loss": {},
    "grad_norm": {},
    "learning_rate": {"fmt": ".2e"},
    "tok_per_sec": {"fmt": ",.0f"},
}
"""Of a training record: shown by default, as far as they are logged."""
FINAL_METRICS: Mapping[str, Spec] = {
    "train_loss": {},
    "train_runtime": {"fmt": ",.1f"},
    "train_samples_per_second": {"fmt": ",.1f"},
    "train_steps_per_second": {"fmt": ",.1f"},
}


def columns(argument: str, given: Specs | None, defaults: Mapping[str, Spec]) -> dict[str, Column]:
    """Return the columns that ``given`` asks for, by name: exactly the listed names, or the merged specifications."""
    if given is None or isinstance(given, Mapping):
        specs = merge_specs(defaults, given or {}, "fmt")
    elif isinstance(given, Sequence) and not isinstance(given, str):
        known = {**STEP_COLUMNS, **FINAL_METRICS}
        specs = {name: known.get(name, {}) for name in given}
    else:
        raise ConfigurationError(f"{argument}={given!r}; needs a list of names, or a mapping of names to formats")
    return {name: _column(argument, name, spec) for name, spec in specs.items()}


def _column(argument: str, name: str, spec: Spec) -> Column:
    try:
        column = Column(**{"label": name, **spec})
        if not callable(column.fmt):
            shown(1.0, column.fmt)
        sum([column.width, len(column.label), len(column.suffix)])
    except Exception as error:
        raise ConfigurationError(
            f"{argument}[{name!r}]={spec!r}; needs a format for a number, such as '.3f', or a mapping that may have "
            f"'fmt', 'label', 'width' and 'suffix', or None to remove it: {error}"
        ) from error
    return column


def shown(value: Any, fmt: Format = "") -> str:
    """Format a logged value: a number by ``fmt``, or by its magnitude if that is empty; "-" for None."""
    if value is None:
        return "-"
    if callable(fmt):
        return fmt(value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if fmt in FORMATS:
        return FORMATS[fmt](value)
    if fmt and fmt[-1] in _OF_WHOLE_NUMBERS:
        return format(int(value), fmt) if math.isfinite(value) else str(value)
    if fmt:
        return format(value, fmt)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:#.4g}"
