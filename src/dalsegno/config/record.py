"""config.json: the settings that a run is trained with."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalsegno.events.callback import Callback
from dalsegno.events.contexts import TrainBeginContext
from dalsegno.logs import RunFile
from dalsegno.logs.values import to_json
from dalsegno.system import filesystem

logger = logging.getLogger("dalsegno")

SINCE = "since_leg"
"""The first leg of ``run.json`` that was trained with these settings."""


class ConfigRecord(Callback):
    """Writes the resolved configuration to ``<output_dir>/config.json``, which ``dalsegno train`` accepts.

    A leg whose settings differ from the previous leg's moves the file to ``config.json.0001`` (``.0002``, …) first.
    """

    sets_control_flags = False
    ranks = "zero"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        path = ctx.args.directory / "config.json"
        settings = to_json(self._settings)
        former, since = _former(path)
        if former == settings:
            return
        if former is not None and _without_paths(former) != _without_paths(settings):
            since = None
            aside = filesystem.numbered(path.parent, path.name)
            filesystem.rename(path, aside)
            logger.warning("the configuration differs from the previous leg's, which is now in %s", aside)
        if since is None:
            run = RunFile(path.parent).load()
            since = run.legs[-1].leg if run and run.legs else 1
        content = {**settings, SINCE: since}
        filesystem.replace_durably(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _former(path: Path) -> tuple[dict[str, Any] | None, Any]:
    """The settings in the file and their first leg; (None, None) without a file, ({}, None) for an unreadable one."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, None
    except ValueError:
        return {}, None
    if not isinstance(content, dict):
        return {}, None
    return {key: value for key, value in content.items() if key != SINCE}, content.get(SINCE)


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the run's paths: a run that was moved has the same settings."""
    args = settings.get("args")
    if not isinstance(args, dict):
        return settings
    return {**settings, "args": {key: args[key] for key in args.keys() - {"output_dir", "local_dir"}}}
