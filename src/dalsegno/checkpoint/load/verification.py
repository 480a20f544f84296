"""Which rank verifies which files of a checkpoint: each file is read once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from dalsegno.checkpoint.format.manifest import FileRecord
from dalsegno.distributed import collectives


def share_of_rank(files: Mapping[str, FileRecord]) -> list[str]:
    """Files that this rank verifies: each file, the largest first, goes to the rank with the fewest bytes so far.

    A checksum covers a whole file. So if fewer ranks saved than load, some ranks have nothing to read.
    """
    loads = [(0, rank) for rank in range(collectives.world_size())]
    mine = []
    for name in sorted(files, key=lambda name: -files[name].size):
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + files[name].size, rank))
        if rank == collectives.rank():
            mine.append(name)
    return mine
