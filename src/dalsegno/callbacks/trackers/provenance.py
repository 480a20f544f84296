"""Provenance: which code a run was trained with."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TIMEOUT_S = 5


def code_versions() -> dict[str, str]:
    """Return versions of Python, torch and dalsegno, and the git commit of the script's repository, if it has one."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "dalsegno"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return versions | _git(Path(main).absolute().parent if main else Path.cwd())


def _git(directory: Path) -> dict[str, str]:
    commit = _output(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _output(directory, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, **({"git_changes": "yes" if changes else "no"} if changes is not None else {})}


def _output(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a file system that does not answer
        return None
    return done.stdout.strip()
