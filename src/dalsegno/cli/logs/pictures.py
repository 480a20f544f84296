"""Arguments of the commands that draw, and where their pictures go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.analysis.plotting.figure import Picture

FORMATS = ("png", "svg", "pdf")


def add_output(parser: argparse.ArgumentParser, default: str | None) -> None:
    """``-o`` and ``--format``; ``default`` is the file's name without suffix, None: nothing is written unless asked."""
    told = f"default: {default}.png" if default else "default: none is written"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the picture; {told}")
    add_force(parser)
    parser.add_argument("--format", choices=FORMATS, help="of the picture, where the file's name does not say it")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def expect_free(path: Path, arguments: argparse.Namespace) -> Path:
    """
    Raises:
        ConfigurationError: if there is such a file, and no ``--force``.
    """
    if path.exists() and not arguments.force:
        raise ConfigurationError(f"{path} is there already; --force replaces it, -o names another file")
    return path


def output_path(arguments: argparse.Namespace, default: str) -> Path:
    """Where the picture goes.

    Raises:
        ConfigurationError: if it is there already and ``--force`` is not given; if the file's name says another format
            than ``--format``, or one that cannot be written.
    """
    wished: str | None = arguments.format
    path: Path = arguments.output or Path(f"{default}.{wished or 'png'}")
    suffix = path.suffix[1:].lower()
    if suffix not in FORMATS and wished is not None:
        return expect_free(path.with_name(f"{path.name}.{wished}"), arguments)
    if suffix not in FORMATS:
        raise ConfigurationError(f"-o {path}: pictures end in {', '.join(f'.{each}' for each in FORMATS)}")
    if wished not in (None, suffix):
        raise ConfigurationError(f"-o {path} and --format {wished} do not fit; leave one of them out")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"-o {path}: there is no folder {path.parent}")
    return expect_free(path, arguments)


def write(picture: Picture, path: Path, *, quiet: bool) -> None:
    picture.save(path)
    if not quiet:
        print(f"wrote {path}")
