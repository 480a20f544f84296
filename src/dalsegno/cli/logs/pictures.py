"""Output arguments of the commands that draw."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.analysis.plotting.figure import Picture

FORMATS = ("png", "svg", "pdf")


def add_output(parser: argparse.ArgumentParser, default: str | None) -> None:
    """``-o``, ``--force``, ``--format``. ``default``: file name without suffix; None: no picture unless asked for."""
    file = f"{default}.png" if default else "no picture"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"picture file; default: {file}")
    add_force(parser)
    parser.add_argument("--format", choices=FORMATS, help="picture format; default: by the suffix of FILE, else png")


def add_title(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--title", help="title above the picture; default: none")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")


def expect_free(path: Path, arguments: argparse.Namespace) -> Path:
    """Raises ConfigurationError if the file exists, without ``--force``."""
    if path.exists() and not arguments.force:
        raise ConfigurationError(f"{path} exists; --force overwrites it, -o names another file")
    return path


def output_path(arguments: argparse.Namespace, default: str) -> Path:
    """Path of the picture.

    Raises:
        ConfigurationError: if the file exists, without ``--force``; if its directory does not; if its suffix
            contradicts ``--format``, or is not one of :data:`FORMATS`.
    """
    wanted: str | None = arguments.format
    path: Path = arguments.output or Path(f"{default}.{wanted or 'png'}")
    suffix = path.suffix[1:].lower()
    if suffix not in FORMATS and wanted is not None:
        return expect_free(path.with_name(f"{path.name}.{wanted}"), arguments)
    if suffix not in FORMATS:
        raise ConfigurationError(f"-o {path}: must end in {', '.join(f'.{each}' for each in FORMATS)}")
    if wanted not in (None, suffix):
        raise ConfigurationError(f"-o {path} contradicts --format {wanted}; leave one of them out")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: there is no directory {path.parent}")
    return expect_free(path, arguments)


def write(picture: Picture, path: Path, *, quiet: bool) -> None:
    picture.save(path)
    if not quiet:
        print(f"wrote {path}")
