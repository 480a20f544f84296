"""Requeue: puts the Slurm job back into the queue when a leg has been stopped in time (``requeue=True``)."""

from __future__ import annotations

import logging

from dalsegno.distributed import collectives
from dalsegno.system.exit_status import ExitStatus
from dalsegno.system.slurm import JobStatus, SlurmError, SlurmJob

from .result import TrainResult

logger = logging.getLogger("dalsegno")


class Requeue:
    """Acts on rank 0, if ``enabled``. A failure is only logged: the leg's result stays as it is."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._announced = False

    def begin_leg(self) -> None:
        """Warn, once, if the job cannot be requeued: now, rather than when its time is over."""
        if not self._acts or self._announced:
            return
        self._announced = True
        job = SlurmJob.current()
        if job is None:
            logger.warning("requeue=True has no effect: this process is not part of a Slurm job")
            return
        try:
            obstacle = _obstacle(job.status())
        except SlurmError as error:
            obstacle = str(error)
        if obstacle:
            logger.warning("requeue=True: Slurm job %s cannot be requeued: %s", job.id, obstacle)

    def end_leg(self, result: TrainResult) -> None:
        """Requeue the job if a signal or a clock has stopped the leg. To be called once all its files are closed."""
        if not self._acts or result.exit_status is not ExitStatus.RUN_AGAIN:
            return
        job = SlurmJob.current()
        if job is None:
            return
        try:
            state = job.status()
            if not state.is_running:  # scontrol would requeue a cancelled job, too
                logger.warning(
                    "Slurm job %s is not requeued from here: its state is %s, so it was cancelled, or Slurm itself has "
                    "ended or requeued it",
                    job.id,
                    state.state,
                )
                return
            logger.warning("Slurm job %s is requeued: the run resumes at step %d", job.id, result.global_step)
            job.requeue()
        except SlurmError as error:
            logger.error("Slurm job %s is not requeued: %s; submit it again, and the run resumes", job.id, error)

    @property
    def _acts(self) -> bool:
        return self._enabled and collectives.rank() == 0


def _obstacle(status: JobStatus) -> str | None:
    """Why Slurm would refuse to requeue the job."""
    if not status.is_batch:
        return "only jobs of sbatch can be"
    return None if status.allows_requeue else "submit it with sbatch --requeue"
