"""A real S3 server, and a prefix on it for each test."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from checkpoint.remote.s3 import BUCKET, S3


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    server = S3()
    yield server
    server.stop()


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, without a watcher; this process and its children use it."""
    server.reset()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def url(s3: S3, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{re.sub(r'[^a-z0-9_]+', '-', request.node.name).strip('-')}"
