"""Messages: what a worker and its server tell each other beside tensors, as JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from dalsegno.errors import ConfigurationError
from dalsegno.stateful.schema import Count, Finite, Must, check

from .signature import Specs, TensorJson, as_sent, fragments_of, specs_from_json

_WORKER_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

# What the server computes from a submission (a mean weighted by samples, steps per second) must stay finite.
LARGEST_LOSS = 1e100
_MOST = 2**53
_LEAST_SECONDS = 1e-9

Positive = Annotated[int, Must("1 or more", lambda count: count >= 1)]
_Samples = Annotated[int, Must(f"1 to {_MOST}", lambda count: 1 <= count <= _MOST)]
_Steps = Annotated[int, Must(f"0 to {_MOST}", lambda count: 0 <= count <= _MOST)]
_Seconds = Annotated[float, Must("0, or 1e-9 or more", lambda time: time == 0 or _LEAST_SECONDS <= time < math.inf)]
_Loss = Annotated[float, Must(f"at most {LARGEST_LOSS:g} in size", lambda loss: abs(loss) <= LARGEST_LOSS)]
WorkerId = Annotated[str, Must("1 to 128 letters, digits, '.', '_' or '-'", _WORKER_ID.fullmatch)]


def check_fields(given: Any, where: str) -> None:
    """Raises ConfigurationError for a field of a dataclass whose value its type does not allow; never shows a token."""
    for name, form in get_type_hints(type(given), include_extras=True).items():
        if name != "token":
            value = getattr(given, name)
            check(value, form, f"{where}: {name}={value!r}", ConfigurationError)


def check_worker_id(worker_id: object) -> str:
    """Raises ConfigurationError if ``worker_id`` cannot be a part of an address and of a file's name."""
    check(worker_id, WorkerId, "worker_id", ConfigurationError)
    return str(worker_id)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all workers of a run share; fixed by the first one."""

    tensors: list[TensorJson]
    num_fragments: Positive

    def specs(self) -> Specs:
        return specs_from_json(self.tensors)

    def fragments(self) -> list[Specs]:
        return fragments_of(self.specs(), self.num_fragments)


@dataclass(frozen=True, slots=True)
class Submission:
    """The description of a worker's pseudo-gradient."""

    worker_id: WorkerId
    number: Positive
    """Counts the worker's submissions; with ``worker_id`` it identifies this one."""
    base: Count
    """Version of the global parameters that it is relative to."""
    fragment: Count
    bf16: bool
    samples: _Samples
    """Trained on for it: its weight in the mean."""
    steps: _Steps
    seconds: _Seconds
    """Duration of these steps."""
    loss: _Loss | None
    """Of the worker's last step."""
    saved: Count
    """Number of the newest submission that a checkpoint of the worker contains: it never asks for older results."""
    int8: bool = False
    """Whether its elements are :mod:`quantized <.quantization>`; then ``bf16`` does not count."""

    def sent(self, specs: Specs) -> Specs:
        """The form on the wire of a fragment with these parameters."""
        return as_sent(specs, bf16=self.bf16, int8=self.int8)

    @property
    def file_name(self) -> str:
        return f"{self.worker_id}-{self.number:08d}.safetensors"

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Result:
    """What became of a submission, or of joining."""

    version: Count
    """Of the global parameters, after it."""
    fragment: Count | None = None
    """The fragment that the worker takes; None: all parameters."""
    sync_every: int | None = None
    """Steps to the next submission; None: as the worker was configured."""
    loss: Finite | None = None
    """Mean of the losses of the submissions that were applied with it, with the same weights."""


def submission_from_json(content: Any) -> Submission:
    """Raises ConfigurationError if ``content``, sent by a worker, does not describe a submission."""
    check(content, Submission, "submission", ConfigurationError)
    return Submission(**content)
