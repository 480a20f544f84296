"""ProfilerCallback: runs torch's profiler over a few steps."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from dalsegno.callbacks.argument_checks import flag, folder, whole
from dalsegno.callbacks.printing import STDOUT
from dalsegno.distributed import accelerator, collectives
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts

logger = logging.getLogger("dalsegno")


_ROWS = 20  # of a summary table


class ProfilerCallback(FlaglessCallback):
    """Profiles some steps of each leg, on one rank: which operations take the time.

    Writes a Chrome trace, ``…-rank-00000.trace.json.gz`` (open it at https://ui.perfetto.dev), and a table of the
    operations that took the longest, ``…-rank-00000.txt``, which is also printed. If training ends while the profiler
    runs, both cover the steps until then. Refused where Python's allocations are traced (``TraceMalloc``).

    Args:
        start_step: number of the leg's steps before the first profiled step; a leg's first steps are slower than
            others.
        num_steps: number of profiled steps.
        output_dir: directory for the files; None: ``profile`` in the run's directory. File names begin with the first
            profiled step, so legs do not overwrite each other's.
        with_stack: record the call stack of each operation.
        with_flops: estimate floating-point operations.
        record_shapes: record the shapes of inputs.
        warmup_steps: number of steps before ``start_step`` that already run under the profiler, and are left out, since
            the profiler is slow at its start. At most ``start_step``.
        rank: the rank that profiles; None: every rank, each with separate files. For hundreds of ranks that is a lot.
    """

    def __init__(
        self,
        start_step: int = 3,
        num_steps: int = 5,
        output_dir: str | Path | None = None,
        with_stack: bool = True,
        with_flops: bool = True,
        record_shapes: bool = True,
        warmup_steps: int = 1,
        rank: int | None = 0,
    ) -> None:
        self._start_step = whole("ProfilerCallback", "start_step", start_step, least=0)
        self._num_steps = whole("ProfilerCallback", "num_steps", num_steps)
        self._warmup = min(whole("ProfilerCallback", "warmup_steps", warmup_steps, least=0), start_step)
        self._rank = None if rank is None else whole("ProfilerCallback", "rank", rank, least=0)
        given = None if output_dir is None else folder("ProfilerCallback", "output_dir", output_dir)
        self._output_dir = None if given is None else given.absolute()
        self._with_stack = flag("ProfilerCallback", "with_stack", with_stack)
        self._with_flops = flag("ProfilerCallback", "with_flops", with_flops)
        self._record_shapes = flag("ProfilerCallback", "record_shapes", record_shapes)
        self._profile: profile | None = None
        self._steps = 0  # of this leg
        self._first = 0

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        world_size = collectives.world_size()
        if self._rank is not None and self._rank >= world_size:
            raise ConfigurationError(f"ProfilerCallback: rank={self._rank}; the ranks are 0 to {world_size - 1}")
        self._steps = self._first = 0

    def on_step_begin(self, ctx: contexts.Context) -> None:
        profiles = self._rank in (None, collectives.rank())
        if self._steps == 0:
            is_traced = profiles and tracemalloc.is_tracing()
            if any(collectives.all_reduce_max([is_traced], "ProfilerCallback")):
                raise ConfigurationError(
                    "ProfilerCallback: TraceMalloc, or the program itself, traces allocations (tracemalloc), and a "
                    "profile then takes minutes to read; use only one of the two in a run"
                )
        if self._steps == self._start_step - self._warmup and profiles:
            self._profile = profile(
                schedule=schedule(wait=0, warmup=self._warmup, active=self._num_steps + 1),  # stopped before the last
                activities=_activities(),
                with_stack=self._with_stack,
                with_flops=self._with_flops,
                record_shapes=self._record_shapes,
            )
            self._profile.start()
        if self._steps == self._start_step:
            self._first = ctx.state.global_step + 1

    def on_step_done(self, ctx: contexts.StepDoneContext) -> None:
        self._steps += 1
        if self._steps == self._start_step + self._num_steps:
            self._export(ctx)
        elif self._profile is not None:
            self._profile.step()

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        self._export(ctx)

    def _export(self, ctx: contexts.Context) -> None:
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        if not self._first:  # stopped during warm-up
            return
        folder = self._output_dir or ctx.args.directory / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._first:08d}-rank-{collectives.rank():05d}"
        running.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
        by = "self_cpu_time_total" if len(_activities()) == 1 else "self_device_time_total"
        try:
            table = running.key_averages().table(sort_by=by, row_limit=_ROWS)
        except UnicodeDecodeError as error:  # torch 2.13 garbles names of Python functions on other threads
            logger.warning("ProfilerCallback: no table, only the trace in %s: torch gives %s", folder, error)
            return
        (folder / f"{name}.txt").write_text(table)
        if collectives.rank() == (self._rank or 0):
            STDOUT.say(table)
            logger.info("profiled from step %d on: %s", self._first, folder)


def _activities() -> list[ProfilerActivity]:
    """The CPU's, and the accelerator's if torch profiles it."""
    own = getattr(ProfilerActivity, str(accelerator.kind()).upper(), ProfilerActivity.CPU)
    return list(dict.fromkeys([ProfilerActivity.CPU, own]))
