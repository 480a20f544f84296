"""Processes for tests: a few ranks of one job, from a fork server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.fsdp", "dalsegno.checkpoint"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each of ``world_size`` ranks; the first error of any is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_server.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            _server.Process(target=_rank, args=(function, args, rank, world_size, folder, pipes[rank][1]))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        outcomes = [_outcome(receiver) for receiver, _ in pipes]
        for process in ranks:
            process.join()
    for failed, value in outcomes:
        if failed:
            raise value
    return [value for _, value in outcomes]


def exit_status(function: Callable[..., Any], *args: Any) -> int | None:
    """How a process ended that called ``function(*args)``."""
    process = _server.Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def _outcome(receiver: Connection) -> tuple[bool, Any]:
    try:
        failed, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        return True, RuntimeError("a rank ended without a word")
    return failed, value


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, folder: str, sender: Connection
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if world_size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        sender.send_bytes(pickle.dumps((False, function(*args))))  # plainly: tensors by value
    except Exception as error:
        sender.send_bytes(pickle.dumps((True, error)))
    finally:
        if world_size > 1:
            dist.destroy_process_group()
