"""Size of a run's memory checkpoints on each host, compared with the memory that is free, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dalsegno.checkpoint.contract import ShardedState
from dalsegno.checkpoint.free_space import available_memory, free_disk
from dalsegno.checkpoint.names import MODEL
from dalsegno.checkpoint.optimizer_state import tensors_per_parameter
from dalsegno.checkpoint.snapshot import Snapshotter
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts
from dalsegno.errors import ConfigurationError
from dalsegno.system.byte_sizes import format_bytes


def check_room(
    snapshotter: Snapshotter,
    sharded: Sequence[ShardedState],
    directory: Path,
    hosts: Hosts,
    *,
    copies: int,
    freed: int,
) -> str:
    """Compare two slots, which share files of frozen parameters, with the memory that is free; also before the first
    step has created the optimizer's state.

    Args:
        snapshotter: of one slot; has planned the files.
        sharded: model and optimizer.
        directory: of this run in shared memory.
        hosts: the run's.
        copies: number of other hosts that keep each host's files.
        freed: bytes on this host that the first save frees.

    Returns:
        In words: the size and the place on this host, and the memory that is free there.

    Raises:
        ConfigurationError: on all ranks, if they do not fit into the memory of a host.
    """
    size = frozen = trained = 0
    for file in snapshotter.planned:
        if file.is_frozen:
            frozen += file.layout.length
        else:
            size += file.layout.length
            trained += file.layout.length if file.component == MODEL else 0
    is_exact = True
    for each in sharded:
        if each.optimizer is not None and not each.optimizer.state:
            per_parameter = tensors_per_parameter(each.optimizer)
            is_exact = is_exact and per_parameter is not None
            size += trained * (per_parameter or 0)
    sizes = collectives.gather((size, frozen), "size of memory checkpoints")
    own, slots = _by_host([size for size, _ in sizes], hosts, copies)
    own_shared, shared = _by_host([frozen for _, frozen in sizes], hosts, copies)
    totals = [2 * of_slot + once for of_slot, once in zip(slots, shared, strict=True)]
    needed, ranks_here = totals[hosts.here], len(hosts.ranks(hosts.here))
    free, room = free_disk(directory) + freed, available_memory()
    left = free - needed if room is None else min(free - needed, ranks_here * room + freed - needed)
    is_disk = left == free - needed
    of_ranks = collectives.gather((left, is_disk), "room for memory checkpoints")
    about = "" if is_exact else ", and what the optimizer adds in the first step"
    shortest, is_disk = min(of_ranks)
    host = hosts.of_rank[of_ranks.index((shortest, is_disk))] if shortest < 0 else hosts.here
    text = f"{format_bytes(shared[host])} of frozen parameters, and " if shared[host] else ""
    text += f"two slots of {format_bytes(slots[host])}{about}"
    if copies:
        of_its_own = 2 * own[host] + own_shared[host]
        text += f" ({format_bytes(of_its_own)} of its own, the rest copies of other hosts' parts)"
    if shortest < 0:
        place = directory.parent.parent if is_disk else "memory"
        where = f" of the host of rank {hosts.ranks(host)[0]}" if hosts.count > 1 else ""
        raise ConfigurationError(
            f"save_in_memory=: memory checkpoints take {text}, and {format_bytes(max(0, totals[host] + shortest))} "
            f"are free in {place}{where}; leave save_in_memory out, or train on a host with more memory"
        )
    return f"{text} in {directory}, where {format_bytes(free)} are free"


def _by_host(sizes: Sequence[int], hosts: Hosts, copies: int) -> tuple[list[int], list[int]]:
    """Bytes of its own ranks' files that each host keeps, and of these with the copies; ``sizes``: by rank."""
    own = [sum(sizes[rank] for rank in hosts.ranks(host)) for host in range(hosts.count)]
    return own, [sum(own[host - distance] for distance in range(copies + 1)) for host in range(hosts.count)]
