"""Notify: sends a message at events of the run."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable

from dalsegno.callbacks.argument_checks import one_of, texts
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.system.imports import require_extra

logger = logging.getLogger("dalsegno")


OCCASIONS = ("begin", "evaluate", "save", "end", "exception")
_JOIN_TIMEOUT = 10.0  # seconds for which the end of training waits for messages being sent


class Notify(FlaglessCallback):
    """Sends messages about the run to Slack, by mail, to a webhook or a phone, for instance when it ends or fails.

    Through `apprise <https://github.com/caronc/apprise>`_::

        Notify("slack://xoxb-1234-1234-abcd/#runs", on=["end", "exception"])

    Rank 0 sends them on background threads. A message that cannot be sent is logged; training continues.

    Args:
        urls: one or several addresses in apprise's form.
        on: one or several of ``begin``, ``evaluate``, ``save``, ``end``, ``exception``.
    """

    ranks = "zero"

    def __init__(self, urls: str | Iterable[str], on: str | Iterable[str] = ("end", "exception")) -> None:
        self._on = {one_of("Notify", "on", occasion, OCCASIONS) for occasion in texts("Notify", "on", on)}
        require_extra("notify", "apprise", "Notify")
        import apprise

        self._apprise = apprise.Apprise()
        for number, url in enumerate(texts("Notify", "urls", urls)):
            if not self._apprise.add(url):
                scheme = url.partition("://")[0]  # the rest may contain a password
                raise ConfigurationError(
                    f"Notify: urls[{number}]: apprise does not understand the address {scheme}://…; see its list"
                )
        self._sending: list[threading.Thread] = []
        self._error: BaseException | None = None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._error = None
        if "begin" in self._on:
            goal = f" of {ctx.state.max_steps:,}" if ctx.state.max_steps > 0 else ""
            self._send(ctx, "begins", f"at step {ctx.state.global_step:,}{goal}")

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        if "evaluate" in self._on:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in ctx.metrics.items() if isinstance(value, float))
            self._send(ctx, f"evaluated ({ctx.name})", shown)

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if "save" in self._on:
            self._send(ctx, "saved", f"{ctx.path.name}{', the best so far' if ctx.is_best else ''}")

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        self._error = ctx.exception
        if "exception" in self._on:
            self._send(ctx, "failed", f"{type(ctx.exception).__name__}: {ctx.exception}")

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        if "end" in self._on and not (self._error is not None and "exception" in self._on):
            asked = ctx.control.stop_reason
            self._send(ctx, ctx.reason, f"asked for by {ctx.control.stopped_by}: {asked}" if asked else "")
        while self._sending:
            self._sending.pop().join(_JOIN_TIMEOUT)

    def _send(self, ctx: contexts.Context, what: str, text: str) -> None:
        title = f"{ctx.args.run_name or ctx.args.directory.name}: {what}"
        body = f"step {ctx.state.global_step:,} on {socket.gethostname()}" + (f"\n{text}" if text else "")
        # One for each, so that none waits for an answer to another; daemonic, so that none keeps the process alive.
        thread = threading.Thread(target=self._deliver, args=(title, body), name="dalsegno-notify", daemon=True)
        self._sending = [each for each in self._sending if each.is_alive()] + [thread]
        thread.start()

    def _deliver(self, title: str, body: str) -> None:
        try:
            if not self._apprise.notify(body=body, title=title):
                logger.warning("Notify: %r could not be sent to every address", title)
        except Exception as error:
            logger.warning("Notify: %r could not be sent: %s", title, error)
