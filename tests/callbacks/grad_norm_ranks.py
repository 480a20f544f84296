"""A model that is awkward to share, and what each rank of test_grad_norm_logger does with it."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from callbacks.stage import Stage
from dalsegno.callbacks import GradNormLogger
from dalsegno.distributed import collectives


class Uneven(nn.Module):
    """Sizes that no two ranks can share evenly, a tied weight, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, -1).flatten())


def model() -> Uneven:
    torch.manual_seed(0)
    return Uneven()


def tokens() -> Tensor:
    """Four sequences of six."""
    return torch.randint(0, 7, (4, 6), generator=torch.Generator().manual_seed(1))


def in_shards(model: Uneven) -> nn.Module:
    fully_shard(model.blocks[0])
    fully_shard(model)
    return model


WAYS = {"ddp": DistributedDataParallel, "fsdp": in_shards}


def one_step(way: str, output_dir: Path) -> None:
    """One update and its evaluation, spread in that way over all ranks."""
    rank, world_size = collectives.rank(), collectives.world_size()
    own = model()
    called = WAYS[way](own)
    logger = GradNormLogger()
    stage = Stage(output_dir, logger, model=own, rank=rank)
    stage.begin()
    called(tokens().chunk(world_size)[rank]).backward()
    stage.update(1, evaluates=True)
    stage.evaluate()
    stage.end()
    assert (logger.state_dict()["log"] is None) == (rank > 0)
