"""Arguments shared by the commands."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_server(parser: argparse.ArgumentParser) -> None:
    """How to reach the server; what is not given is taken from the environment."""
    parser.add_argument("--server", metavar="HOST:PORT", help="or https://HOST:PORT (default: $DILOCO_SERVER)")
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="the server's FOLDER/auth_token (default: $DILOCO_TOKEN)"
    )
    parser.add_argument(
        "--certificate", metavar="FILE", type=Path, help="the server's certificate (default: $DILOCO_CERTIFICATE)"
    )


def environment_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables that stand for these arguments."""
    given = {
        "DILOCO_SERVER": arguments.server,
        "DILOCO_TOKEN_FILE": arguments.token_file,
        "DILOCO_CERTIFICATE": arguments.certificate,
    }
    return {name: str(value) for name, value in given.items() if value is not None}
