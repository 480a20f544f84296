"""Answers in JSON, and requests' bodies, of bounded size."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dalsegno.logs.values import to_json

LARGEST_BODY = 1 << 16  # bytes of a request's body

T = TypeVar("T")


async def off_loop(call: Callable[[], T]) -> T:
    """Run a blocking call on a daemon thread. (Python joins the threads of an executor when the process ends.)"""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a request that is cut off does not cancel the call

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="dalsegno-control-call", daemon=True).start()
    return await asyncio.wrap_future(future)


async def first_of(*waits: Coroutine[Any, Any, Any], timeout: float) -> None:
    """Wait until one of them ends, at most ``timeout`` seconds, and cancel the others."""
    tasks = [asyncio.create_task(each) for each in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Answer(Response):
    """JSON in ASCII, with non-finite numbers as strings."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(to_json(content), allow_nan=False).encode()


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Answer({"error": error.detail, "detail": error.detail}, error.status_code, error.headers)


async def read_body(request: Request, largest: int = LARGEST_BODY) -> bytes:
    """The body. HTTPException: it has more than ``largest`` bytes, or is incomplete."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > largest:
                raise HTTPException(413, f"a body may have at most {largest} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    return bytes(body)


async def read_json(request: Request, largest: int = LARGEST_BODY) -> Mapping[str, Any]:
    """Raises HTTPException if the body is not an object in JSON, has more than ``largest`` bytes, or is incomplete."""
    body = await read_body(request, largest)
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {shorten(str(error))}") from error
    if not isinstance(content, dict):
        raise HTTPException(400, 'the body must be an object: {"name": value, …}')
    return content


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def shorten(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
