"""Process group of a torchrun launch, from its environment variables."""

from __future__ import annotations

import json
import logging
import os
import resource
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dalsegno.distributed import accelerator
from dalsegno.distributed.modes import Setting, text_of
from dalsegno.errors import ConfigurationError

logger = logging.getLogger("dalsegno")


def init_distributed(use_cpu: bool) -> torch.device:
    """Join torchrun's process group, if the environment describes one and none exists. Returns this rank's device: of
    the accelerator that torch finds; else the CPU, with a warning if the ranks leave an accelerator idle."""
    is_several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = accelerator.CPU if use_cpu else accelerator.use_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = accelerator.group_backend(device)
    if is_several and backend is None:
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                "this machine has an accelerator of type %r, but training runs on the CPU: torch has no collectives "
                "for several ranks on it; start one rank, or set use_cpu=True if this is intended",
                device.type,
            )
        device, backend = accelerator.CPU, "gloo"
    if is_several and not dist.is_initialized():
        allow_descriptors(int(os.environ["WORLD_SIZE"]))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                backend, store=_store_for_this_start(rank, world_size), rank=rank, world_size=world_size
            )
        else:
            dist.init_process_group(backend)
    return device


def allow_descriptors(ranks: int) -> None:
    """Let this process open as many files and sockets as gloo needs among so many ranks. Logs a warning if the hard
    limit does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PER_RANK * ranks + _FURTHER
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%d ranks need about %d open files and sockets each, and this process may open only %d: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=, or the container's nofile)",
            ranks,
            needed,
            hard,
        )


_PER_RANK = 3  # descriptors of gloo: of the job's group, of that of background saves, and of a mesh's
_FURTHER = 1024  # data workers, logs, checkpoints


def require_launch(setting: Setting) -> None:
    """Some launcher must have set a world size, if only 1: else most likely torchrun was forgotten."""
    if "WORLD_SIZE" not in os.environ and not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"parallel={text_of(setting)!r}: this process was started without a launcher, so the number of ranks is "
            "unknown; start it with torchrun (--nproc-per-node 1 for one rank), or use parallel='auto'"
        )


def _store_for_this_start(rank: int, world_size: int) -> Store:
    """Wrap torchrun's store with a prefix that no earlier start of these ranks has used.

    The store survives restarts (``--max-restarts``), and torch would use the addresses of the dead ranks that it finds
    there (pytorch issue 135712). The restart count is not a usable prefix: each host counts separately.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world_size, is_master=False, timeout=timedelta(minutes=30))
    return PrefixStore(unique_prefix(store, rank, world_size), store)


def unique_prefix(store: Store, rank: int, world_size: int) -> str:
    """Agree on a prefix among these ``world_size`` ranks, different from those of earlier starts in ``store``.

    Rank 0 generates the name. The other ranks announce their ids under the name that they find, until that name lists
    them as heard: a name of an earlier start never does.
    """
    me = secrets.token_hex(8)
    if rank == 0:
        name = f"dalsegno/{me}"
        store.set("dalsegno/name", name)
        heard = [store.get(f"{name}/{other}").decode() for other in range(1, world_size)]
        store.set(f"{name}/heard", json.dumps(heard))
        return name
    while True:
        name = store.get("dalsegno/name").decode()
        store.set(f"{name}/{rank}", me)
        if store.check([f"{name}/heard"]) and me in json.loads(store.get(f"{name}/heard")):
            return name
        time.sleep(0.01)  # the store cannot notify of a changed value
