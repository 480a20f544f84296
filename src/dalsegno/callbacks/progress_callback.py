"""ProgressCallback: how far the training is, as a bar where somebody looks on, else as lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from tqdm.auto import tqdm

from dalsegno.args import TrainingArguments
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import (
    LogContext,
    RollbackContext,
    StepEndContext,
    TrainBeginContext,
    TrainEndContext,
)

Shown = Sequence[str] | Mapping[str, str]
"""Names of logged values, in order; or each with a format such as ``".3f"`` (``""``: as it comes)."""

STEP_COLUMNS = {
    "step": ".0f",
    "epoch": ".2f",
    "loss": "",
    "grad_norm": "",
    "learning_rate": ".2e",
    "tok_per_sec": ",.0f",
}
FINAL_METRICS = {
    "train_loss": "",
    "train_runtime": ",.1f",
    "train_samples_per_second": ",.1f",
    "train_steps_per_second": ",.1f",
}


class ProgressCallback(Callback):
    """Rank 0 shows each record of training: a line of aligned columns, or a bar on a terminal and in a notebook.

    Evaluations, and what ``trainer.log`` is given, are a line each with all their values. The bar begins at the step
    that the run is resumed from. ``TrainingArguments(disable_tqdm=True)`` means lines, whatever is asked for here.

    Args:
        use_tqdm: True: always a bar; False: never; None: on a terminal and in a notebook.
        output_stream: where all of it goes; None: lines to ``sys.stdout``, the bar to ``sys.stderr``.
        step_columns: which values of a record to show; ``step`` and ``epoch`` are known besides what is logged. None:
            step, epoch, loss, grad_norm, learning_rate and tok_per_sec, as far as there are such values.
        final_metrics: which values of the final record to show; None: mean loss, seconds, samples and steps a second.
        header_interval: lines of columns from one header to the next.

    Raises:
        ConfigurationError: for a value that cannot work; the message names the argument.
    """

    makes_wishes = False
    ranks = "zero"

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: TextIO | None = None,
        step_columns: Shown | None = None,
        final_metrics: Shown | None = None,
        header_interval: int = 20,
    ) -> None:
        if use_tqdm not in (True, False, None):
            raise ConfigurationError(f"ProgressCallback: use_tqdm={use_tqdm!r}; allowed are True, False and None")
        if output_stream is not None and not callable(getattr(output_stream, "write", None)):
            raise ConfigurationError(f"ProgressCallback: output_stream={output_stream!r}; needs a stream to write to")
        if type(header_interval) is not int or header_interval < 1:
            raise ConfigurationError(
                f"ProgressCallback: header_interval={header_interval!r}; needs a whole number over 0"
            )
        self._use_tqdm = use_tqdm
        self._stream = output_stream
        self._columns = _formats("step_columns", STEP_COLUMNS if step_columns is None else step_columns)
        self._final = _formats("final_metrics", FINAL_METRICS if final_metrics is None else final_metrics)
        self._lines = Lines(output_stream, self._columns, header_interval, shows_absent=step_columns is not None)
        self._display: Display = self._lines

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._lines.begin()
        if self._wants_bar(ctx.args):
            self._display = Bar(self._stream, self._columns, ctx.state.global_step, ctx.state.max_steps)

    def on_step_end(self, ctx: StepEndContext) -> None:
        self._display.advance(ctx.state.global_step)

    def on_rollback(self, ctx: RollbackContext) -> None:
        self._display.advance(ctx.to_step)

    def on_log(self, ctx: LogContext) -> None:
        state, logs = ctx.state, ctx.logs
        if ctx.kind == "train":
            self._display.record({"step": state.global_step, "epoch": state.epoch, **logs})
            return
        formats = self._final if ctx.kind == "final" else dict.fromkeys(logs, "")
        values = ", ".join(f"{key} {shown(logs[key], spec)}" for key, spec in formats.items() if key in logs)
        if values:
            kind = f"{ctx.kind} of {ctx.evaluated_weights}" if ctx.evaluated_weights else ctx.kind
            self._display.say(f"{state.global_step:>{WIDTH}}  {kind}: {values}")

    def on_train_end(self, ctx: TrainEndContext) -> None:
        self._display.close()
        self._display = self._lines

    def _wants_bar(self, args: TrainingArguments) -> bool:
        if args.disable_tqdm:
            return False
        if self._use_tqdm is not None:
            return self._use_tqdm
        return (self._stream or sys.stderr).isatty() or _in_notebook()


class Display(Protocol):
    """What shows the progress."""

    def advance(self, step: int) -> None:
        """So many steps are done. Called after each, so it must cost next to nothing."""

    def record(self, values: Mapping[str, Any]) -> None:
        """Show a record of training."""

    def say(self, line: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """Nothing follows."""


WIDTH = 9
"""Characters of a column, or more where its name has more."""


class Lines:
    """A line for each record, in columns under a header. A column without any value so far is left out, or is "-"."""

    def __init__(
        self, stream: TextIO | None, formats: Mapping[str, str], header_interval: int, *, shows_absent: bool
    ) -> None:
        self._stream = stream
        self._formats = formats
        self._header_interval = header_interval
        self._columns = dict(formats) if shows_absent else {}
        self._until_header = 0

    def begin(self) -> None:
        """Let a header come before the next line."""
        self._until_header = 0

    def advance(self, step: int) -> None:
        pass

    def record(self, values: Mapping[str, Any]) -> None:
        columns = {key: spec for key, spec in self._formats.items() if key in self._columns or key in values}
        if self._until_header == 0 or len(columns) != len(self._columns):
            self._columns, self._until_header = columns, self._header_interval
            self.say(_aligned(columns, list(columns)))
        self._until_header -= 1
        self.say(_aligned(columns, [shown(values.get(key), spec) for key, spec in columns.items()]))

    def say(self, line: str) -> None:
        print(line, file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        pass


class _Tqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # no thread to watch over it, which would outlive the training


class Bar:
    """A bar of tqdm's that stands at the steps done, with the newest record's values behind it.

    It is drawn when the first step is done, so that what is printed before does not tear it.
    """

    def __init__(self, stream: TextIO | None, formats: Mapping[str, str], done: int, planned: int) -> None:
        self._stream = stream
        self._formats = {key: spec for key, spec in formats.items() if key != "step"}
        self._bar = _Tqdm(
            total=planned if planned > 0 else None,
            initial=done,
            unit="step",
            file=stream,
            dynamic_ncols=True,
            miniters=1,
            mininterval=0.2,  # seconds
            delay=1e-9,  # none, but not drawn at once
        )

    def advance(self, step: int) -> None:
        self._bar.update(step - self._bar.n)

    def record(self, values: Mapping[str, Any]) -> None:
        texts = [f"{key} {shown(values[key], spec)}" for key, spec in self._formats.items() if key in values]
        self._bar.set_postfix_str(", ".join(texts), refresh=False)

    def say(self, line: str) -> None:
        self._bar.write(line, file=self._stream or sys.stdout)

    def close(self) -> None:
        self._bar.close()


def shown(value: Any, spec: str = "") -> str:
    """A logged value as text: a number in the given format, else as it reads best; "-" for None."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    if spec:
        return format(value, spec)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 1000 <= abs(value) < 1e9 else f"{value:#.4g}"


def _aligned(columns: Mapping[str, str], texts: Sequence[str]) -> str:
    return "  ".join(text.rjust(max(WIDTH, len(key))) for key, text in zip(columns, texts, strict=True))


def _formats(argument: str, asked: Shown) -> dict[str, str]:
    """Key to format.

    Raises:
        ConfigurationError: if it is neither names nor names with formats that a number can be shown in.
    """
    if isinstance(asked, str) or not isinstance(asked, (Sequence, Mapping)):
        raise ConfigurationError(
            f"ProgressCallback: {argument}={asked!r}; needs a list of names, or names with formats"
        )
    known = {**STEP_COLUMNS, **FINAL_METRICS}
    formats = dict(asked) if isinstance(asked, Mapping) else {key: known.get(key, "") for key in asked}
    for key, spec in formats.items():
        try:
            format(1.0, spec)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"ProgressCallback: {argument}[{key!r}]={spec!r}; needs a format for a number, such as '.3f'"
            ) from error
    return formats


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
