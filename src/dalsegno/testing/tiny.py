"""Models and data small enough for a test of a second, and random enough to detect an inexact resume."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset

from dalsegno.data.loader import tensors_in
from dalsegno.events.callback import FlaglessCallback
from dalsegno.events.contexts import MicrobatchBeginContext
from dalsegno.stateful.schema import Count, Must


class TinyRegression(nn.Module):
    """Two layers with dropout, which reveals an unrestored random generator. Returns the loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        return nn.functional.mse_loss(self.layers(x), y)


def tiny_regression_data(length: int = 100, seed: int = 0) -> Dataset[dict[str, Tensor]]:
    """``length`` samples ``{"x": (8,), "y": (1,)}``, determined by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 8, generator=generator)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(length, 1, generator=generator)
    columns: dict[str, Any] = {"x": x, "y": y}
    return StackDataset(**columns)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class TinyLanguageModel(nn.Module):
    """A decoder-only transformer with tied embeddings, over bytes. Returns the mean cross-entropy of the next byte."""

    def __init__(
        self,
        *,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        context: int = 64,
        vocabulary: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """input_ids, labels: (batch, length), int64."""
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class DataOrderState(TypedDict):
    batches: Count
    digest: Annotated[str, Must("a hexadecimal number", lambda digest: not digest or int(digest, 16))]


class DataOrder(FlaglessCallback):
    """Its state is the number of batches and a digest of them: equal digests mean the same data in the same order."""

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
