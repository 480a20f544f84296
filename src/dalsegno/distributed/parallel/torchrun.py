"""The process group that torchrun announces in the environment."""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dalsegno.errors import ConfigurationError


def init_distributed(use_cpu: bool) -> torch.device:
    """Join the process group that torchrun announces, if it does and nobody has; the device of this rank."""
    gpu = torch.cuda.is_available() and not use_cpu
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        # CPU tensors (a checkpoint's bookkeeping) go over gloo even where NCCL carries the gradients.
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                backend, store=_store_of_this_life(rank, world_size), rank=rank, world_size=world_size
            )
        else:
            dist.init_process_group(backend)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def require_launch(way: str) -> None:
    """
    Raises:
        ConfigurationError: if no launcher has said how many ranks there are, not even that there is one: torchrun was
            forgotten, more likely than not.
    """
    if "WORLD_SIZE" not in os.environ and not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"parallel={way!r}: this process was started by itself, and no launcher has said how many ranks there are; "
            "start with torchrun (--nproc-per-node 1 is enough for one rank), or use parallel='auto', which needs none"
        )


def _store_of_this_life(rank: int, world_size: int) -> Store:
    """torchrun's store, with names that no former life of these ranks has used.

    It outlives them (``--max-restarts``), and torch would take the addresses that it finds there for those of today's
    ranks (pytorch issue 135712). How often they were restarted does not tell lives apart: each host counts for itself.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=False, timeout=timedelta(minutes=30))
    return PrefixStore(name_of_life(store, rank, world_size), store)


def name_of_life(store: Store, rank: int, world_size: int) -> str:
    """A name that these ``world_size`` ranks agree on, and none before them, whatever these have left in ``store``.

    Rank 0 makes it up. The others tell it, under the name that they find, who they are, until it names them as the ones
    it has heard from: a name of a former life never does.
    """
    me = secrets.token_hex(8)
    if rank == 0:
        name = f"dalsegno/{me}"
        store.set("dalsegno/name", name)
        told = [store.get(f"{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{name}/heard", json.dumps(told))
        return name
    while True:
        name = store.get("dalsegno/name").decode()
        store.set(f"{name}/{rank}", me)
        if store.check([f"{name}/heard"]) and me in json.loads(store.get(f"{name}/heard")):
            return name
        time.sleep(0.01)  # nothing tells that a value has changed
