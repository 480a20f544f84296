"""Where a command looks: a folder here."""

from __future__ import annotations

import argparse
from pathlib import Path


def place(text: str) -> Path:
    """The path; of a URL, the folder here in which its run is written first.

    Raises:
        ArgumentTypeError: if it is a URL, and there is no such folder.
    """
    from dalsegno.system.urls import cache_dir, is_url

    if not is_url(text):
        return Path(text)
    folder = cache_dir(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and this command reads folders: the run's own on this host, {folder}, is not there; "
            "name its local_dir, or copy the run here"
        )
    return folder
