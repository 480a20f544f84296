"""Arguments of commands of all groups: ``--json``, and the local path of a run that is a path or a URL."""

from __future__ import annotations

import argparse
from pathlib import Path


def place(text: str) -> Path:
    """The path; for a URL, the local directory in which this host writes its run.

    Raises:
        ArgumentTypeError: if it is a URL without such a directory.
    """
    from dalsegno.system.urls import cache_dir, is_url

    if not is_url(text):
        return Path(text)
    folder = cache_dir(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and this command reads local directories; the run's directory on this host, {folder}, "
            "does not exist: pass its local_dir, or copy the run to this host"
        )
    return folder


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
