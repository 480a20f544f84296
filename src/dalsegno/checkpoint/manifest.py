"""manifest.json: makes a directory a checkpoint. Records every file with its checksum, and is written last.

::

    {"format": 1, "step": 500, "world_size": 2, "torch": "2.13.0", "dalsegno": "0.1.0", "created": "2026-…Z",
     "metrics": {"eval_loss": 2.5}, "best": true,
     "finite": false,     only if NaN or infinity is in the weights
     "files": {"model/shard-00000.safetensors": {"size": 8192, "xxh3": "…32 hex digits…"}, …},
     "components": {"model": {"class": "torch.nn.Linear", "version": 1, "scope": "sharded"},
                    "callbacks.WandbLogger": {…, "scope": "replicated", "varies": ["run_id"]}, …},
     "xxh3": "…of all the above…"}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from dalsegno.checkpoint import names
from dalsegno.checkpoint.file_reading import FileRecord, parse_json, read_bytes, verify_files
from dalsegno.errors import DamagedCheckpoint, NotFound, StateMismatch
from dalsegno.policies.retention import CheckpointSummary
from dalsegno.stateful.annotations import check_types

FORMAT = 1

_READERS = 4  # files read at once: a network disk gives one reader a fraction of its bandwidth
_LARGEST = 1 << 28  # bytes; real manifests are far smaller
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)?")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class ComponentRecord:
    """A saved component: its class name, for people; the version of its state; ``scope`` as in Component, or
    ``"sharded"`` for model and optimizer; ``varies``: the fields of its state in which equal runs may differ."""

    class_name: str
    version: int
    scope: str
    varies: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of ``manifest.json``.

    ``metrics``: of the evaluation at its own step, empty if there was none; ``best``: no earlier one was
    better; ``finite``: its weights are not known to hold NaN or infinity.
    """

    step: int
    world_size: int
    torch: str
    dalsegno: str
    created: str
    metrics: Mapping[str, float]
    best: bool
    files: Mapping[str, FileRecord]
    components: Mapping[str, ComponentRecord]
    finite: bool = True
    data_ranks: Sequence[int] = ()
    """The data rank of each rank that saved; empty if each read its own data."""

    @property
    def summary(self) -> CheckpointSummary:
        return CheckpointSummary(self.step, self.metrics, self.best, self.finite)

    def to_bytes(self) -> bytes:
        content = {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "torch": self.torch,
            "dalsegno": self.dalsegno,
            "created": self.created,
            "metrics": {
                name: float(value) if math.isfinite(value) else repr(float(value))
                for name, value in self.metrics.items()
                if hasattr(value, "__float__")  # others, such as curves, are only in the log
            },
            "best": self.best,
            **({} if self.finite else {"finite": False}),
            **({"data_ranks": [*self.data_ranks]} if self.data_ranks else {}),
            "files": {name: {"size": file.size, "xxh3": file.xxh3} for name, file in self.files.items()},
            "components": {
                key: {"class": each.class_name, "version": each.version, "scope": each.scope}
                | ({"varies": each.varies} if each.varies else {})
                for key, each in self.components.items()
            },
        }
        return json.dumps(content | {"xxh3": _checksum_of(content)}, indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of the checkpoint in ``directory``; the files that it names are not verified. Raises
        StateMismatch if it is valid, but of a format that only a newer dalsegno reads."""
        path = directory / names.MANIFEST
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise DamagedCheckpoint(f"{path}: is larger than a manifest can be")
        return cls.parse(read_bytes(path), path)

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Manifest:
        content = parse_json(data, path)
        try:
            _expect(type(content) is dict, "not an object")
            claimed = content.pop("xxh3")
            _expect(claimed == _checksum_of(content), "its content does not match its checksum")
            if type(content["format"]) is not int or content["format"] > FORMAT:
                raise StateMismatch(
                    f"{path}: has format {content['format']!r}; this version of dalsegno reads up to {FORMAT}"
                )
            return cls._parse(content)
        except StateMismatch:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise DamagedCheckpoint(f"{path}: {reason}") from error

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        manifest = cls(
            step=_whole(content["step"], "step"),
            world_size=_whole(content["world_size"], "world_size"),
            torch=_text(content["torch"]),
            dalsegno=_text(content["dalsegno"]),
            created=_text(content["created"]),
            metrics={name: float(value) for name, value in content["metrics"].items()},
            best=content["best"] is True,
            finite=content.get("finite") is not False,
            files={name: _file_record(name, entry) for name, entry in content["files"].items()},
            components={key: _component_record(entry) for key, entry in content["components"].items()},
            data_ranks=[_whole(number, "data_ranks") for number in content.get("data_ranks", ())],
        )
        if manifest.data_ranks:
            numbers = sorted({*manifest.data_ranks})
            is_whole = numbers == [*range(len(numbers))] and len(manifest.data_ranks) == manifest.world_size
            _expect(is_whole, "data_ranks that do not fit the ranks")
        _expect(1 <= manifest.world_size <= 1 << 24, f"a world_size of {manifest.world_size}")
        return manifest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, in the directory ``path``."""

    path: Path
    manifest: Manifest

    @classmethod
    @check_types
    def open(cls, path: Path) -> Checkpoint:
        """Read the manifest only, which must be of the step in the directory's name, if that has one. Raises NotFound
        if ``path`` is not a directory."""
        if not path.is_dir():
            raise NotFound(f"{path}: there is no such checkpoint")
        manifest = Manifest.read(path)
        if names.step_of(path) not in (None, manifest.step):
            raise DamagedCheckpoint(f"{path}: its manifest is that of step {manifest.step}")
        return cls(path, manifest)

    @property
    def step(self) -> int:
        return self.manifest.step

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether ``path`` contains a manifest, valid or not."""
        return (path / names.MANIFEST).exists()

    def verify(self, names: Iterable[str]) -> None:
        """Read the files ``names``, several at once, and compare them with the manifest. Raises DamagedCheckpoint if
        one differs, or is not a regular file; OSError if one cannot be read."""
        same: dict[FileRecord, list[str]] = {}
        for name in names:
            same.setdefault(self.manifest.files[name], []).append(name)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as readers:
            for _ in readers.map(lambda record: verify_files(self.path, same[record], record), same):
                pass

    def require(self, names: Collection[str]) -> None:
        """Make the files ``names`` readable for this rank: those on disk are. Collective; each rank passes its own."""

    def is_here(self, name: str) -> bool:
        """Whether the file ``name`` is readable for this rank already."""
        return True

    def file(self, name: str) -> Path:
        """Path of a file that the manifest names, so that :meth:`verify` has covered it."""
        if name not in self.manifest.files:
            raise DamagedCheckpoint(f"{self.path}: the manifest does not name {name}")
        return self.path / name


def is_safe_name(name: str) -> bool:
    """Whether a file of a checkpoint can have that name."""
    return _SAFE_NAME.fullmatch(name) is not None


def _checksum_of(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _expect(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _whole(value: Any, name: str) -> int:
    _expect(type(value) is int and 0 <= value < 1 << 62, f"{name} is {value!r}")
    return int(value)


def _text(value: Any) -> str:
    _expect(type(value) is str, f"{value!r} instead of a text")
    return str(value)


def _file_record(name: str, entry: Any) -> FileRecord:
    _expect(is_safe_name(name), f"{name!r} is not a file name that a checkpoint can have")
    _expect(_CHECKSUM.fullmatch(_text(entry["xxh3"])) is not None, f"{name} has an invalid checksum")
    return FileRecord(_whole(entry["size"], f"the size of {name}"), entry["xxh3"])


def _component_record(entry: Any) -> ComponentRecord:
    scope = _text(entry["scope"])
    _expect(scope in ("replicated", "per_rank", "sharded"), f"{scope!r} is not a scope")
    varies = tuple(_text(name) for name in entry.get("varies", ()))
    return ComponentRecord(_text(entry["class"]), _whole(entry["version"], "a version"), scope, varies)
