"""Spread: a small transformer, and the loops that train it on several ranks with torch alone, written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH, VOCABULARY = 64, 256
MAX_GRAD_NORM = 1.0
LEARNING_RATE = 1e-3
PARTS = 4
"""Micro-batches of a pipeline's batch."""


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(VOCABULARY, (length, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[index]}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, width)."""
        before = self.first(x)
        q, k, v = (each(before).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.down(nn.functional.gelu(self.up(self.second(x)))))


class Transformer(nn.Module):
    """Returns the mean loss of the next token."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), input_ids)


class Part(nn.Module):
    """A stage of :class:`Transformer`, as one writes it for torch's pipelining."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x))


def loss_of(logits: Tensor, input_ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def plan() -> dict[str, ParallelStyle]:
    """Of tensor parallelism, for all blocks."""
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    return {**columns, "blocks.*.out": RowwiseParallel(), "blocks.*.down": RowwiseParallel()}


class MeanLoss:
    """The mean loss of every few steps, over the ranks that read different data: what a script prints."""

    def __init__(self, every: int, ranks: int) -> None:
        self._every = every
        self._ranks = ranks
        self._losses: list[Tensor] = []

    def after(self, loss: Tensor) -> float | None:
        """The mean, if it is due after a step with this loss. Collective if several ranks read different data."""
        self._losses.append(loss.detach())
        if len(self._losses) < self._every:
            return None
        mean = torch.stack(self._losses).mean()
        self._losses.clear()
        if self._ranks > 1:
            dist.all_reduce(mean)
        return float(mean) / self._ranks


def steps_by_hand(
    layout: str, width: int, depth: int, batch: int, texts: Texts, record_every: int, optim: str
) -> Iterator[float | None]:
    """Train for ever with torch alone; gives way after each step, with the loss to be printed there. Collective."""
    model, rank, ranks = Transformer(width, depth), dist.get_rank(), dist.get_world_size()
    share = (rank, ranks) if layout in ("fsdp", "hsdp") else (0, 1)
    if layout == "pp":
        yield from _pipeline_steps(model, batch, texts, record_every, optim)
        return
    mean_loss = MeanLoss(record_every, share[1])
    if layout == "tp":
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan())
    else:
        shape, names = ((2, ranks // 2), ("replicate", "shard")) if layout == "hsdp" else ((ranks,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    optimizer, scheduler = _optimizer(model, optim)
    for ids in _batches(texts, batch, *share):
        loss = model(ids)
        loss.backward()
        clip(model, None)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield mean_loss.after(loss)


def _pipeline_steps(
    model: Transformer, batch: int, texts: Texts, record_every: int, optim: str
) -> Iterator[float | None]:
    """The rank that has the losses prints them."""
    rank = dist.get_rank()
    half = len(model.blocks) // 2
    layers = [model.tokens, *model.blocks[:half]] if rank == 0 else [*model.blocks[half:], model.head]
    stage = PipelineStage(Part(layers), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss_of)
    optimizer, scheduler = _optimizer(stage.submod, optim)
    mean_loss = MeanLoss(record_every, 1)
    for ids in _batches(texts, batch, 0, 1):
        losses: list[Tensor] = []
        schedule.step(*([ids] if rank == 0 else []), target=ids, losses=losses, return_outputs=False)
        clip(stage.submod, dist.group.WORLD)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield mean_loss.after(torch.stack(losses).mean()) if losses else None


def _optimizer(model: nn.Module, optim: str) -> tuple[Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    kind = {"adamw": AdamW, "sgd": SGD}[optim]
    optimizer = kind(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _batches(texts: Texts, batch: int, number: int, of: int) -> Iterator[Tensor]:
    sampler: Any = DistributedSampler(texts, of, number)  # type: ignore[arg-type]
    while True:
        for each in DataLoader(texts, batch_size=batch, sampler=sampler):
            yield each["input_ids"]


def clip(model: nn.Module, stages: Any) -> None:
    """Clip by the total norm, over all ``stages`` too: split layers and whole ones each by themselves, since torch does
    not mix them."""
    parameters = [each for each in model.parameters() if each.grad is not None]
    split = [each for each in parameters if isinstance(each, DTensor)]
    rest = [each for each in parameters if not isinstance(each, DTensor)]
    squares = [_norm(each).square() for each in (split, rest) if each]
    total = torch.stack(squares).sum()
    if stages is not None:
        dist.all_reduce(total, group=stages)
    for some in (split, rest):
        if some:
            torch.nn.utils.clip_grads_with_norm_(some, MAX_GRAD_NORM, total.sqrt())


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
