"""What describes a run to a tracker: settings without secrets, versions of the code, model cards of checkpoints."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dalsegno.events.contexts import SaveContext
from dalsegno.logs.values import to_json

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(api_?key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST = 6
"""Shorter values of environment variables are not searched for: they occur by chance."""
_TIMEOUT_S = 5


def without_secrets(text: str) -> str:
    """Hide user and password in URLs, and the values of environment variables that are named like secrets."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the values hidden that are secrets, by their names or by :func:`without_secrets`."""
    return {
        name: HIDDEN if isinstance(value, str) and value and _SECRET_NAME.search(str(name)) else _public(value)
        for name, value in settings.items()
    }


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public(value)
    if isinstance(value, (list, tuple)):
        return [_public(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def code_versions() -> dict[str, str]:
    """Return versions of Python, torch and dalsegno, and the git commit of the script's repository, if it has one."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "dalsegno"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return versions | _git_commit(Path(main).absolute().parent if main else Path.cwd())


def _git_commit(directory: Path) -> dict[str, str]:
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, **({"git_changes": "yes" if changes else "no"} if changes is not None else {})}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a file system that does not answer
        return None
    return done.stdout.strip()


def model_card(ctx: SaveContext) -> str:
    """Return step, best metric, newest numbers and settings of the checkpoint that was saved. No wall-clock times."""
    state = ctx.state
    facts: dict[str, Any] = {
        "checkpoint": ctx.path.name,
        "step": ctx.step,
        "epoch": round(state.epoch, 4),
        "best so far": "yes" if ctx.is_best else "no",
        "best metric": state.best_metric,
        "tokens": state.num_input_tokens_seen,
        "model": type(ctx.model).__name__,
    }
    settings = public(to_json(ctx.args.to_dict()))
    lines = [f"# {ctx.args.run_name or ctx.args.directory.name}, step {ctx.step}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    lines += ["", "| setting | value |", "|---|---|"]
    lines += [f"| `{name}` | `{value}` |" for name, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"
