"""Random numbers: seeds derived from the place of their use, and the state of this process's generators.

A derived seed is not saved: nothing that happened earlier, in this process or another, can change it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast, final

import numpy as np
import torch

from dalsegno.stateful.schema import Must

from . import collectives
from .accelerator import (
    AcceleratorStates,
    capture_accelerator,
    check_states,
    restore_accelerator,
    seed_accelerator,
    seeded_accelerator,
)
from .layout import Layout

WORD = 2**64 - 1

# Uses of seeds; mixed into the seed, so that no two uses share one.
ORDER, SAMPLE, WORKER, LOADER, RANK, TEXT, MIXTURE = 1, 2, 3, 4, 5, 6, 7


def mix(*numbers: int) -> int:
    """Hash numbers (each modulo 2**64) to one in [0, 2**63), equal on every machine."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ (number & WORD)) + 0x9E3779B97F4A7C15) & WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WORD
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators. Touches no accelerator, so worker processes may call it."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue work for every accelerator


def _is_mersenne_twister(state: tuple[int, tuple[Any, ...], float | None]) -> bool:
    random.Random().setstate(state)
    return True


def _is_bit_generator(state: Any) -> bool:
    """Whether NumPy accepts ``state`` and its buffer position is in range, which NumPy does not check."""
    if isinstance(state, tuple):
        name, key, pos, has_gauss, gauss = state
        state = {
            "bit_generator": name,
            "state": {"key": key, "pos": pos},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
    kind = {each.__name__: each for each in _BIT_GENERATORS}[state["bit_generator"]]
    kind().state = state
    place, end = (state["state"]["pos"], 624) if kind is np.random.MT19937 else (state.get("buffer_pos", 0), 4)
    return type(place) is int and 0 <= place <= end


def _are_cuda_states(states: list[torch.Tensor]) -> bool:
    check_states("cuda", states)
    return all(state.dtype == torch.uint8 and state.dim() == 1 for state in states)


def _is_torch_state(state: torch.Tensor) -> bool:
    """Whether torch accepts ``state`` and its position and remaining count agree, which torch does not check."""
    torch.Generator().set_state(state)
    words = state.view(torch.int32)
    left, place = int(words[2]), int(words[4])  # after the seed (8 bytes); between them, the seeded flag
    return (left, place) == (1, 0) or left + place == 625


_BIT_GENERATORS = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)

PythonState = Annotated[
    tuple[Literal[3], tuple[int, ...], float | None],
    Must("a state of Python's random generator", _is_mersenne_twister),
]
NumpyState = Annotated[
    tuple[Literal["MT19937"], np.ndarray[Any, Any], int, Literal[0, 1], float] | dict[str, Any],
    Must("a state of NumPy's random generator", _is_bit_generator),
]
TorchState = Annotated[torch.Tensor, Must("a state of torch's random generator", _is_torch_state)]


class GeneratorStates(TypedDict):
    """States of Python's, NumPy's and torch's CPU generators."""

    python: PythonState
    numpy: NumpyState
    torch: TorchState


@final
class SavedRandomState(GeneratorStates):
    seed: int
    step: int
    cuda: Annotated[list[torch.Tensor], Must("states of torch's CUDA generators", _are_cuda_states)]
    accelerator: NotRequired[AcceleratorStates]
    stage: NotRequired[tuple[int, int]]
    """Place of the rank along its pipeline, and the number of places; absent without a pipeline."""


def capture_generators() -> GeneratorStates:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def restore_generators(state: GeneratorStates) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators on exit."""
    before = capture_generators()
    try:
        yield
    finally:
        restore_generators(before)


@contextlib.contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators, including that of ``device``; restore them on exit."""
    with preserved_generators(), seeded_accelerator(seed, device):
        seed_generators(seed)
        yield


@final
class DerivedState(TypedDict):
    """Replacement for the saved states when the number of data ranks has changed."""

    seed: int
    step: int


class RandomState:
    """All generators of this rank, including those of all its accelerators, as one component of a checkpoint.

    Per rank: at the start of a run they are seeded with (seed, random rank, 0), so that ranks which read the same data
    draw the same dropout, but stages of a pipeline do not. With another number of data ranks, or of stages, the saved
    states do not fit, and each rank is seeded with (seed, random rank, step of the checkpoint).
    """

    state_scope = "per_rank"
    state_schema = SavedRandomState
    reshard_note = "each rank is seeded from (seed, data rank, step)"

    def __init__(self, seed: int, layout: Layout | None = None, finished_steps: Callable[[], int] = lambda: 0) -> None:
        """``layout``: which ranks read the same data; None: each its own. ``finished_steps`` returns the number that is
        saved with the state."""
        self.seed = seed
        self._random_rank = collectives.rank() if layout is None else layout.random_rank
        self._stage = (0, 1) if layout is None else layout.stage
        self._finished_steps = finished_steps
        self._kept: tuple[GeneratorStates, AcceleratorStates | None] | None = None  # None: the steps draw

    def start(self) -> None:
        """Seed this rank's generators for the start of a run, and keep that state until its first batch."""
        self._seed(mix(RANK, self.seed, self._random_rank, 0))
        self._kept = _present()

    def keep(self) -> None:
        """Keep the present state, unless one is kept, until :meth:`give_back`: what draws meanwhile is no part of the
        steps, and is not drawn at the same place in a run that is never interrupted."""
        self._kept = self._kept or _present()

    def give_back(self) -> None:
        """Put the state that is kept, if any, back into the generators."""
        kept, self._kept = self._kept, None
        if kept is not None:
            generators, devices = kept
            restore_generators(generators)
            restore_accelerator(devices)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the state inside the context, between two steps or outside of them."""
        is_outermost = self._kept is None
        self.keep()
        try:
            yield
        finally:
            if is_outermost:
                self.give_back()

    def state_dict(self) -> SavedRandomState:
        generators, devices = self._kept or _present()
        state: dict[str, Any] = {"seed": self.seed, "step": self._finished_steps(), **generators, "cuda": []}
        if devices is not None:
            state |= {"cuda": devices["states"]} if devices["type"] == "cuda" else {"accelerator": devices}
        if self._stage != (0, 1):
            state["stage"] = self._stage
        return cast(SavedRandomState, state)

    def load_state_dict(self, state: SavedRandomState | DerivedState) -> None:
        """Also keep the loaded state: what is loaded after it, and the events before the first batch, may draw."""
        self._load(state)
        self._kept = _present()

    def _load(self, state: SavedRandomState | DerivedState) -> None:
        derived = mix(RANK, state["seed"], self._random_rank, state["step"])
        if "torch" not in state or state.get("stage", (0, 1)) != self._stage:
            self._seed(derived)
            return
        restore_generators(state)
        devices: AcceleratorStates | None = state.get("accelerator")
        if state["cuda"]:
            devices = {"type": "cuda", "states": state["cuda"]}
        if not restore_accelerator(devices):  # their kind or number has changed
            seed_accelerator(derived)

    @classmethod
    def reshard(cls, states: Sequence[SavedRandomState], world_size: int) -> list[DerivedState]:
        return [{"seed": states[0]["seed"], "step": states[0]["step"]}] * world_size

    def _seed(self, seed: int) -> None:
        seed_generators(seed)
        seed_accelerator(seed)


def _present() -> tuple[GeneratorStates, AcceleratorStates | None]:
    return capture_generators(), capture_accelerator()
