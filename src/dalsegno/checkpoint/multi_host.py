"""A checkpoint whose files are in the memories of several hosts: each rank fetches those that it reads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.manifest import Checkpoint
from dalsegno.distributed import collectives
from dalsegno.distributed.file_transfer import Transfer, transfer
from dalsegno.distributed.hosts import Hosts
from dalsegno.system.byte_sizes import format_bytes

logger = logging.getLogger("dalsegno")


@dataclass(frozen=True, slots=True)
class MultiHostCheckpoint(Checkpoint):
    """A checkpoint in directories of that ``path`` on each host, which together contain all files.

    Attributes:
        hosts: which ranks share each directory.
        held: by host, the files that its directory contains, verified. Files that are fetched are added.
    """

    hosts: Hosts
    held: Sequence[set[str]]

    @property
    def here(self) -> dict[str, FileRecord]:
        """Records of the files that this host's directory contains."""
        return {name: self.manifest.files[name] for name in self.held[self.hosts.here]}

    def require(self, names: Collection[str]) -> None:
        """Fetch those of the files ``names`` that this host lacks into its directory.

        Raises:
            OSError, RankFailed: on every rank, if a file could not be fetched, for lack of memory for example.
        """
        if self.hosts.count == 1:
            return
        absent = {*names} & self.manifest.files.keys() - self.held[self.hosts.here]
        wanted = collectives.gather(sorted(absent), "files of other hosts")
        transfers = self._transfers(wanted)
        if not transfers:
            return
        if collectives.rank() == 0:
            size = format_bytes(sum(each.size for each in transfers))
            logger.info("%s: fetching %d files, %s, from other hosts", self.path.name, len(transfers), size)
        failure = transfer(transfers, self.path, collectives.background_group())

        def expect_all() -> None:
            if failure is not None:
                raise OSError(f"{self.path}: a file could not be fetched from another host: {failure}")

        collectives.run_on_all_ranks(expect_all)
        for each in transfers:
            self.held[self.hosts.of_rank[each.target]].add(each.name)

    def _transfers(self, wanted: Sequence[Sequence[str]]) -> list[Transfer]:
        """From the nearest host after it that has the file, spread over the ranks of both hosts."""
        hosts, transfers = self.hosts, []
        for host in range(hosts.count):
            targets = hosts.ranks(host)
            missing = sorted({name for rank in targets for name in wanted[rank]})
            for number, name in enumerate(missing):
                others = ((host + distance) % hosts.count for distance in range(1, hosts.count))
                sources = hosts.ranks(next(other for other in others if name in self.held[other]))
                record = self.manifest.files[name]
                source, target = sources[number % len(sources)], targets[number % len(targets)]
                transfers.append(Transfer(name, record.size, record.xxh3, source, target))
        return transfers
