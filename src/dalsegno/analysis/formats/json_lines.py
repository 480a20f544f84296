"""JSON, a record a line: dalsegno's own logs, Forgather's ``trainer_logs.json``, and those of many other programs.

Lines may be those of an array; its brackets may be missing, its last record broken off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dalsegno.errors import ConfigurationError
from dalsegno.logs import ReadReport, read_records
from dalsegno.logs.values import Record

from .naming import Naming, kind_of
from .source import Skipped, Source


class JsonLines(Source):
    """
    Args:
        step_key: the name of the step in each record, where it is an unusual one.

    Raises:
        ConfigurationError: while it is read, if no record has a step.
    """

    program = "JSON lines"

    def __init__(self, path: Path, step_key: str | None = None) -> None:
        super().__init__(path)
        self._step_key = step_key

    def records(self, skipped: Skipped) -> Iterator[Record]:
        report = ReadReport()
        naming: Naming | None = None
        told = 0
        for record in read_records(self.path, report):
            for sentence in report.skipped[told:]:
                skipped.note(sentence)
            told = len(report.skipped)
            naming = naming or Naming.of(record, self._step_key)
            if naming is None:
                if record.get("kind") != "header":
                    raise ConfigurationError(_no_step(self.path, record, self._step_key))
                yield record
                continue
            renames = naming.renames()
            renamed = {renames.get(name, name): value for name, value in record.items()} if renames else record
            if "kind" not in renamed:
                renamed = {**renamed, "kind": kind_of(renamed)}
            yield renamed
        for sentence in report.skipped[told:]:
            skipped.note(sentence)


def _no_step(path: Path, record: Record, step_key: str | None) -> str:
    names = ", ".join(record) or "nothing"
    wanted = f"no number under {step_key!r}" if step_key else "nothing that looks like a step"
    return f"{path}: {wanted} in its first record, which has {names}; name the step with step_key= (--step-key)"
