"""config.json: with which settings a run is trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalsegno import files
from dalsegno.callback import Callback
from dalsegno.contexts import TrainBeginContext
from dalsegno.logs import RunFile
from dalsegno.logs.values import to_json

logger = logging.getLogger("dalsegno")

SINCE = "since_leg"
"""The first leg of ``run.json`` that was trained with these settings."""


class ConfigRecord(Callback):
    """Keeps the resolved configuration in ``<output_dir>/config.json``, which can be trained from as it is.

    A leg with other settings than the one before moves the file to ``config.json.0001`` and so on, and writes its own.
    """

    makes_wishes = False
    ranks = "zero"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        path = ctx.args.directory / "config.json"
        settings = to_json(self._settings)
        former = _former(path)
        if former == settings:
            return
        if former is not None:
            aside = files.numbered(path.parent, path.name)
            files.rename(path, aside)
            logger.warning("the configuration is not that of the last leg, which is now in %s", aside)
        run = RunFile(path.parent).load()
        content = {**settings, SINCE: run.legs[-1].leg if run and run.legs else 1}
        files.replace_durably(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _former(path: Path) -> Any:
    """The settings in the file; None where there is none. What cannot be read is other settings."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return {key: value for key, value in content.items() if key != SINCE} if isinstance(content, dict) else {}
