"""Classes of other libraries and what becomes of each here: each folder beside this file may list some in ``tried.py``.

``docs/coming-from/libraries.py`` writes them into tables; ``test_tried.py`` shows that each line is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.testing import compare_runs, tiny_regression_data
from support.crash import Crash
from support.small import small_trainer

KILLED = (5, 9)
"""Steps after which a leg of the killed run ends; it saves every fourth, and has twelve."""

HOUSE = {"checkpoints", "logs", "witness", "run.json", ".lock"}
"""What a run itself has in its directory."""


def trainer(output_dir: Path, *callbacks: Any, **settings: Any) -> ds.Trainer:
    """Trains twelve steps, with a record of each."""
    given = {"max_steps": 12, "logging_steps": 1, "eval_steps": 4, "save_steps": 4, **settings}
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    return small_trainer(output_dir, *callbacks, JsonLogger(), **{"parts": parts, **given})


@dataclass(frozen=True)
class Tried:
    """A class of another library. It is held where neither ``refused`` nor ``differs`` says otherwise."""

    name: str
    library: str
    """The distribution whose version is tried; in parentheses, one whose documented interface the tests' class has."""
    make: Callable[[], Any]
    refused: str = ""
    """What to use instead, in the words of the error."""
    differs: str = ""
    """What a resumed run has otherwise, and why."""
    what: tuple[str, ...] = ()
    """The components, logs and files of the class's own that differ; the first of them."""
    remark: str = ""
    """What a user of the class should know."""
    trainer: Callable[..., ds.Trainer] = trainer

    def differences(self, folder: Path) -> dict[str, str]:
        """Train without interruption, and killed and resumed; return what differs, and how."""
        whole, killed = folder / "whole", folder / "killed"
        self.trainer(whole, self.make()).train()
        for step in (*KILLED, -1):
            try:
                self.trainer(killed, self.make(), Crash(step)).train()
            except RuntimeError as error:
                assert "illegal memory access" in str(error)
            else:
                break
        rows = {row.what: row.difference for row in compare_runs(whole, killed).rows if row.difference}
        first, second = own_files(whole), own_files(killed)
        return rows | {name: "bytes" for name in first | second if first.get(name) != second.get(name)}


def own_files(output_dir: Path) -> dict[str, bytes]:
    """The files that a class writes itself, but logs in JSON, which are compared by their records."""
    paths = {path.relative_to(output_dir): path for path in output_dir.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in paths.items()
        if name.parts[0] not in HOUSE and not name.suffix.startswith(".json")
    }
