"""List running jobs, ask them for their status, and send them commands.

JOB is a job's id as 'dalsegno jobs list' shows it, the beginning of one, or the job's output_dir. Commands reach a job
over HTTP if it has TrainerControlCallback, otherwise as files in its output_dir. docs/guides/control.md describes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from dalsegno import control
from dalsegno.cli.command import JSON, Command, argument, command, flag, option, several
from dalsegno.cli.console import (
    Column,
    moment,
    number,
    print_facts,
    print_json,
    print_rows,
    print_table,
    rich_table,
    text,
    visible,
)
from dalsegno.errors import ConfigurationError, DalsegnoError, NotFound
from dalsegno.logs.values import is_number

TOKEN_VARIABLE = "DALSEGNO_TOKEN"

REMOTE = several(
    option(
        "--remote",
        metavar="HOST:PORT",
        help=f"a job on another machine, by its server's address; its token is read from ${TOKEN_VARIABLE}, from "
        "--token-file, or from the terminal",
    ),
    option("--token-file", metavar="FILE", help="file with the token of --remote"),
    option("--certificate", metavar="FILE", help="certificate of --remote in PEM; implies TLS"),
)
JOB = several(argument("job", metavar="JOB", nargs="?", help="id, beginning of an id, or output_dir"), REMOTE)
"""``JOB`` as ``arguments.job``, and how to reach it elsewhere."""


def remote_client(arguments: argparse.Namespace) -> control.JobClient:
    from dalsegno.web.security import read_certificate

    host, colon, port = arguments.remote.rpartition(":")
    if not colon or not port.isdecimal() or not host or "/" in host:
        raise ConfigurationError(f"--remote {arguments.remote}: needs HOST:PORT, such as node-7:8900")
    certificate = read_certificate(arguments.certificate) if arguments.certificate else None
    scheme = "http" if certificate is None else "https"
    client = control.JobClient(f"{scheme}://{arguments.remote}", token=_token(arguments), certificate=certificate)
    name = getattr(arguments, "job", None)
    if name is not None and not client.job_id.startswith(name):
        raise ConfigurationError(f"--remote {arguments.remote}: its job is {client.job_id}, not {name}")
    return client


def required_job(arguments: argparse.Namespace) -> str:
    if arguments.job is None:
        raise ConfigurationError("name a JOB: an id from 'dalsegno jobs list', or an output_dir")
    job: str = arguments.job
    return job


def _token(arguments: argparse.Namespace) -> str | None:
    """The token; None if an empty line is entered, for a server without one."""
    if arguments.token_file is not None:
        token = arguments.token_file.read_text("ascii", "replace").strip()
    elif TOKEN_VARIABLE in os.environ:
        token = os.environ[TOKEN_VARIABLE].strip()
    elif sys.stdin.isatty():
        from getpass import getpass

        token = getpass("token: ").strip()
    else:
        token = ""
    return token or None


STYLES = {"running": "green", "dead": "yellow", "unreadable": "red"}


@command(REMOTE, JSON)
def _list(arguments: argparse.Namespace) -> int:
    """List this user's jobs on this machine, or those of --remote: the newest first.

    The state is 'running'; 'dead' if the process has ended without removing its file, which 'dalsegno jobs cleanup'
    does; 'elsewhere' for a job on another machine that shares the home directory.
    """
    if arguments.remote:
        with remote_client(arguments) as client:
            rows = client.jobs()
    else:
        from dataclasses import asdict

        ends = [(job, asdict(job.endpoint) if job.endpoint else {}) for job in control.list_jobs()]
        rows = [{**endpoint, "job_id": job.job_id, "state": job.state} for job, endpoint in ends]
    if arguments.json:
        print_json(rows)
        return 0
    if not rows:
        print("no jobs")
        return 0
    columns = [
        Column("job_id", "job"),
        Column("state", "state", style=lambda state: STYLES.get(state, "")),
        Column("hostname", "host"),
        Column("pid", "pid", text, right=True),
        Column("port", "port", text, right=True),
        Column("started_at", "started", lambda seconds: moment(seconds)[: len("2026-01-31 12:00")]),
        Column("output_dir", "output_dir"),
    ]
    print_table(columns, rows)
    return 0


@command(JOB, JSON)
def _status(arguments: argparse.Namespace) -> int:
    """Show a job's step, epoch, and the last values of what it logs.

    A job without a server is shown as its log has it.
    """
    job = None if arguments.remote else control.resolve(required_job(arguments))
    if job is None or control.asks_over_http(job):
        with remote_client(arguments) if job is None else control.JobClient.of(job) as client:
            status = client.status()
    else:
        status = _logged_status(job)
    if arguments.json:
        print_json(status)
        return 0
    facts = [
        ("step", step_of(status)),
        ("epoch", shown(status.get("epoch"))),
        ("last log", moment(status.get("logged_at"))),
        *((name, shown(value)) for name, value in status.items() if name not in control.PLACE),
    ]
    print_facts(visible(str(status.get("job_id"))), [(visible(name), visible(fact)) for name, fact in facts])
    return 0


def _logged_status(job: control.Job) -> dict[str, Any]:
    """The status of a job as far as its files contain it: of the newest checkpoint, if it has no log."""
    from dalsegno.analysis import open_log
    from dalsegno.logs.run_file import RunFile

    folder = control.running(job).output_dir
    leg = RunFile(folder).last_leg()
    values: dict[str, Any] = {} if leg is None else {"global_step": leg.last_step}
    with contextlib.suppress(NotFound):
        for record in open_log(folder).records():
            values |= record if record["kind"] != "header" else {}
    values.pop("kind", None)
    return {**values, "job_id": job.job_id, "status": job.state, "logged_at": values.pop("timestamp", None)}


def step_of(status: dict[str, Any]) -> str:
    """``120 of 1,000``; without the end, if it is not known."""
    step, goal = status.get("global_step"), status.get("max_steps")
    return f"{shown(step)} of {shown(goal)}" if isinstance(goal, int) and goal > 0 else shown(step)


def shown(value: Any) -> str:
    return number(value) if is_number(value) else text(value)


AT_ONCE = 8
"""Jobs that are asked at the same time: one that does not answer must not hold up the others."""


@command(
    option("--interval", metavar="SECONDS", default=1.0, help="time between two updates"),
    option("--updates", metavar="N", help="end after N updates"),
    JSON,
)
def _watch(arguments: argparse.Namespace) -> int:
    """Watch all jobs of this user on this machine, in a table that is redrawn every second, until Ctrl-C.

    Into a file or a pipe, a table is printed each time; with --json, one line.
    """
    if not arguments.interval > 0:
        raise ConfigurationError(f"--interval {arguments.interval}: must be a positive number of seconds")
    updates = _updates(arguments.interval, arguments.updates)
    columns = [
        Column("job_id", "job"),
        Column("state", "state", style=lambda state: "green" if state == "running" else "yellow"),
        Column("step", "step", right=True),
        Column("epoch", "epoch", number, right=True),
        Column("loss", "loss", shown, right=True),
        Column("eval_loss", "eval", shown, right=True),
        Column("learning_rate", "lr", shown, right=True),
        Column("steps_per_second", "steps/s", number, right=True),
        Column("output_dir", "output_dir"),
    ]
    if arguments.json:
        for rows in updates:
            print_json(rows, indent=None)
            sys.stdout.flush()
    elif not sys.stdout.isatty():
        for rows in updates:
            print_table(columns, rows)
            sys.stdout.flush()
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            for rows in updates:
                live.update(rich_table(columns, rows) if rows else "no jobs", refresh=True)
    return 0


def _updates(interval: float, count: int | None) -> Iterator[list[dict[str, Any]]]:
    from concurrent.futures import ThreadPoolExecutor

    watched: dict[str, _Watched] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        number = 0
        while count is None or number < count:
            if number:
                time.sleep(interval)
            jobs = control.list_jobs()
            watched = {job.job_id: watched.get(job.job_id) or _Watched() for job in jobs}
            yield list(pool.map(lambda job: watched[job.job_id].row(job), jobs))  # noqa: B023  (used at once)
            number += 1


class _Watched:
    """A job, from one update to the next."""

    def __init__(self) -> None:
        self._client: control.JobClient | None = None
        self._last: tuple[float, int] | None = None  # time and step

    def row(self, job: control.Job) -> dict[str, Any]:
        row: dict[str, Any] = {"job_id": job.job_id, "state": job.state}
        if job.endpoint is None:
            return row
        row["output_dir"] = job.endpoint.output_dir
        if job.state != "running" or job.endpoint.port is None:
            return row if job.endpoint.port or job.state != "running" else {**row, "state": "running, no server"}
        try:
            status = self._status(job)
        except (DalsegnoError, OSError):
            self._client = None
            return {**row, "state": "no answer"}
        return {**status, **row, "step": step_of(status), "steps_per_second": self._speed(status)}

    def _status(self, job: control.Job) -> dict[str, Any]:
        if self._client is None:
            self._client = control.JobClient.of(job)
        return self._client.status()

    def _speed(self, status: dict[str, Any]) -> float | None:
        now, before = (float(status["timestamp"]), int(status["global_step"])), self._last
        self._last = now
        return (now[1] - before[1]) / (now[0] - before[0]) if before and now[0] > before[0] else None


@command(
    JOB,
    argument("--port", type=int, default=0, help="port of the page, on 127.0.0.1; default: a free one"),
    flag("--print", help="print the private file's address; open no browser"),
)
def _open(arguments: argparse.Namespace) -> int:
    """Open the live page in the browser: of all jobs of this user on this machine, or of one, until Ctrl-C.

    The page finds a restarted job again by itself. A private file hands the page's token to the browser: the token is
    neither in an address that is sent, nor on a command line. With --remote, the page is that of the job's own server.

    Over ssh, or without a browser here, it prints the page's address, and how to forward its port from your machine.
    """
    if arguments.remote:
        with remote_client(arguments) as client:
            client.status()  # the job answers, and the token is right
            secret = {} if client.token is None else {"token": client.token}
            _show("open.html", client.base_url, {"by": control.sender()}, secret, only_print=arguments.print)
        return 0
    from dalsegno.web.server import check_installed, listen

    check_installed()
    from dalsegno.control.hub import HOST, hub_server
    from dalsegno.web.security import new_token

    named = {} if arguments.job is None else {"run": control.running(control.resolve(arguments.job)).output_dir}
    listener, token = listen(HOST, arguments.port), new_token()
    address = f"http://{HOST}:{listener.getsockname()[1]}"
    failures: list[BaseException] = []
    server = hub_server(listener, token, failures.append)
    place = None
    try:
        server.start()
        fragment = {"token": token, "by": control.sender(), **named}  # the token ends with this command
        place = _show(f"open-{os.getpid()}.html", address, fragment, {}, only_print=arguments.print)
        print("Ctrl-C closes the page's server; the jobs keep running", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    finally:
        server.stop()
        if place is not None:
            place.unlink(missing_ok=True)
    if failures:
        raise failures[0]
    return 0


def _show(name: str, address: str, fragment: Mapping[str, str], secret: Mapping[str, str], *, only_print: bool) -> Path:
    """Open the page at ``address`` by a private file of that name, which is returned, or print where it is. The browser
    gets ``fragment`` and ``secret``, and sends neither; ``secret`` is in the file alone."""
    import webbrowser

    target = json.dumps(f"{address}/#{urlencode({**secret, **fragment})}").replace("<", "\\u003c")
    place = control.write_private(
        name,
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f"<title>dalsegno</title><script>location.replace({target})</script>\n",
    )
    is_remote = "SSH_CONNECTION" in os.environ
    if only_print:
        print(place.as_uri(), flush=True)
    elif is_remote or not webbrowser.open(place.as_uri()):
        server = urlsplit(address)
        here = f"{server.scheme}://127.0.0.1:{server.port}" if is_remote else address
        print(f"{here}/#{urlencode(fragment)}", flush=True)
        if is_remote:
            tunnel = f"ssh -L {server.port}:{server.netloc} {control.sender()}"
            print(f"forward its port from your machine: {tunnel}", flush=True)
    return place


SENDING = several(
    JOB,
    option(
        "--wait",
        metavar="SECONDS",
        default=60.0,
        help="wait this long for the effect, which comes at the end of a step; 0: only until the command is accepted",
    ),
    JSON,
)
"""The arguments of a command that is sent."""

_NO_EFFECT = {1: "the command had no effect"}


def send(arguments: argparse.Namespace, command: str, data: Mapping[str, Any] | None = None) -> int:
    if not 0 <= arguments.wait <= 600:
        raise ConfigurationError(f"--wait {arguments.wait:g}: must be from 0 to 600 seconds")
    if arguments.remote:
        with remote_client(arguments) as client:
            answer = client.send(command, data, wait=arguments.wait)
    else:
        answer = control.send_command(required_job(arguments), command, data, wait=arguments.wait)
    if arguments.json:
        print_json(answer)
    elif answer.get("error"):
        print(visible(f"{command}: had no effect: {answer['error']}"))
    elif answer.get("step") is not None:
        print(visible(f"{command}: took effect at the end of step {answer['step']}"))
    else:
        print(f"{command}: accepted; it takes effect at the end of one of the next steps")
    return 1 if answer.get("error") else 0


@command(SENDING, flag("--force", help="do not ask"), statuses=_NO_EFFECT)
def _abort(arguments: argparse.Namespace) -> int:
    """End a job without a checkpoint: what was trained since the last one is lost.

    Asks first, unless --force is given.
    """
    job = arguments.remote or required_job(arguments)
    if not arguments.force:
        if not sys.stdin.isatty():
            raise ConfigurationError("abort asks before it ends a job, and there is no terminal: add --force")
        if input(f"end {job} without a checkpoint? [y/N] ").strip().lower() not in ("y", "yes"):
            print("not aborted")
            return 1
    return send(arguments, "abort")


@command(
    SENDING, argument("settings", metavar="NAME=VALUE", nargs="*", help="say learning_rate=3e-4"), statuses=_NO_EFFECT
)
def _set(arguments: argparse.Namespace) -> int:
    """Change settings of a job from the end of a step on.

    Settings: learning_rate (a value, or a factor written x0.5), logging_steps, eval_steps, save_steps, max_steps.

      dalsegno jobs set runs/a learning_rate=x0.5 save_steps=200
    """
    words = list(arguments.settings)
    if arguments.remote and arguments.job is not None and "=" in arguments.job:
        words, arguments.job = [arguments.job, *words], None
    data: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"{word!r}: write NAME=VALUE, say learning_rate=3e-4")
        if name in data:
            raise ConfigurationError(f"{name} is given twice")
        data[name] = _setting(name, value)
    return send(arguments, "set", data)


def _setting(name: str, text: str) -> Any:
    is_factor = text[:1] in ("x", "×", "*")
    try:
        value = json.loads(text[1:] if is_factor else text)
    except ValueError:
        raise ConfigurationError(f"{name}={text}: needs a number, or a factor such as x0.5") from None
    return {"factor": value} if is_factor else value


@command(JOB, JSON)
def _callbacks(arguments: argparse.Namespace) -> int:
    """List the callbacks of a job."""
    job = None if arguments.remote else control.resolve(required_job(arguments))
    with remote_client(arguments) if job is None else control.JobClient.of(job) as client:
        rows = client.callbacks()["callbacks"]
    columns = [
        Column("key", "callback"),
        Column("class", "class"),
        Column("on", "", lambda is_on: "" if is_on else "switched off"),
    ]
    print_rows(columns, rows, as_json=arguments.json)
    return 0


@command(
    SENDING, argument("words", metavar="KEY on|off", nargs="*", help="the callback, and on or off"), statuses=_NO_EFFECT
)
def _switch(arguments: argparse.Namespace) -> int:
    """Switch a callback that only observes off, or on again.

    KEY is the callback's key, as 'dalsegno jobs callbacks' shows it.
    """
    words = list(arguments.words)
    if arguments.remote and len(words) == 1:  # JOB may be left out
        words, arguments.job = [arguments.job, *words], None
    if len(words) != 2 or words[1] not in ("on", "off"):
        raise ConfigurationError("switch: needs JOB KEY on, or JOB KEY off")
    return send(arguments, "switch", {"callback": words[0], "on": words[1] == "on"})


@command(flag("--unreadable", help="also those whose file cannot be read"), JSON)
def _cleanup(arguments: argparse.Namespace) -> int:
    """Remove the files of jobs that were killed.

    Jobs that run, and jobs on other machines, are kept. Only the jobs' own files in the user's state folder are
    removed.
    """
    removed = [job.job_id for job in control.remove_dead(unreadable=arguments.unreadable)]
    if arguments.json:
        print_json(removed)
    else:
        print("\n".join(f"removed {job_id}" for job_id in removed) or "nothing to remove")
    return 0


@command(
    SENDING,
    flag("--evaluate", help="evaluate on every evaluation set before, so that the checkpoint has its metrics"),
    statuses=_NO_EFFECT,
)
def _save(arguments: argparse.Namespace) -> int:
    """Save a checkpoint at the end of a step."""
    return send(arguments, "save_checkpoint", {"evaluate": True} if arguments.evaluate else None)


def _sends(name: str, help: str) -> Command:
    """A command without data."""
    return command(SENDING, statuses=_NO_EFFECT, help=help)(lambda arguments: send(arguments, name))


COMMANDS = {
    "list": _list,
    "status": _status,
    "watch": _watch,
    "open": _open,
    "save": _save,
    "stop": _sends("graceful_stop", "Save a checkpoint and end; the next start of the job resumes."),
    "save-stop": _sends("save_and_stop", "Save a checkpoint and end, as 'dalsegno jobs stop' does."),
    "abort": _abort,
    "evaluate": _sends("evaluate", "Evaluate on every evaluation set at the end of a step."),
    "log": _sends("log", "Log a training record at the end of a step."),
    "set": _set,
    "callbacks": _callbacks,
    "switch": _switch,
    "cleanup": _cleanup,
}
"""In the order of the help."""
