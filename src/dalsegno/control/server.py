"""The server of one job."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from dalsegno.web.server import ServerThread

from .feed import LiveJob

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def control_server(
    listener: socket.socket,
    job: LiveJob,
    *,
    host: str,
    token: str | None,
    tls: ssl.SSLContext | None,
    on_failure: Callable[[BaseException], None],
) -> ServerThread:
    """A server that shows a job and takes its commands. ``host``: address that ``listener`` is bound to; ``token``: the
    bearer token, None if none is needed; the others are those of a :class:`ServerThread`."""

    def build(stopping: asyncio.Event) -> ASGIApp:
        from .api import build_app  # on the server's thread: starlette takes long to import

        return build_app(job, stopping, host=host, token=token)

    return ServerThread(listener, build, name="dalsegno-control", tls=tls, on_failure=on_failure)
