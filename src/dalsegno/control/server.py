"""ControlServer: the server of one job."""

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


class ControlServer(ServerThread):
    """Shows a job and takes its commands.

    Args:
        listener: a listening socket, which the server closes.
        host: address that the socket is bound to.
        token: bearer token; None: none is needed.
        tls: None: plain HTTP.
        on_failure: called on the server's thread if the server ends by an error.
    """

    def __init__(
        self,
        listener: socket.socket,
        job: LiveJob,
        *,
        host: str,
        token: str | None,
        tls: ssl.SSLContext | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        def build(stopping: asyncio.Event) -> ASGIApp:
            from .api import build_app  # on the server's thread: starlette takes long to import

            return build_app(job, stopping, host=host, token=token)

        super().__init__(listener, build, name="dalsegno-control", tls=tls, on_failure=on_failure)
