"""DataOrder: a callback that digests every training batch, in order."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import xxhash

from dalsegno.callbacks.watchers.dump_activations import tensors_in
from dalsegno.events.callback import Callback
from dalsegno.events.contexts import MicrobatchBeginContext
from dalsegno.stateful.schema import Count, Must


class DataOrderState(TypedDict):
    batches: Count
    digest: Annotated[str, Must("a hexadecimal number", lambda digest: not digest or int(digest, 16))]


class DataOrder(Callback):
    """Its state is the number of batches and a digest of them: equal digests mean the same data in the same order."""

    sets_control_flags = False
    state_scope = "per_rank"
    state_schema = DataOrderState

    def __init__(self) -> None:
        self.batches = 0
        self.digest = ""

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        self.batches += 1
        digest = xxhash.xxh3_128(self.digest.encode())
        for tensor in tensors_in(ctx.batch):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()

    def state_dict(self) -> DataOrderState:
        return {"batches": self.batches, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.digest = state["batches"], state["digest"]

    @classmethod
    def reshard(cls, states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
        """Each rank continues from the concatenated digests of all former ranks."""
        merged = {"batches": states[0]["batches"], "digest": "".join(state["digest"] for state in states)}
        return [merged] * world_size
