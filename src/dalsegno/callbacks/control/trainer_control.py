"""TrainerControlCallback: shows the running job to clients over HTTP, and takes their commands."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dalsegno.callbacks.argument_checks import flag, text, whole
from dalsegno.callbacks.loggers.json_logger import JsonLogger
from dalsegno.checkpoint import checkpoint_dir, names
from dalsegno.control.feed import LiveJob, RunHistory
from dalsegno.control.inbox import Inbox
from dalsegno.control.jobs import Registration, check_job_id, new_job_id
from dalsegno.control.server import control_server
from dalsegno.errors import ConfigurationError
from dalsegno.events import Callback, FlaglessCallback, contexts
from dalsegno.web.security import check_access, is_loopback, new_token, tls_context
from dalsegno.web.server import ServerThread, check_installed, is_installed, listen

logger = logging.getLogger("dalsegno")


class TrainerControlCallback(FlaglessCallback):
    """Lets other programs ask this job for its status and send it commands, over HTTP on rank 0 and as files.

    The job appears in ``dalsegno jobs list`` while it trains. Commands take effect on all ranks at the end of a step:
    see docs/guides/control.md. What fails here (a port that is taken, a library that is
    missing) is logged once, and training continues.

    Args:
        job_id: name of the job, unique among this user's running jobs; None: made from time, host and process.
        port: None: the first free one from 8900 to 8999.
        enable_http: None: True if the extra ``control`` is installed. False: nothing listens; the job takes commands
            from files in ``output_dir/control`` only.
        host: address to listen on; None: ``127.0.0.1``, which only this machine reaches.
        auth_token: bearer token that clients send, of at least 16 characters; None: 32 random bytes, which clients of
            the same user read from a private file.
        disable_auth: answer without a token; refused on an address that other machines reach. Other users of the
            machine can then control the job, so a warning is logged.
        certfile: TLS certificate in PEM; None: plain HTTP.
        keyfile: its key.
    """

    ranks = "zero"
    background_safe = False

    def __init__(
        self,
        job_id: str | None = None,
        port: int | None = None,
        enable_http: bool | None = None,
        host: str | None = None,
        auth_token: str | None = None,
        disable_auth: bool = False,
        *,
        certfile: str | os.PathLike[str] | None = None,
        keyfile: str | os.PathLike[str] | None = None,
    ) -> None:
        name = type(self).__name__
        self._job_id = None if job_id is None else check_job_id(job_id)
        self._port = None if port is None else whole(name, "port", port, 0)
        if self._port is not None and self._port > 65535:
            raise ConfigurationError(f"{name}: port={port!r}; needs an integer up to 65535")
        self._enable_http = None if enable_http is None else flag(name, "enable_http", enable_http)
        self._host = "127.0.0.1" if host is None else text(name, "host", host)
        check_access(self._host, auth_token, flag(name, "disable_auth", disable_auth))
        self._token = auth_token
        self._disable_auth = disable_auth
        self._tls = tls_context(certfile, keyfile)
        self._certificate = None if certfile is None else Path(certfile).read_text("ascii")
        self._inbox: Inbox | None = None
        self._registration: Registration | None = None
        self._server: ServerThread | None = None
        self._job: LiveJob | None = None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        try:
            self._begin(ctx)
        except Exception as error:
            logger.warning("%s: %s; training continues without a server", self.key, error)

    def _begin(self, ctx: contexts.TrainBeginContext) -> None:
        directory = ctx.args.directory
        self._inbox = Inbox(directory, ctx.trainer.commands)
        self._inbox.start()
        self._registration = Registration(self._job_id or new_job_id(), directory, directory / "logs")
        try:
            if self._enable_http or (self._enable_http is None and is_installed()):
                self._serve(ctx, self._registration)
        finally:
            if self._server is None:
                self._registration.publish(self._host, None, None)

    def _serve(self, ctx: contexts.TrainBeginContext, registration: Registration) -> None:
        trainer = ctx.trainer
        job = LiveJob(
            registration.job_id,
            trainer.commands,
            trainer.state,
            callbacks=lambda: _described(trainer),
            history=_history(ctx.args.directory),
            log_path=log_path_of(trainer.callbacks),
        )
        job.note_event("train_begin", resumed_from=ctx.resumed_from.name if ctx.resumed_from else None)
        token = self._token = None if self._disable_auth else self._token or new_token()
        check_installed()
        listener = listen(self._host, self._port)
        server = control_server(listener, job, host=self._host, token=token, tls=self._tls, on_failure=self._give_up)
        try:
            endpoint = registration.publish(self._host, listener.getsockname()[1], token, self._certificate)
            server.start()
        except BaseException:
            listener.close()
            raise
        self._server, self._job = server, job
        logger.info("job control: %s/jobs/%s", endpoint.base_url, job.job_id)
        if token is None:
            logger.warning("%s: disable_auth=True: every user of this machine can stop this job", self.key)
        if not is_loopback(self._host) and self._tls is None:
            text = "%s: host=%r without certfile= and keyfile=: the token crosses the network in the clear"
            logger.warning(text, self.key, self._host)

    def _give_up(self, error: BaseException) -> None:  # on the server's thread
        logger.warning("%s: the server ended (%s: %s); training continues", self.key, type(error).__name__, error)
        if self._registration is not None:
            self._registration.publish(self._host, None, None)

    def on_log(self, ctx: contexts.LogContext) -> None:
        if self._job is not None:
            self._job.note_log(ctx.logs, ctx.kind)

    def on_evaluate_begin(self, ctx: contexts.EvaluateBeginContext) -> None:
        self._note("evaluate_begin", name=ctx.name)

    def on_evaluate(self, ctx: contexts.EvaluateContext) -> None:
        self._note("evaluate", name=ctx.name)

    def on_save(self, ctx: contexts.SaveContext) -> None:
        self._note("save", checkpoint=ctx.path.name, step=ctx.step, is_best=ctx.is_best)

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        self._note("rollback", from_step=ctx.from_step, to_step=ctx.to_step, reason=ctx.reason)

    def on_exception(self, ctx: contexts.ExceptionContext) -> None:
        self._note("exception", type=type(ctx.exception).__name__)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._note("train_end", reason=ctx.reason)
        inbox, server, registration = self._inbox, self._server, self._registration
        self._inbox = self._server = self._registration = self._job = None
        try:
            if inbox is not None:
                inbox.close()
            if server is not None:
                server.stop()
            if registration is not None:
                registration.remove()
        except Exception as error:
            logger.warning("%s: %s", self.key, error)

    def _note(self, event: str, **details: Any) -> None:
        if self._job is not None:
            self._job.note_event(event, **details)


def _history(directory: Path) -> Callable[[], dict[str, Any]]:
    """Return a function that reads the legs, commands and checkpoints of the run in ``directory``."""
    recorded, folder = RunHistory(directory), directory / names.CHECKPOINTS

    def read() -> dict[str, Any]:
        return {**recorded(), "checkpoints": sorted(checkpoint_dir.published(folder))}

    return read


def log_path_of(callbacks: list[Callback]) -> Callable[[], Path | None] | None:
    """Return a function for the path of the run's JSON log, also once it is closed; None if the run writes none."""
    log = next((each for each in callbacks if isinstance(each, JsonLogger)), None)
    if log is None:
        return None
    last: Path | None = None

    def path() -> Path | None:
        nonlocal last
        last = log.log_path or last  # read once: the training thread may close it meanwhile
        return last

    return path


def _described(trainer: contexts.TrainerLike) -> list[dict[str, Any]]:
    off = trainer.switched_off
    callbacks = list(trainer.callbacks)
    return [{"key": each.key, "class": type(each).__name__, "on": each.key not in off} for each in callbacks]
