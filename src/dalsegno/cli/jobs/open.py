"""Open the live page in the browser: of all jobs of this user on this machine, or of one, until Ctrl-C.

The page finds a restarted job again by itself. A private file hands the page's token to the browser: the token is
neither in an address that is sent, nor on a command line. With --remote, the page is that of the job's own server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from .arguments import add_job, remote_client


def describe(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--port", type=int, default=0, help="port of the page, on 127.0.0.1; default: a free one")
    parser.add_argument("--print", action="store_true", help="print the private file's address; open no browser")


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound, NotRunning: if the job that is named is not there, or dead.
        ConfigurationError: if ``--remote`` cannot be used.
        OSError: if the port is in use.
    """
    if arguments.remote:
        with remote_client(arguments) as client:
            client.status()  # the job answers, and the token is right
            fragment = {} if client.token is None else {"token": client.token}
            _show(_handover("open.html", client.base_url, fragment), arguments.print)
        return 0
    from dalsegno.control.client import resolve, running
    from dalsegno.control.hub import HOST, hub_server
    from dalsegno.web.security import new_token
    from dalsegno.web.server import listen

    run = {} if arguments.job is None else {"run": running(resolve(arguments.job)).output_dir}
    listener, token = listen(HOST, arguments.port), new_token()
    address = f"http://{HOST}:{listener.getsockname()[1]}"
    place = _handover(f"open-{os.getpid()}.html", address, {"token": token, **run})
    server = hub_server(listener, token)
    try:
        server.start()
        _show(place, arguments.print)
        print("Ctrl-C closes the page's server; the jobs keep running", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    finally:
        server.stop()
        place.unlink(missing_ok=True)
    return 0


def _handover(name: str, address: str, fragment: Mapping[str, str]) -> Path:
    """Write the file that leads the browser to ``address``, with a fragment that it does not send."""
    from dalsegno.control.jobs import write_private

    target = json.dumps(f"{address}/#{urlencode(fragment)}").replace("<", "\\u003c")
    return write_private(
        name,
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f"<title>dalsegno</title><script>location.replace({target})</script>\n",
    )


def _show(place: Path, only_print: bool) -> None:
    if only_print or not webbrowser.open(place.as_uri()):
        print(place.as_uri(), flush=True)
