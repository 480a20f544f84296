"""An S3 server on the loopback interface, whose requests can be watched, and which can be down for a while."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "runs"


class S3:
    """``watch`` is called with method, path and query of each request before it is answered."""

    def __init__(self) -> None:
        self._conditional = threading.Lock()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        server: Any = self._server._server
        self._app, server.app = server.app, self._answer
        host, port = self._server.get_host_and_port()
        self.address = f"http://{host}:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.reset()
        S3FileSystem.clear_instance_cache()  # instances are cached by arguments, without the environment
        keys = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=self.address, **keys).create_bucket(Bucket=BUCKET)

    def reset(self) -> None:
        """Remove the watcher, and answer requests again."""
        self.watch: Callable[[str, str, str], object] = lambda *_: None
        self.is_down = False

    def stop(self) -> None:
        self._server.stop()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.watch(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
        if self.is_down:
            start_response("403 Forbidden", [("Content-Length", "0"), ("Connection", "close")])
            return [b""]
        conditional = "HTTP_IF_NONE_MATCH" in environ  # S3 decides and stores in one step, moto in two
        with self._conditional if conditional else contextlib.nullcontext():
            answer: Iterable[bytes] = self._app(environ, start_response)
        return answer
