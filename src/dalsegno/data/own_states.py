"""OwnStates: what the user's data keeps between batches, saved with its position."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from dalsegno.data.digests import digest
from dalsegno.errors import StateMismatch
from dalsegno.stateful.component import Stateful, is_stateful, stateful_behind

from .generators import OwnGenerators
from .loader import CountingCollate


class OwnStates(OwnGenerators):
    """The generators that ``roots`` own; and the samplers and the collate function, as far as they have a
    ``state_dict``, by the names of the loader's attributes: ``batch_sampler``, ``collate_fn``."""

    def parts(self) -> dict[str, Stateful]:
        """The samplers and the collate function that have a state, each once."""
        found: dict[str, Stateful] = {}
        for name, thing in _handed_in(self._roots):
            part = stateful_behind(thing)
            if part is not None and not any(part is each for each in (*found.values(), *_datasets(self._roots))):
                found[name] = part
        return found

    def __bool__(self) -> bool:
        return bool(self.find() or self.parts())

    def state_dict(self) -> dict[str, Any]:
        states = {name: copy.deepcopy(part.state_dict()) for name, part in self.parts().items()}
        return {**super().state_dict(), **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each of them. A part whose state is the saved one already is left alone: a sampler that is being read
        may take what is loaded for the place where its next iterator begins. Raises StateMismatch if one no longer
        exists, or does not take its state."""
        parts = self.parts() if state else {}
        super().load_state_dict({way: saved for way, saved in state.items() if way not in parts})
        for name, part in parts.items():
            if name in state and digest(part.state_dict()) != digest(state[name]):
                try:
                    part.load_state_dict(copy.deepcopy(state[name]))
                except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                    raise StateMismatch(
                        f"the saved state of the {name} does not fit this {type(part).__name__}: {error!r}"
                    ) from error


def _handed_in(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Samplers and collate functions. A loader with a ``state_dict`` saves its samplers itself."""
    for name, root in roots.items():
        if name == "collate_fn":
            yield name, root
        elif isinstance(root, DataLoader):
            collate = root.collate_fn
            yield "collate_fn", collate.collate if isinstance(collate, CountingCollate) else collate
            if not is_stateful(root):
                yield "sampler", root.sampler
                yield "batch_sampler", root.batch_sampler
                yield "batch_sampler.sampler", getattr(root.batch_sampler, "sampler", None)


def _datasets(roots: Mapping[str, Any]) -> Iterator[Any]:
    """The data, whose state is saved elsewhere if at all, also where one of its methods collates."""
    for name, root in roots.items():
        data = root.dataset if isinstance(root, DataLoader) else root if name == "dataset" else None
        yield from (data, getattr(data, "dataset", None))
