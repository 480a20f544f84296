"""Gate: checks who sends a request before any handler sees it.

In this order: the Host header (DNS rebinding: a web page whose name resolves to this machine), the Origin header (a web
page that posts to an address here), the bearer token. The token is compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import string
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SHORTEST_TOKEN = 16  # least length of a token that the user chose, in characters
HEADER_BYTES = 1 << 14  # size of a request's line and headers
REFUSALS = frozenset({401, 403, 421, 431})  # statuses of the answers by which a :class:`Gate` refuses

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "ip6-loopback"})
_TOKEN_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._~+/=")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a server's connections. The defaults suit short requests."""

    connections: int = 64
    """Connections at a time."""
    request_timeout: float = 10.0
    """Seconds for a request's headers to arrive, and for its body."""
    large_bodies: bool = False
    """Restart the time for a body with each part that arrives: it may take long, but not stand still."""
    refusal_pause: float = 0.25
    """Seconds before a request is refused, so that a program that asks in vain costs the training nothing."""
    write_timeout: float = 20.0
    """Seconds for which a client may leave 64 KiB of an answer unread, once the buffers of the system are full."""


DEFAULT_LIMITS = Limits()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to ``host``."""
    address = _address(host)
    return host.lower() in _LOOPBACK_NAMES if address is None else address.is_loopback


def new_token() -> str:
    """A token of 32 random bytes, in hexadecimal."""
    return secrets.token_hex(32)


def check_access(host: str, auth_token: str | None, disable_auth: bool) -> None:
    """Raises ConfigurationError for a token that is short or cannot be sent in a header; for a token together with
    ``disable_auth``; for ``disable_auth`` on an address that other machines reach."""
    if auth_token is not None:
        if disable_auth:
            raise ConfigurationError("auth_token= and disable_auth=True exclude each other; remove one of the two")
        is_sendable = isinstance(auth_token, str) and set(auth_token) <= _TOKEN_CHARACTERS
        if not is_sendable or len(auth_token) < SHORTEST_TOKEN:
            raise ConfigurationError(  # the value itself is a secret
                f"auth_token=…: must be a text of at least {SHORTEST_TOKEN} letters, digits or '-._~+/='; "
                "leave it out for one of 32 random bytes"
            )
    if disable_auth and not is_loopback(host):
        raise ConfigurationError(
            f"disable_auth=True with host={host!r}: anyone on the network could stop the job; remove one of the two"
        )


def tls_context(
    certfile: str | os.PathLike[str] | None, keyfile: str | os.PathLike[str] | None
) -> ssl.SSLContext | None:
    """None without both. Raises ConfigurationError for one of them alone, if the files are not a certificate and its
    key in PEM, or the key needs a password."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ConfigurationError("certfile= and keyfile= belong together; give both or none")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # without it, OpenSSL would ask on the terminal
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"certfile={str(certfile)!r}, keyfile={str(keyfile)!r}: {error}") from error
    return context


def trusting(certificate: str) -> ssl.SSLContext:
    """A context that trusts exactly this certificate, whatever name the server is reached by."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    return context


def read_certificate(path: Path) -> str:
    """Raises ConfigurationError if the file has no certificate in PEM."""
    text = path.read_text("ascii", "replace")
    try:
        trusting(text)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{path}: not a certificate in PEM ({error.reason})") from error
    return text


class Gate:
    """ASGI middleware that passes on the requests that may be answered.

    Args:
        host: address that the server is bound to.
        token: bearer token; None: none is needed.
        open_paths: answered without a token: pages without content of the run.
    """

    def __init__(self, app: ASGIApp, *, host: str, token: str | None, open_paths: Collection[str]) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._open_paths = frozenset(open_paths)
        self._host = host
        self._names = _LOOPBACK_NAMES | {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, error = refusal
        headers = {"WWW-Authenticate": 'Bearer realm="dalsegno"'} if status == 401 else {}
        await JSONResponse({"error": error, "detail": error}, status, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        address = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
        size = len(f"{scope['method']}  HTTP/1.1\r\n") + address
        if size + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"]) > HEADER_BYTES:
            return 431, f"a request's line and headers may have at most {HEADER_BYTES} bytes"
        hosts, origins, credentials = (_values(scope, name) for name in (b"host", b"origin", b"authorization"))
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            return 421, "the Host header does not name this server"
        if any(origin.lower() != f"{scope['scheme']}://{hosts[0]}".lower() for origin in origins):
            return 403, "requests of other web pages are refused"
        if self._token is not None and scope["path"] not in self._open_paths and not self._has_token(credentials):
            return 401, "authentication required"
        return None

    def _is_known(self, host: str) -> bool:
        """An address cannot be rebound. A name must be one of this server's, unless other machines reach it: by names
        that it does not know, and with a token."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.removeprefix("[").removesuffix("]").lower()
        return name in self._names or _address(name) is not None or not is_loopback(self._host)

    def _has_token(self, credentials: list[str]) -> bool:
        if self._token is None or len(credentials) != 1:
            return False
        scheme, _, given = credentials[0].partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
