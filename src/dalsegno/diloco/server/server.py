"""DiLoCoServer: the global parameters of a run behind HTTP.

::

    with DiLoCoServer("runs/outer", num_workers=2) as server:
        print(server.address, server.token_file)
        server.wait()
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dalsegno.errors import ConfigurationError, NotRunning
from dalsegno.system import filesystem
from dalsegno.system.lock import DirectoryLock
from dalsegno.web.security import Limits, check_access, is_loopback, new_token, tls_context
from dalsegno.web.server import ServerThread, check_installed, listen

from .coordinator import Coordinator
from .files import Bell
from .outer import MakeOptimizer, nesterov
from .rounds import Rules
from .run import InitialWeights, OuterRun

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger("dalsegno")

TOKEN_FILE = "auth_token"


class DiLoCoServer:
    """Serves a DiLoCo run between :meth:`start` and :meth:`stop`, or inside ``with``.

    Everything that it has acknowledged is in ``folder``: killed and started again, it continues where it was.

    Args:
        folder: of the run; one that a server has used before continues its run.
        num_workers: workers that must have joined before the first round ends.
        outer_optimizer: makes any torch optimizer from the global parameters; None: SGD with Nesterov momentum 0.9 and
            learning rate 0.7. The same at each start.
        rules: everything else; None: synchronous, with the defaults of :class:`Rules`.
        host: address to listen on; the default is reached from this machine only.
        port: to listen on; 0: a free one.
        auth_token: bearer token that workers send; None: that of ``folder/auth_token``, a private file, made at the
            first start.
        disable_auth: answer without a token; only on addresses of this machine.
        certfile: TLS certificate in PEM; None: plain HTTP.
        keyfile: its key.
        from_checkpoint: weights with which a new run begins: a checkpoint, a run (its newest one), or safetensors of
            another program. None: the first worker brings them.

    Raises:
        ConfigurationError: for a value that cannot work, or if a library of the extra ``diloco`` is missing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        num_workers: int = 1,
        outer_optimizer: MakeOptimizer | None = None,
        rules: Rules | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        auth_token: str | None = None,
        disable_auth: bool = False,
        certfile: str | os.PathLike[str] | None = None,
        keyfile: str | os.PathLike[str] | None = None,
        from_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        check_installed()
        check_access(host, auth_token, disable_auth)
        if rules is not None and rules.num_workers != num_workers:
            raise ConfigurationError(f"DiLoCoServer: num_workers={num_workers}, rules has {rules.num_workers}")
        self.folder = Path(folder)
        self._rules = rules or Rules(num_workers)
        self._make_optimizer = outer_optimizer or nesterov()
        self._host, self._port = host, port
        self.token, self._disable_auth = auth_token, disable_auth
        """Bearer token, from :meth:`start` on; None if none is needed."""
        self._tls = tls_context(certfile, keyfile)
        self._from_checkpoint = from_checkpoint
        self._held = ExitStack()
        self._coordinator: Coordinator | None = None
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._bound: tuple[str, int] | None = None

    @property
    def token_file(self) -> Path:
        """Private file with the token."""
        return self.folder / TOKEN_FILE

    @property
    def address(self) -> str:
        """``http://HOST:PORT``.

        Raises:
            NotRunning: before :meth:`start`.
        """
        if self._bound is None:
            raise NotRunning("the DiLoCo server has not started; call start(), or use it in a with block")
        host, port = self._bound
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def coordinator(self) -> Coordinator:
        if self._coordinator is None:
            raise NotRunning("the DiLoCo server is not running")
        return self._coordinator

    def start(self) -> None:
        """Continue the run, and answer.

        Raises:
            Locked: if another server, or a training, uses the folder.
            OSError: if the port is in use.
            StateMismatch: if the folder is another kind of run's, or was trained by another optimizer.
            NotFound: if there are no weights in ``from_checkpoint``.
            DamagedCheckpoint: if they are damaged.
        """
        filesystem.make_directory(self.folder)
        with ExitStack() as held:
            held.enter_context(DirectoryLock(self.folder))
            if not self._disable_auth:
                self.token = self.token or self._stored_token()
            from .api import build_app  # starlette takes long to import

            bell = Bell()
            run = OuterRun(self.folder, self._make_optimizer, self._rules.save_every)
            begins_with = None if run.has_begun else self._from_checkpoint
            weights = None if begins_with is None else InitialWeights(Path(begins_with))

            def changed() -> None:
                if self._coordinator is not None and self._coordinator.failure is not None:
                    self._fail(self._coordinator.failure)
                bell.ring()

            coordinator = self._coordinator = Coordinator(run, self._rules, changed, weights)
            held.callback(self._close, coordinator)
            listener = listen(self._host, self._port)
            self._bound = self._host, listener.getsockname()[1]

            def build(stopping: asyncio.Event) -> ASGIApp:
                return build_app(coordinator, bell, stopping, host=self._host, token=self.token)

            server = ServerThread(
                listener,
                build,
                name="dalsegno-diloco",
                tls=self._tls,
                limits=Limits(connections=1024, request_timeout=60.0, large_bodies=True, write_timeout=60.0),
                on_failure=self._fail,
            )
            server.start()
            held.callback(server.stop)
            self._held = held.pop_all()
        logger.info("DiLoCo server: %s", self.address)
        if self.token is None:
            logger.warning("DiLoCo server: disable_auth=True: every user of this machine can change the run")
        if not is_loopback(self._host) and self._tls is None:
            logger.warning(
                "DiLoCo server: host=%r without certfile=: token and weights travel in the clear", self._host
            )

    def stop(self) -> None:
        """Answer no more, and save a checkpoint.

        Raises:
            SaveFailed: if it cannot be written. The journal has everything.
        """
        self._ended.set()
        self._held.close()

    def end(self) -> None:
        """Let :meth:`wait` return. From any thread."""
        self._ended.set()

    def wait(self) -> None:
        """Wait for :meth:`end`, :meth:`stop` or a failure.

        Raises:
            NotRunning: if the server cannot continue; what it has acknowledged is kept.
        """
        self._ended.wait()
        if self._failure is not None:
            raise NotRunning(
                f"the DiLoCo server failed: {self._failure}; start it again, it continues"
            ) from self._failure

    def _stored_token(self) -> str:
        try:
            return self.token_file.read_text("ascii").strip()
        except FileNotFoundError:
            token = new_token()
            filesystem.replace_durably(self.token_file, token.encode(), 0o600)
            return token

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._ended.set()

    def _close(self, coordinator: Coordinator) -> None:
        self._coordinator = None
        coordinator.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
