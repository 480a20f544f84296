"""A memory checkpoint whose files are in the memories of several hosts: it is found, verified where its files are, and
each host fetches those that it lacks.

A host may have its own ranks' files, copies of another host's, or none, if it replaces one that was lost. A directory
belongs to one leg. So what a host that comes back has kept of a dead timeline is found by no later leg.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dalsegno.checkpoint import checkpoint_dir, memory_dir, names
from dalsegno.checkpoint.file_reading import FileRecord, verify_files
from dalsegno.checkpoint.manifest import Checkpoint, Manifest
from dalsegno.distributed import collectives
from dalsegno.distributed.hosts import Hosts, Transfer, transfer
from dalsegno.errors import ConfigurationError, DamagedCheckpoint, RankFailed, StateMismatch
from dalsegno.system import filesystem
from dalsegno.system.machine import thread_count
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

    def is_here(self, name: str) -> bool:
        """Whether this host's directory contains the file."""
        return name in self.held[self.hosts.here]

    def require(self, names: Collection[str]) -> None:
        """Fetch those of the files ``names`` that this host lacks into its directory. Raises OSError or RankFailed on
        every rank if a file could not be fetched, for lack of memory for example."""
        if self.hosts.count == 1:
            return
        lacking = {*names} & self.manifest.files.keys() - self.held[self.hosts.here]
        wanted = collectives.gather(lacking, "files of other hosts")
        transfers = self.transfers(self.hosts.joined(wanted))
        if transfers and collectives.rank() == 0:
            size = format_bytes(sum(each.size for each in transfers))
            logger.info("%s: fetching %d files, %s, from other hosts", self.path.name, len(transfers), size)
        failure = transfer(transfers, self.path, collectives.background_group())

        def expect_all() -> None:
            if failure is not None:
                raise OSError(f"{self.path}: a file could not be fetched from another host: {failure}")

        collectives.run_on_all_ranks(expect_all)
        for each in transfers:
            self.held[self.hosts.of_rank[each.target]].add(each.name)

    def transfers(self, wanted: Sequence[Collection[str]]) -> list[Transfer]:
        """Those that bring each host the files it wants and lacks, from the nearest host before it that has the file,
        spread over the ranks of both; in an order in which hosts of even number send while the others receive, and the
        reverse."""
        hosts, found = self.hosts, list[tuple[tuple[int, int], Transfer]]()
        for host, names_wanted in enumerate(wanted):
            targets = hosts.ranks(host)
            for number, name in enumerate(sorted({*names_wanted} - self.held[host])):
                distance = next(each for each in range(1, hosts.count) if name in self.held[host - each])
                source_host = (host - distance) % hosts.count
                sources, record = hosts.ranks(source_host), self.manifest.files[name]
                source, target = sources[number % len(sources)], targets[number % len(targets)]
                order = distance, source_host % 2
                found.append((order, Transfer(name, record.size, record.xxh3, source, target)))
        return [each for _, each in sorted(found, key=lambda each: each[0])]


@dataclass(frozen=True, slots=True, order=True)
class _Published:
    """A published checkpoint. ``digest``: of its manifest, so that only parts of the same save are put together."""

    step: int
    name: str
    digest: str

    @property
    def path(self) -> Path:
        return names.checkpoint_path(memory_dir.root() / self.name / names.CHECKPOINTS, self.step)


def newest_in_memory(
    output_dir: Path, candidates: Candidates, *, after: int, hosts: Hosts
) -> MultiHostCheckpoint | None:
    """The newest checkpoint of a step greater than ``after`` that is valid and whole on all hosts together; None if
    there is none. Every host then has a directory for it, with all but the tensors that it may not need. One that is
    damaged, or not whole, is skipped with a warning. Collective."""
    of_hosts = hosts.run(lambda: _published(output_dir, candidates, after))
    for found in sorted({each for of_host in of_hosts for each in of_host}, reverse=True):
        try:
            return _assembled(output_dir, found, hosts, [found in of_host for of_host in of_hosts])
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
                found.append(_Published(step, name, xxhash.xxh3_128_hexdigest(data)))
    return found


def _assembled(output_dir: Path, found: _Published, hosts: Hosts, has_it: Sequence[bool]) -> MultiHostCheckpoint:
    """``has_it``: of each host. Raises on every rank if a file is damaged, cannot be read or is on no host, or if a
    host has no room for what it needs."""
    is_here, is_first = has_it[hosts.here], hosts.ranks(has_it.index(True))[0] == collectives.rank()
    sent = collectives.gather(_manifest_data(found.path) if is_first else None, "manifest in memory")
    data = next((each for each in sent if each is not None), None)
    if data is None:
        raise DamagedCheckpoint(f"step {found.step}: its manifest in memory is gone")
    manifest = Manifest.parse(data, Path(found.name))
    of_ranks = collectives.gather(_verified(found.path, manifest, hosts) if is_here else {}, "files in memory")
    held = hosts.joined([[name for name in each if each[name] is None] for each in of_ranks])
    if missing := sorted(manifest.files.keys() - set[str]().union(*held)):
        problem = next((problem for each in of_ranks for problem in each.values() if problem is not None), None)
        raise DamagedCheckpoint(
            problem or f"step {found.step}: {missing[0]} was in the memory of a lost host; no other host has a copy"
        )
    hosts.run(lambda: None if is_here else _create(output_dir, found, data))
    checkpoint = MultiHostCheckpoint(found.path, found.step, manifest, hosts, held)
    checkpoint.require([name for name in manifest.files if "/" not in name or name.endswith(".json")])
    return checkpoint


def _verified(path: Path, manifest: Manifest, hosts: Hosts) -> dict[str, str | None]:
    """This rank's share of the files in the directory, each with why it is not valid; None if it is."""
    files = manifest.files
    here = sorted((name for name in files if (path / name).exists()), key=lambda name: -files[name].size)
    share = here[hosts.position :: len(hosts.ranks(hosts.here))]
    with ThreadPoolExecutor(thread_count()) as readers:
        problems = readers.map(lambda name: _problem(path, name, files[name]), share)
        return dict(zip(share, problems, strict=True))


def _problem(path: Path, name: str, record: FileRecord) -> str | None:
    try:
        verify_files(path, [name], record)
    except (DamagedCheckpoint, OSError) as error:
        return str(error)
    return None


def _create(output_dir: Path, found: _Published, manifest: bytes) -> None:
    """An empty directory for a checkpoint that other hosts have."""
    memory_dir.create(output_dir, found.name)
    filesystem.remove(found.path)
    filesystem.mkdir_nosync(found.path)
    filesystem.write_durably(found.path / names.MANIFEST, manifest)


def _manifest_data(path: Path) -> bytes | None:
    try:
        return (path / names.MANIFEST).read_bytes()
    except OSError:
        return None
