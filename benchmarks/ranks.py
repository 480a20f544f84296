"""What grows with the ranks: a checkpoint of 1,024 ranks and of 16,384, published, resumed from, listed and deleted.

Each rank has two files of tensors and two of its own state, without their bytes. What rank 0 does alone, it does here
alone; what each rank does, one rank does here. Linear is 16 times.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from dalsegno.checkpoint import Checkpoint, CheckpointManager, Manifest, ModelState, checkpoint_dir, names
from dalsegno.checkpoint.file_reading import FileRecord, share_of_rank
from dalsegno.checkpoint.listing import Summaries

from .row import Row, duration
from .timing import Figure, figure

FEW, MANY = 1_024, 16_384
ROUNDS = 3

SMALL = {"few": 2, "many": 4, "rounds": 1}
"""Of ``run``: with these it takes a second or so, and measures nothing."""


def run(few: int = FEW, many: int = MANY, rounds: int = ROUNDS) -> list[Row]:
    """Medians of the rounds."""
    of_few, of_many = _measured(few, rounds), _measured(many, rounds)
    linear = many / few
    rows = []
    for what, seconds in of_many.items():
        ratio = seconds / of_few[what]
        rows.append(
            Row(
                f"{what}, {many:,} ranks",
                duration(seconds),
                f"{few:,} ranks: {duration(of_few[what])}",
                f"{ratio:.1f} ×",
                f"≤ {linear:.0f} ×",
                ratio <= linear,
                seconds.spread,
            )
        )
    return rows


def _measured(world_size: int, rounds: int) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=Path.cwd()) as temporary:
        directory = Path(temporary) / names.CHECKPOINTS
        template = _manifest(Path(temporary) / "template", world_size)
        seconds: dict[str, list[float]] = {}

        def timed(what: str, work: Callable[[], object]) -> None:
            began = time.perf_counter()
            work()
            seconds.setdefault(what, []).append(time.perf_counter() - began)

        summaries = Summaries()
        for step in range(1, rounds + 1):
            manifest = replace(template, step=step)
            path = names.checkpoint_path(directory, step)
            partial = names.partial_path(path)
            _write_files(partial, manifest)
            timed(
                "rank 0 publishes a checkpoint", lambda m=manifest, a=partial, b=path: checkpoint_dir.publish(m, a, b)
            )
            summaries.of(directory)
            summaries.of(directory)
            timed("rank 0 looks for checkpoints to delete", lambda: summaries.of(directory))
            checkpoint = Checkpoint.open(path)
            timed("rank 0 opens a checkpoint to resume from", lambda p=path: Checkpoint.open(p))
            sent = pickle.dumps(checkpoint)
            timed("each rank reads rank 0's manifest", lambda data=sent: pickle.loads(data))
            timed(
                "each rank chooses the files that it verifies",
                lambda files=manifest.files: share_of_rank(files, world_size - 1, world_size),
            )
            timed("rank 0 deletes a checkpoint", lambda p=path: checkpoint_dir.delete(p))
    return {what: figure(each) for what, each in seconds.items()}


def _manifest(folder: Path, world_size: int) -> Manifest:
    """That of a checkpoint of so many ranks."""
    CheckpointManager(folder).save(1, [ModelState(nn.Linear(8, 8))], [])
    saved = Manifest.read(names.checkpoint_path(folder / names.CHECKPOINTS, 1))
    files = [name for rank in range(world_size) for name in _files_of(rank)]
    records = {name: FileRecord(0, f"{number:032x}") for number, name in enumerate(files)}
    return replace(saved, world_size=world_size, files=records)


def _files_of(rank: int) -> list[str]:
    sidecar = names.rank_sidecar(rank)
    tensors = [names.shard(component, rank) for component in ("model", "optimizer")]
    return [*tensors, names.sidecar_states(sidecar), names.sidecar_tensors(sidecar)]


def _write_files(partial: Path, manifest: Manifest) -> None:
    for folder in {(partial / name).parent for name in manifest.files}:
        folder.mkdir(parents=True, exist_ok=True)
    for name in manifest.files:
        (partial / name).touch()
