"""WorkerOptions: a worker's arguments, from the program or the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dalsegno.diloco.wire.messages import Positive, WorkerId, check_fields
from dalsegno.errors import ConfigurationError
from dalsegno.stateful.schema import Count, Must
from dalsegno.web.security import read_certificate

_Seconds = Annotated[float, Must("seconds, more than 0", lambda seconds: 0 < seconds < math.inf)]
_Share = Annotated[float, Must("a number from 0 to below 1", lambda share: 0 <= share < 1)]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Raises ConfigurationError for a value that cannot work."""

    server_addr: str | None = None
    """``HOST:PORT`` or ``https://HOST:PORT``; None: no DiLoCo."""
    sync_every: Positive = 500
    """Local steps between two synchronizations of a parameter."""
    worker_id: WorkerId | None = None
    """The worker's name, the same in all its legs; None: made from the host and the run's directory."""
    bf16_comm: bool = True
    """Send pseudo-gradients as bfloat16, not float32."""
    dylu: bool = False
    """Let the server choose ``sync_every`` by the worker's speed."""
    heartbeat_interval: _Seconds = 30.0
    """Seconds between two signs of life."""
    num_fragments: Positive = 1
    """Synchronize the model in this many parts, one after the other."""
    timeout: _Seconds = 600.0
    """Seconds to wait for the other workers, and for each part of a transfer."""
    max_sync_retries: Count = 3
    """Further attempts of a synchronization, after 2, 4, 8 … seconds; then it is skipped."""
    token: str | None = None
    """Bearer token of the server."""
    certificate: str | None = None
    """PEM of the server's certificate."""
    int8_comm: bool = False
    """Send pseudo-gradients as int8 with a scale per 256 elements, and what this loses with the next ones."""
    overlap_steps: Count = 0
    """Local steps during which a submission travels; then its result is taken. 0: training waits for it."""
    mixing_factor: _Share = 0.5
    """Share of the worker's own parameters when a result is taken after ``overlap_steps``; the rest is the global
    ones', which have not seen these steps."""

    def __post_init__(self) -> None:
        check_fields(self, "DiLoCo")
        if self.overlap_steps >= self.sync_every // self.num_fragments and self.overlap_steps:
            raise ConfigurationError(
                f"DiLoCo: overlap_steps={self.overlap_steps} with sync_every={self.sync_every} and num_fragments="
                f"{self.num_fragments}; at most one fragment travels at a time, so give fewer than "
                f"{self.sync_every // self.num_fragments}"
            )
        if self.sync_every < self.num_fragments:
            raise ConfigurationError(
                f"DiLoCo: num_fragments={self.num_fragments} with sync_every={self.sync_every}; "
                "there is at most one fragment per step"
            )

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> WorkerOptions:
        """These options; one that has its default is taken from ``DILOCO_SYNC_EVERY`` and the like, unless that is
        empty.

        The server's address is in ``DILOCO_SERVER``, its token in ``DILOCO_TOKEN`` or the file ``DILOCO_TOKEN_FILE``,
        its certificate in the file ``DILOCO_CERTIFICATE``.

        Raises:
            ConfigurationError: for a variable with an invalid value, or whose file is not readable; names it.
        """
        found: dict[str, Any] = {}
        for variable, (name, parse) in _VARIABLES.items():
            text = environment.get(variable)
            if text and name not in found and getattr(self, name) == getattr(_DEFAULTS, name):
                try:
                    found[name] = parse(text)
                except OSError as error:
                    raise ConfigurationError(f"{variable}={text!r}: {error.strerror or error}") from error
                except ValueError as error:
                    raise ConfigurationError(f"{variable}={text!r}: {error}") from error
        return replace(self, **found)


def _flag(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"needs one of {', '.join((*_TRUE, *_FALSE))}")
    return text.lower() in _TRUE


_VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "DILOCO_SERVER": ("server_addr", str),
    "DILOCO_SYNC_EVERY": ("sync_every", int),
    "DILOCO_WORKER_ID": ("worker_id", str),
    "DILOCO_BF16_COMM": ("bf16_comm", _flag),
    "DILOCO_INT8_COMM": ("int8_comm", _flag),
    "DILOCO_DYLU": ("dylu", _flag),
    "DILOCO_HEARTBEAT_INTERVAL": ("heartbeat_interval", float),
    "DILOCO_NUM_FRAGMENTS": ("num_fragments", int),
    "DILOCO_TIMEOUT": ("timeout", float),
    "DILOCO_MAX_SYNC_RETRIES": ("max_sync_retries", int),
    "DILOCO_OVERLAP_STEPS": ("overlap_steps", int),
    "DILOCO_MIXING_FACTOR": ("mixing_factor", float),
    "DILOCO_TOKEN": ("token", str),
    "DILOCO_TOKEN_FILE": ("token", lambda path: Path(path).read_text("ascii").strip()),
    "DILOCO_CERTIFICATE": ("certificate", lambda path: read_certificate(Path(path))),
}
_DEFAULTS = WorkerOptions()
