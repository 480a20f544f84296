"""Arguments shared by the commands."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.arguments import add_json as add_json
from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.control.client import JobClient

TOKEN_VARIABLE = "DALSEGNO_TOKEN"


def add_job(parser: argparse.ArgumentParser) -> None:
    """``JOB`` as ``arguments.job``, and how to reach it elsewhere."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="id, beginning of an id, or output_dir")
    add_remote(parser)


def add_remote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remote",
        metavar="HOST:PORT",
        help=f"a job on another machine, by its server's address; its token is read from ${TOKEN_VARIABLE}, from "
        "--token-file, or from the terminal",
    )
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="file with the token of --remote")
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="certificate of --remote in PEM; implies TLS")


def remote_client(arguments: argparse.Namespace) -> JobClient:
    """The client of the server at ``--remote``.

    Raises:
        ConfigurationError: if the address has no port, or there is no token.
    """
    from dalsegno.control.client import JobClient
    from dalsegno.web.security import read_certificate

    host, colon, port = arguments.remote.rpartition(":")
    if not colon or not port.isdecimal() or not host or "/" in host:
        raise ConfigurationError(f"--remote {arguments.remote}: needs HOST:PORT, such as node-7:8900")
    certificate = read_certificate(arguments.certificate) if arguments.certificate else None
    scheme = "http" if certificate is None else "https"
    client = JobClient(f"{scheme}://{arguments.remote}", token=_token(arguments), certificate=certificate)
    name = getattr(arguments, "job", None)
    if name is not None and not client.job_id.startswith(name):
        raise ConfigurationError(f"--remote {arguments.remote}: its job is {client.job_id}, not {name}")
    return client


def client_of(arguments: argparse.Namespace) -> JobClient:
    """The client of the job that the arguments name.

    Raises:
        NotFound: if there is no such job, or it has no server.
        NotRunning: if it is dead.
        ConfigurationError: if no job is named, or ``--remote`` cannot be used.
    """
    from dalsegno.control.client import JobClient, resolve

    return remote_client(arguments) if arguments.remote else JobClient.of(resolve(required_job(arguments)))


def required_job(arguments: argparse.Namespace) -> str:
    """Raises ConfigurationError if no job is named."""
    if arguments.job is None:
        raise ConfigurationError("name a JOB: an id from 'dalsegno jobs list', or an output_dir")
    job: str = arguments.job
    return job


def _token(arguments: argparse.Namespace) -> str | None:
    """The token; None if an empty line is entered, for a server without one."""
    if arguments.token_file is not None:
        token = arguments.token_file.read_text("ascii", "replace").strip()
    elif TOKEN_VARIABLE in os.environ:
        token = os.environ[TOKEN_VARIABLE].strip()
    elif sys.stdin.isatty():
        from getpass import getpass

        token = getpass("token: ").strip()
    else:
        token = ""
    return token or None
