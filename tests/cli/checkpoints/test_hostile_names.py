"""Names in a checkpoint that nobody has verified: they are printed, and do not steer the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from checkpoint.parts import Saved
from dalsegno.checkpoint import CheckpointManager
from dalsegno.checkpoint.manifest import _checksum_of
from dalsegno.cli import main

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m\nstep 5, all is well"


@pytest.mark.parametrize("command", ["list", "verify", "show", "prune --dry-run --keep-latest 1"])
def test_control_characters_are_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    manager = CheckpointManager(tmp_path)
    Saved().save(manager, 1, metrics={"loss": 1.0})
    path = manager.path_of(1) / "manifest.json"
    content = json.loads(path.read_bytes())
    del content["xxh3"]
    content |= {"created": EVIL, "torch": EVIL, "dalsegno": EVIL, "metrics": {EVIL: 1.0}}
    content["components"][EVIL] = content["components"]["callbacks.Notes"] | {"class": EVIL}
    path.write_text(json.dumps(content | {"xxh3": _checksum_of(content)}))
    name, *options = command.split()
    assert main(["checkpoints", name, os.fspath(tmp_path), *options]) in (0, None)
    printed = "".join(capsys.readouterr())
    assert printed and not [each for each in printed if not each.isprintable() and each != "\n"]
    assert "\nstep 5" not in printed
