"""DiLoCoCallback: makes a run a worker of a DiLoCo server."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import xxhash
from torch import Tensor, nn

from dalsegno.diloco.worker.exchange import WorkerState
from dalsegno.diloco.worker.options import WorkerOptions
from dalsegno.diloco.worker.worker import DiLoCoWorker
from dalsegno.distributed import collectives
from dalsegno.events import FlaglessCallback, contexts


class DiLoCoCallback(FlaglessCallback):
    """Makes this run a worker of a DiLoCo server: machines that train one model and communicate rarely.

    ::

        DiLoCoCallback("https://outer.example:8512", sync_every=500)  # or DILOCO_SERVER=https://outer.example:8512

    Every ``sync_every`` steps the run sends the change of its parameters and continues with the server's: see
    docs/guides/diloco.md. Without an address the callback does nothing. An argument that has its default is taken from
    the environment: ``DILOCO_SERVER``, ``DILOCO_SYNC_EVERY`` and so on; the server's token from ``DILOCO_TOKEN``, or
    the file ``DILOCO_TOKEN_FILE``. Each synchronization is a record of kind ``sync`` in the run's log.

    Args:
        server_addr: ``HOST:PORT``, or ``https://HOST:PORT``.
        sync_every: local steps between two synchronizations.
        worker_id: the worker's name, the same in all its legs; None: made from the host and ``output_dir``.
        bf16_comm: send changes of parameters as bfloat16, not float32.
        dylu: let the server choose ``sync_every`` by the worker's speed.
        heartbeat_interval: seconds between two signs of life.
        num_fragments: synchronize the model in this many parts, one after the other.
        timeout: seconds to wait for the other workers, and for each part of a transfer.
        max_sync_retries: further attempts of a synchronization, after 2, 4, 8 … seconds; then it is skipped.
        overlap_steps: local steps during which a submission travels; 0: training waits for it.
        mixing_factor: with ``overlap_steps``: weight of the run's own parameters beside the result.
        int8_comm: send changes of parameters as int8 with a scale per 256 elements, half the bytes of bfloat16; what
            this loses is sent with the next ones.
    """

    background_safe = False
    state_varies = ("run_id", "worker_id")
    state_schema = WorkerState | None

    def __init__(
        self,
        server_addr: str | None = None,
        sync_every: int = 500,
        worker_id: str | None = None,
        bf16_comm: bool = True,
        dylu: bool = False,
        heartbeat_interval: float = 30,
        num_fragments: int = 1,
        timeout: float = 600,
        max_sync_retries: int = 3,
        int8_comm: bool = False,
        overlap_steps: int = 0,
        mixing_factor: float = 0.5,
    ) -> None:
        self._options = WorkerOptions(
            server_addr=server_addr or None,
            sync_every=sync_every,
            worker_id=worker_id,
            bf16_comm=bf16_comm,
            dylu=dylu,
            heartbeat_interval=heartbeat_interval,
            num_fragments=num_fragments,
            timeout=timeout,
            max_sync_retries=max_sync_retries,
            int8_comm=int8_comm,
            overlap_steps=overlap_steps,
            mixing_factor=mixing_factor,
        ).with_environment()
        self._worker: DiLoCoWorker | None = None
        self._restored: WorkerState | None = None
        self._samples_seen = 0
        self._counts: dict[int, int] = {}  # by step of a checkpoint that is not on disk yet, or in memory only

    @property
    def active(self) -> bool:
        """Whether it has a server's address."""
        return self._options.server_addr is not None

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        if not self.active:
            return
        worker = self._worker_of(ctx.model)
        if self._options.worker_id is None:
            worker.worker_id = collectives.broadcast(_default_id(ctx), "the name of the DiLoCo worker")
        worker.restore(self._restored)
        self._samples_seen = ctx.state.samples_seen
        worker.join()

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        worker = self._worker
        if worker is None:
            return
        samples, self._samples_seen = ctx.samples_seen - self._samples_seen, ctx.samples_seen
        if worker.count_step(samples):
            (loss,) = ctx.layout.sum_floats([ctx.loss], "the loss that DiLoCo reports")
            done = worker.synchronize(loss)
            if done is not None:
                ctx.trainer.log(done.to_record(), "sync")

    def on_before_save(self, ctx: contexts.BeforeSaveContext) -> None:
        if self._worker is not None:
            self._worker.settle()
            self._counts[ctx.step] = self._worker.count

    def on_save(self, ctx: contexts.SaveContext) -> None:
        if self._worker is not None and ctx.step in self._counts:
            self._worker.note_saved(self._counts[ctx.step])
            self._counts = {step: count for step, count in self._counts.items() if step > ctx.step}

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        if self._worker is not None:
            self._samples_seen = ctx.state.samples_seen
            self._worker.restore(self._restored)
            self._worker.join()

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        if self._worker is not None:
            self._restored = self._worker.rest
            self._worker.leave()

    def sharded_state(self, model: nn.Module) -> tuple[dict[str, Tensor], Any]:
        """Return the global parameters that the local steps began with, by name, what quantization has lost, and the
        counts."""
        if not self.active:
            return {}, self._restored
        worker = self._worker_of(model)
        return worker.tensors, worker.rest

    def load_sharded_state(self, names: Collection[str], rest: Any) -> None:
        is_complete = self._worker is None or all(name in names for name in self._worker.snapshot.tensors)
        self._restored = rest if is_complete else None

    def _worker_of(self, model: nn.Module) -> DiLoCoWorker:
        if self._worker is None:
            self._worker = DiLoCoWorker(model, self._options)
        return self._worker


def _default_id(ctx: contexts.Context) -> str:
    """A name that this run has in all its legs on this host."""
    place = xxhash.xxh3_64_hexdigest(str(ctx.args.directory.resolve()).encode())[:8]
    return f"{os.uname().nodename.replace('.', '-')}-{place}"
