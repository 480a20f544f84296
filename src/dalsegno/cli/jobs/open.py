"""Open a job's live page in the browser.

The page gets the token from a private file on this machine: it is neither in an address that is sent, nor on a command
line.
"""

from __future__ import annotations

import argparse
import json
import webbrowser

from .arguments import add_job, client_of


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_job(parser)
    parser.add_argument("--print", action="store_true", help="print the private file's address; open no browser")


def run(arguments: argparse.Namespace) -> int:
    """Raises as :func:`client_of` does."""
    from dalsegno.control.jobs import write_handover

    with client_of(arguments) as client:
        job_id = client.job_id
        client.status()  # the job answers, and the token is right
        address = f"{client.base_url}/#" + (f"token={client.token}" if client.token else "")
    target = json.dumps(address).replace("<", "\\u003c")
    page = (
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f"<title>{job_id}</title><script>location.replace({target})</script>\n"
    )
    place = write_handover(job_id, page).as_uri()
    if arguments.print or not webbrowser.open(place):
        print(place)
    return 0
