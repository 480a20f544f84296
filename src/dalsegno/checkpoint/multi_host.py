"""A memory checkpoint whose files are in the memories of several hosts: it is found, verified where its files are, and
each rank fetches those that it reads.

A host may have its own ranks' files, copies of another host's, or none, if it replaces one that was lost. A directory
belongs to one leg. So what a host that comes back has kept of a dead timeline is found by no later leg.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dalsegno.checkpoint import checkpoint_dir, memory_dir, names
from dalsegno.checkpoint.file_reading import FileRecord
from dalsegno.checkpoint.manifest import Checkpoint, Manifest
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts, Transfer, transfer
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, RankFailed, StateMismatch
from dalsegno.system import filesystem
from dalsegno.system.progress import format_bytes

logger = logging.getLogger("dalsegno")

Candidates = Mapping[str, int | None]
"""Names of directories that may contain the checkpoint, each with its step; None: any step."""


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

    def require(self, wanted: Collection[str]) -> None:
        """Fetch those of the files ``wanted`` that this host lacks into its directory. Raises OSError or RankFailed on
        every rank if a file could not be fetched, for lack of memory for example."""
        if self.hosts.count == 1:
            return
        absent = {*wanted} & self.manifest.files.keys() - self.held[self.hosts.here]
        transfers = self._transfers(collectives.gather(sorted(absent), "files of other hosts"))
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


@dataclass(frozen=True, slots=True, order=True)
class _Published:
    """A published checkpoint. ``digest``: of its manifest, so that only parts of the same save are put together."""

    step: int
    name: str
    digest: str


def newest_in_memory(
    output_dir: Path, candidates: Candidates, *, after: int, hosts: Hosts
) -> MultiHostCheckpoint | None:
    """The newest checkpoint of a step greater than ``after`` that is valid and whole on all hosts together; None if
    there is none. Every host then has a directory for it, with all but the tensors that it may not need. One that is
    damaged, or not whole, is skipped with a warning. Collective."""
    of_hosts = hosts.run(lambda: _published(output_dir, candidates, after))
    for found in sorted({each for of_host in of_hosts for each in of_host}, reverse=True):
        try:
            return _assembled(output_dir, found, hosts, next(n for n, those in enumerate(of_hosts) if found in those))
        except (ConfigurationError, DamagedCheckpoint, StateMismatch, OSError, RankFailed) as error:
            if collectives.rank() == 0:
                logger.warning("no memory checkpoint can be used: %s", error)
    return None


def _published(output_dir: Path, candidates: Candidates, after: int) -> list[_Published]:
    """Those on this host."""
    found = []
    for name, only in candidates.items():
        directory = memory_dir.find(name, output_dir)
        for path in [] if directory is None else checkpoint_dir.newest_first(directory.checkpoints, after=after):
            step, data = names.step_of(path), _manifest_data(path)
            if step is not None and data is not None and only in (None, step):
                found.append(_Published(step, name, _digest(data)))
    return found


def _assembled(output_dir: Path, found: _Published, hosts: Hosts, first: int) -> MultiHostCheckpoint:
    """``first``: number of the first host that has it. Raises on every rank if a file is damaged, cannot be read or is
    on no host, or if a host has no room for what it needs."""
    directory = memory_dir.find(found.name, output_dir)
    data = None if directory is None else _manifest_data(names.checkpoint_path(directory.checkpoints, found.step))
    is_here = data is not None and _digest(data) == found.digest
    sent = collectives.gather(data if hosts.leads and hosts.here == first else None, "manifest in memory")
    received = [each for each in sent if each is not None]
    if not received:
        raise DamagedCheckpoint(f"step {found.step}: its manifest in memory is gone")
    manifest = Manifest.parse(received[0], Path(found.name))
    valid, problems = set[str](), list[str]()
    if directory is not None and is_here:
        path = names.checkpoint_path(directory.checkpoints, found.step)
        valid, problems = _verified(Checkpoint(path, found.step, manifest), hosts)
    of_ranks = collectives.gather((valid, problems), "files in memory")
    held = [set[str]().union(*(of_ranks[rank][0] for rank in hosts.ranks(host))) for host in range(hosts.count)]
    if missing := sorted(manifest.files.keys() - set[str]().union(*held)):
        problem = next((each for _, problems in of_ranks for each in problems), None)
        raise DamagedCheckpoint(
            problem or f"step {found.step}: {missing[0]} was in the memory of a lost host; no other host has a copy"
        )
    hosts.run(lambda: None if is_here else _create(output_dir, found, received[0]))
    directory = memory_dir.find(found.name, output_dir)
    assert directory is not None, "it was there, or is created"
    path = names.checkpoint_path(directory.checkpoints, found.step)
    checkpoint = MultiHostCheckpoint(path, found.step, manifest, hosts, held)
    checkpoint.require([name for name in manifest.files if "/" not in name or name.endswith(".json")])
    return checkpoint


def _verified(checkpoint: Checkpoint, hosts: Hosts) -> tuple[set[str], list[str]]:
    """This rank's share of the files in the directory: those that are valid, and why the others are not."""
    files = checkpoint.manifest.files
    here = sorted((name for name in files if (checkpoint.path / name).exists()), key=lambda name: -files[name].size)
    share = here[hosts.position :: len(hosts.ranks(hosts.here))]
    valid, problems = set(), []
    for some in [share, *([name] for name in share)]:  # several at once are read faster
        try:
            checkpoint.verify(some)
            valid |= {*some}
            if some is share:
                break
        except (DamagedCheckpoint, OSError) as error:
            problems += [] if some is share else [str(error)]
    return valid, problems


def _create(output_dir: Path, found: _Published, manifest: bytes) -> None:
    """An empty directory for a checkpoint that other hosts have."""
    path = names.checkpoint_path(memory_dir.create(output_dir, found.name).checkpoints, found.step)
    filesystem.remove(path)
    filesystem.mkdir_nosync(path)
    filesystem.write_durably(path / names.MANIFEST, manifest)


def _manifest_data(path: Path) -> bytes | None:
    try:
        return (path / names.MANIFEST).read_bytes()
    except OSError:
        return None


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
