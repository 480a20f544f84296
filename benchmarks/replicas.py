"""A prototype: healthy replicas train on while one is replaced, with torchft as the engine.

``python -m benchmarks.replicas [--steps N]``. It needs torchft beside the rest: ``pip install torchft==0.2.0``.
It is no part of the table, and no feature: it answers what docs/why/roadmap.md says about it.

Two replicas of two gloo ranks each train a small model: with DDP in the replica (``ddp``), and with ``fully_shard`` in
it (``hsdp``, the gradients' shards averaged over the replicas). Both ranks of one replica are killed, between two steps
or when the other replica already waits for their gradients, and two new ones start at once. These get weights,
optimizer and step from the healthy replica, over the network.

The run is then replayed: one process computes, one after the other, the gradients of those replicas that took part in
each step. Its weights are compared with the run's bit by bit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from xxhash import xxh3_128_hexdigest

from dalsegno.data import ResumableSampler

from .row import Row, duration, table

REPLICAS, RANKS = 2, 2
STEPS, KILLED_AFTER = 400, 100
WIDTH, BATCH, ROWS = 256, 16, 4096
BETWEEN, WITHIN = "between two steps", "within a step"
HEARTBEAT = 1000
"""After so many milliseconds without a sign of life a replica counts as dead. torchft's default is 5000."""
PAUSE = 0.02
"""Seconds that a step waits, so that there are steps left when the new replica has been imported."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


class Batches:
    """The batches of one rank: of any step, in any order of asking, as dalsegno's sampler orders them."""

    def __init__(self, replica: int, rank: int):
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(ROWS, WIDTH, generator=generator)
        self._targets = self._inputs[:, :8].prod(dim=1, keepdim=True)
        self._place, self._places = replica * RANKS + rank, REPLICAS * RANKS
        self._epoch, self._order = -1, list[list[int]]()

    def of(self, step: int) -> tuple[Tensor, Tensor]:
        per_epoch = ROWS // (BATCH * self._places)
        epoch, within = divmod(step, per_epoch)
        if epoch != self._epoch:
            sampler = ResumableSampler(
                ROWS, BATCH, rank=self._place, world_size=self._places, seed=2, shuffle=True, drop_last=True
            )
            sampler.set_epoch(epoch)
            self._epoch, self._order = epoch, list(sampler)
        rows = self._order[within]
        return self._inputs[rows], self._targets[rows]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """``shard`` as a tensor of the optimizer for ``parameter``; a number of the whole parameter as it is."""
    if not isinstance(parameter, DTensor) or shard.dim() == 0:
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def fingerprint(module: nn.Module) -> str:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return xxh3_128_hexdigest(b"".join(tensor.detach().numpy().tobytes() for tensor in whole))


def kill_once(folder: Path) -> None:
    """End all ranks of this replica, unless that has been done already."""
    if (folder / "killed").exists():
        return
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "killed").write_text(str(time.monotonic()))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, replica: int, steps: int, killed: str, folder: Path) -> None:
    """One rank of one replica, to the end of the run. Rank 0 writes a line for each step into ``folder``."""
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, module = dist.get_rank(), model()
    if kind == "hsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
        trained: nn.Module = module
    else:
        trained = nn.parallel.DistributedDataParallel(module)
    optimizer = optimizer_of(module.parameters())
    batches = Batches(replica, rank)
    lines = (folder / f"{replica}.jsonl").open("a", buffering=1) if rank == 0 else None

    def state() -> dict[str, Any]:
        return tree_map(local, {"model": module.state_dict(), "optimizer": optimizer.state_dict()})

    def load(former: dict[str, Any]) -> None:
        for name, tensor in module.state_dict().items():
            local(tensor).copy_(former["model"][name])
        for parameter, of_it in zip(module.parameters(), former["optimizer"]["state"].values(), strict=True):
            for name, value in of_it.items():
                of_it[name] = sharded_like(parameter, value)
        optimizer.load_state_dict(former["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        state_dict=state,
        load_state_dict=load,
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        init_sync=False,  # every replica is built from the same seed
        use_async_quorum=False,  # else a state is taken during the forward, when FSDP's parameters are whole
        timeout=timedelta(seconds=20),
        lighthouse_addr=os.environ["LIGHTHOUSE"],
    )
    while manager.current_step() < steps:
        manager.start_quorum()  # a new replica gets its state here, and so its step
        step = manager.current_step()
        inputs, targets = batches.of(step)
        nn.functional.mse_loss(trained(inputs), targets).backward()
        if replica == 1 and step == KILLED_AFTER and killed == WITHIN:
            kill_once(folder)
        waiting = [manager.allreduce(local(p.grad)) for p in module.parameters() if p.grad is not None]
        for work in waiting:
            work.wait()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        optimizer.zero_grad()
        if lines is not None:
            line = {
                "step": manager.current_step(),
                "time": time.monotonic(),
                "committed": committed,
                "replicas": manager.num_participants(),
                "taking_part": manager.is_participating(),
            }
            lines.write(json.dumps(line) + "\n")
        time.sleep(PAUSE)
        if replica == 1 and step + 1 == KILLED_AFTER and killed == BETWEEN:
            kill_once(folder)
    weights = fingerprint(module)
    if rank == 0:
        (folder / f"{replica}.weights").write_text(weights)
    manager.shutdown()
    dist.destroy_process_group()


def replay(members: dict[int, set[int]], steps: int) -> str:
    """The fingerprint of the weights after ``steps`` with those replicas in each step that took part in it."""
    torch.set_num_threads(1)
    module = model()
    optimizer = optimizer_of(module.parameters())
    batches = {(replica, rank): Batches(replica, rank) for replica in range(REPLICAS) for rank in range(RANKS)}
    for step in range(steps):
        total = [torch.zeros_like(p) for p in module.parameters()]
        for replica in sorted(members[step + 1]):
            of_replica = [torch.zeros_like(p) for p in module.parameters()]
            for rank in range(RANKS):
                inputs, targets = batches[replica, rank].of(step)
                gradients = torch.autograd.grad(nn.functional.mse_loss(module(inputs), targets), [*module.parameters()])
                for sum_, gradient in zip(of_replica, gradients, strict=True):
                    sum_ += gradient / RANKS
            for sum_, gradient in zip(total, of_replica, strict=True):
                sum_ += gradient
        for parameter, gradient in zip(module.parameters(), total, strict=True):
            parameter.grad = gradient / len(members[step + 1])
        optimizer.step()
    return fingerprint(module)


def start(
    kind: str, replica: int, steps: int, killed: str, folder: Path, lighthouse: str
) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.replicas", "--rank-of", kind, str(replica), killed]
    command += ["--steps", str(steps), "--folder", str(folder)]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS), "LIGHTHOUSE": lighthouse}
    logs = (folder / f"{replica}.log").open("a")
    return [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}, stdout=logs, stderr=logs)
        for rank in range(RANKS)
    ]


def measure(kind: str, killed: str, steps: int) -> list[Row]:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=HEARTBEAT
    )
    with TemporaryDirectory() as place:
        folder = Path(place)
        healthy = start(kind, 0, steps, killed, folder, lighthouse.address())
        other = start(kind, 1, steps, killed, folder, lighthouse.address())
        for process in other:
            process.wait()
        began_again = time.monotonic()
        other = start(kind, 1, steps, killed, folder, lighthouse.address())
        failed = [process.wait() for process in healthy + other]
        if any(failed):
            raise RuntimeError("\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log"))))
        lines = [
            [json.loads(line) for line in (folder / f"{replica}.jsonl").read_text().splitlines()]
            for replica in range(REPLICAS)
        ]
        weights = [(folder / f"{replica}.weights").read_text() for replica in range(REPLICAS)]
        died = float((folder / "killed").read_text())
    lighthouse.shutdown()

    members: dict[int, set[int]] = {}
    for replica, of_replica in enumerate(lines):
        for line in of_replica:
            if line["committed"] and line["taking_part"]:
                members.setdefault(line["step"], set()).add(replica)
    alone = sum(len(members[step]) < REPLICAS for step in range(KILLED_AFTER + 1, steps + 1))
    lost = sum(not line["committed"] for line in lines[0])
    times = [line["time"] for line in lines[0] if line["committed"]]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    after = [pause for pause, moment in zip(pauses, times[1:], strict=True) if moment > died]
    rejoined = next(line["time"] for line in lines[1] if line["time"] > began_again and line["committed"])
    replayed = replay(members, steps)
    unbroken = replay({step: set(range(REPLICAS)) for step in range(1, steps + 1)}, steps)
    two = sorted(after)[-2:][::-1]
    case = f"{kind}, killed {killed}"
    return [
        Row(f"{case}: steps of the healthy replica that were lost", str(lost), f"of {steps}"),
        Row(f"{case}: steps that it made alone", str(alone), f"in {duration(rejoined - died)}"),
        Row(f"{case}: its longest pauses", " and ".join(map(duration, two)), f"a step: {duration(median(pauses))}"),
        Row(f"{case}: both replicas' weights at the end", "equal" if len(set(weights)) == 1 else "DIFFER", ""),
        Row(f"{case}: weights, replayed with the same members", "equal" if weights[0] == replayed else "DIFFER", ""),
        Row(f"{case}: weights of a run that was not killed", "equal" if weights[0] == unbroken else "differ", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rank-of", nargs=3, help=argparse.SUPPRESS)  # what start() gives to each process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        kind, replica, killed = options.rank_of
        train(kind, int(replica), options.steps, killed, options.folder)
    else:
        cases = itertools.product(("ddp", "hsdp"), (BETWEEN, WITHIN))
        print(table([row for kind, killed in cases for row in measure(kind, killed, options.steps)]))


if __name__ == "__main__":
    main()
