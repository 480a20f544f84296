"""One rank of test_grad_norm_logger: ``grad_norm_ranks.py RANK WORLD_SIZE OUTPUT_DIR``, with DDP, then FSDP2."""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from callbacks.stage import Stage
from dalsegno.callbacks import GradNormLogger


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


def one_step(way: str, rank: int, world_size: int, output_dir: Path) -> None:
    own = model()
    called = WAYS[way](own)
    logger = GradNormLogger()
    stage = Stage(output_dir / way, logger, model=own, rank=rank)
    stage.begin()
    called(tokens().chunk(world_size)[rank]).backward()
    stage.update(1, evaluates=True)
    stage.evaluate()
    stage.end()
    assert (logger.state_dict() is None) == (rank > 0)


def main(rank: int, world_size: int, output_dir: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{output_dir}/store", rank=rank, world_size=world_size)
    for way in WAYS:
        one_step(way, rank, world_size, output_dir)
    gc.collect()  # DDP holds the process group, and must not be the last to let it go
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
