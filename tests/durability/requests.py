"""Requests by the thousand to a training that is in the middle of its steps. ``python -m durability.requests``.

A generator that knows the API's schema makes requests that are nearly right: paths, methods, headers, tokens, commands
and their data, each of them sound or not; others are requests whose bytes are broken. None is to be answered by a 5xx,
none without the token is to be acted on, and the weights in the end are bit by bit those of a run that nobody asked.
With the token only commands are sent that leave the weights alone: ``log``, ``save_checkpoint``, and what is refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control.job import Pause, controlled_trainer
from control.talking import OldClient, wait_until
from dalsegno.callbacks import TrainerControlCallback
from dalsegno.control import COMMANDS
from support.small import same, weights

ODD: list[Any] = [
    None, True, False, 0, -1, 1e308, -0.0, 2**63, 10**400, 0.5, "", "x", "\x00", "\ud800", "ä" * 50, "../../etc/passwd",
    [], {}, [[[]]], {"factor": 0}, {"factor": "x"}, {"": {}}, "9" * 5000, {"$bytes": "AAAA"}, ["abort"], "JsonLogger",
]  # fmt: skip
SAFE = ("log", "save_checkpoint", "status")
"""Commands that leave the weights alone, and so may be sent with the token."""
STEPS = 60
AT_ONCE = 6


@dataclass
class Outcome:
    """What the requests came to."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Requests that were answered by a 5xx, with the answer."""
    acted_without_token: list[str] = field(default_factory=list)
    same_weights: bool = False
    requests: int = 0

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.acted_without_token and self.same_weights


@dataclass(frozen=True)
class Request:
    data: bytes
    has_token: bool


class Generator:
    """Makes one request after another. The seed decides all of them."""

    def __init__(self, seed: int, job_id: str, token: str) -> None:
        self._random = random.Random(seed)
        self._job_id, self._token = job_id, token

    def request(self) -> Request:
        draw = self._random
        has_token = draw.random() < 0.4
        method, path, body = self._command(has_token) if draw.random() < 0.6 else self._question()
        lines = [f"{method} {path} HTTP/1.1"]
        lines.append(f"Host: {draw.choice(['localhost'] * 8 + ['127.0.0.1', 'evil.example', '[::1]:9', ''])}")
        lines += self._credentials(has_token)
        lines += draw.sample(
            ["Origin: http://evil.example", "X: " + "y" * 3000, "Expect: 100-continue", "Range: bytes=0-",
             "Connection: keep-alive, Upgrade", "Upgrade: websocket", "Last-Event-ID: 9.9.9/x"],
            draw.choice([0, 0, 0, 0, 1, 2]),
        )  # fmt: skip
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body) + draw.choice([0] * 20 + [-1, 1])}")
        data = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body
        return Request(self._broken(data) if draw.random() < 0.25 else data, has_token)

    def _question(self) -> tuple[str, str, bytes]:
        draw = self._random
        what = draw.choice(["status", "callbacks", "records", "commands/0", "control", "none", "stream", "%2e%2e"])
        own = f"/jobs/{self._job_id}/{what}"
        path = draw.choice(["/jobs", "/metrics", "/", f"/jobs/other/{what}", "//", "*", *[own] * 4])
        query = draw.choice(["", "", "?since=", "?since=9.9.abc", "?wait=nan", "?since=" + "9" * 50, "?%zz"])
        method = draw.choice(["GET", "GET", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "POST", "BREW"])
        if what == "stream" and "stream" in path and method == "GET":
            method = "HEAD"  # a stream does not end
        return method, path + query, b""

    def _command(self, has_token: bool) -> tuple[str, str, bytes]:
        """Without the token any command, with it one that leaves the weights alone, or is refused."""
        draw = self._random
        name: Any = draw.choice([*SAFE, *(COMMANDS if not has_token else ()), "explode", draw.choice(ODD)])
        data = {draw.choice(["save_steps", "learning_rate", "callback", "x"]): draw.choice(ODD)}
        body: Any = {"command": name, "data": draw.choice([{}, {}, data, draw.choice(ODD)])}
        if has_token and draw.random() < 0.3:  # a command whose data cannot be right
            body = {"command": draw.choice(["set", "switch"]), "data": {"x": draw.choice(ODD)}}
        if draw.random() < 0.1:
            body = draw.choice(ODD)
        path = f"/jobs/{self._job_id}/control{draw.choice(['', '', '?wait=0.01', '?wait=-1', '?wait=x'])}"
        return "POST", path, json.dumps(body).encode()

    def _credentials(self, has_token: bool) -> list[str]:
        token = self._token
        if has_token:
            return [f"Authorization: Bearer {token}"]
        wrong = [f"Bearer {token[:-1]}", f"Bearer {token}0", f"Basic {token}", token, "Bearer", f"Bearer {token[::-1]}"]
        return self._random.choice([[], [], *([f"Authorization: {each}"] for each in wrong), ["X-Token: " + token]])

    def _broken(self, data: bytes) -> bytes:
        """With bytes changed, removed or added, anywhere. The token, which could come to stand in another place, stays
        only where it was."""
        draw = self._random
        kind = draw.randrange(5)
        place = draw.randrange(len(data) + 1)
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + draw.randbytes(draw.randrange(1, 9)) + data[place:]
        if kind == 2:
            return data[:place] + data[place + draw.randrange(1, 9) :]
        if kind == 3:
            return draw.randbytes(draw.randrange(1, 200))
        return data.replace(b"\r\n", draw.choice([b"\n", b"\r", b"\r\n\r\n", b"\x00"]), draw.randrange(1, 4))


def send(port: int, data: bytes) -> bytes:
    """The answer's first line; empty if the server closes the connection without one, or waits for more."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        try:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            answer = raw.recv(1 << 16)
            if answer.startswith(b"HTTP/1.1 100 "):  # the server waits for the body, which it has
                answer = answer.partition(b"\r\n\r\n")[2] or raw.recv(1 << 16)
            return answer.split(b"\r\n")[0]
        except (ConnectionError, TimeoutError):
            return b""


def all_outcomes(requests: int, seed: int, folder: Path) -> Outcome:
    """Train once alone and once while the requests are sent."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    alone = controlled_trainer(folder / "alone", steps=STEPS, pause=0)
    alone.train()
    outcome, done = Outcome(requests=requests), threading.Event()
    clients = threading.Thread(target=_ask, args=(outcome, requests, seed, done))
    asked = controlled_trainer(
        folder / "asked", TrainerControlCallback("fuzzed"), Unhurried(done), steps=STEPS, pause=0.001
    )
    clients.start()
    asked.train()
    clients.join()
    outcome.same_weights = same(weights(alone), weights(asked)) and asked.state.global_step == STEPS
    journal = folder / "asked/control.jsonl"
    accepted = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    sent = [line for line in accepted if line["kind"] == "accepted"]
    outcome.acted_without_token += [str(line) for line in sent if line["command"] not in SAFE]
    return outcome


class Unhurried(Pause):
    """The steps last until all requests have been answered: the last one waits for them."""

    def __init__(self, done: threading.Event) -> None:
        super().__init__(0)
        self._done = done

    def on_step_begin(self, ctx: Any) -> None:
        if ctx.state.global_step == STEPS - 1:
            assert self._done.wait(3600)
        self._done.wait(0.1)  # steps and requests in the same time


def _ask(outcome: Outcome, requests: int, seed: int, done: threading.Event) -> None:
    try:
        job = wait_until(lambda: [each for each in OldClient().list_jobs() if each["port"]])[0]
        token = (OldClient().jobs / job["job_id"] / "auth_token").read_text()
        lock = threading.Lock()

        def client(number: int, count: int) -> None:
            made = Generator(seed * 1000 + number, job["job_id"], token)
            for _ in range(count):
                request = made.request()
                before = len(request.data)
                line = send(job["port"], request.data)
                status = line.split(b" ")[1].decode("latin-1") if line.count(b" ") else "none"
                with lock:
                    outcome.statuses[status] += 1
                    if status.startswith("5"):
                        outcome.failures.append(f"{line!r} to {before} bytes: {request.data[:300]!r}")
                    if status == "200" and not request.has_token and b"POST" in request.data[:5]:
                        outcome.acted_without_token.append(repr(request.data[:300]))

        shares = [requests // AT_ONCE + (number < requests % AT_ONCE) for number in range(AT_ONCE)]
        threads = [threading.Thread(target=client, args=(number, share)) for number, share in enumerate(shares)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        done.set()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    logging.getLogger("dalsegno").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        outcome = all_outcomes(options.requests, options.seed, Path(folder))
    print(f"{sum(outcome.statuses.values())} requests, answered by", dict(sorted(outcome.statuses.items())))
    print(f"5xx: {len(outcome.failures)}; acted on without the token: {len(outcome.acted_without_token)}; ", end="")
    print("weights: " + ("equal" if outcome.same_weights else "DIFFERENT"))
    for each in [*outcome.failures, *outcome.acted_without_token][:20]:
        print(f"  {each}")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
