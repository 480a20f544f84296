"""StepBoundary: between two steps, log, evaluate, save and stop, in this order and on all ranks together.

::

    (session: step_end, train_metrics) → log_step → log
             → for each evaluation set: its events and batches
             → step_done
             → save (of the previous save) → before_save → capture

So the captured state includes everything that happened in the step, and a leg that resumes from it repeats no event of
the step. The state is written to disk while the next steps run. on_save fires at a boundary after the checkpoint is
published.

``action_schedule`` has which actions fall due at a step's and an epoch's end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dalsegno.distributed import collectives
from dalsegno.policies.recovery import Rollback
from dalsegno.state import NO_REQUESTS, ControlRequests, StopRequest

from .commands import CommandExecutor
from .control_sync import ControlSync, RequestSource
from .evaluation import Evaluation, EvaluationRunner
from .rollback import RollbackDecisions
from .run_parts import RunParts
from .save_coordinator import SaveCoordinator
from .step_log import StepLog


class StepBoundary:
    """Runs what the schedules ask for, and what any rank requests."""

    def __init__(
        self,
        parts: RunParts,
        saves: SaveCoordinator,
        evaluations: Sequence[Evaluation],
        sources: Sequence[RequestSource],
        commands: CommandExecutor,
        rollbacks: RollbackDecisions,
        lease_loss: Callable[[], str | None],
    ) -> None:
        """``sources`` are of requests other than those of callbacks; ``lease_loss`` is as in :class:`ControlSync`."""
        self._args = parts.args
        self._dispatcher = parts.dispatcher
        self._state = parts.state
        self._control = parts.control
        self._sources = sources
        self._rollbacks = rollbacks
        self._lease_loss = lease_loss
        self.commands = commands
        self.recorder = StepLog(parts)
        self.evaluations = EvaluationRunner(parts, evaluations)
        self.saves = saves
        self.begin_leg()

    def begin_leg(self) -> None:
        """Reset what the previous leg decided."""
        self._save_interval_s = self._args.saving.interval_s
        self._saved_at = time.monotonic()
        sources = [*self._sources, self._poll_clock] if self._save_interval_s < math.inf else self._sources
        self._control_sync = ControlSync(
            self._control,
            sources,
            each_step=self._dispatcher.may_request_each_step(),
            each_record=self._dispatcher.may_request_in_records(),
            lease_loss=self._lease_loss,
        )
        self.saves.begin_leg()
        self.stopping = False
        """All ranks have agreed to stop."""
        self.begin_timeline()

    def begin_timeline(self) -> None:
        """Forget what belongs to the steps before a rollback, or to the previous leg."""
        self.recorder.begin_leg()
        self._save_is_held = False
        self.rollback: Rollback | None = None
        """All ranks have agreed to go back before the next step."""

    @property
    def leaving(self) -> bool:
        """Whether no further step of the present timeline is run."""
        return self.stopping or self.rollback is not None

    def should_stop_now(self) -> bool:
        """Whether the leg ends before its first step, say because a signal arrived during the restore, or because the
        leg that gave up the run was killed before its end. Collective."""
        if (given_up := self._state.given_up) is not None:
            self._control.stop_request = StopRequest(given_up["why"], given_up["by"], True, given_up["diverged"])
            self._control.acknowledge(ControlRequests(stop=True))
            self.stopping = True
            self.commands.close()
        elif self._control_sync.stop_requested():
            self._stop()
        return self.stopping

    def run_due_actions(
        self,
        due: ControlRequests,
        *,
        epoch_ends: bool = False,
        replan: Callable[[], ControlRequests] | None = None,
        ends_step: bool = False,
    ) -> None:
        """Run what is ``due``, and what callbacks request as far as the ranks agree on it here. Collective.

        Args:
            epoch_ends: this step is its epoch's last. Unless the leg ends here, a save is held until after
                on_epoch_end, so that one checkpoint contains both.
            replan: what is due after commands have changed the schedules. None: no command acts here, since a resumed
                leg could not repeat it at the same place.
            ends_step: fire on_step_done before the save, unless an evaluation is left to the next leg.
        """
        control_sync = self._control_sync
        if due.log:
            requests = control_sync.poll(along=self.recorder.gathered)
        else:
            is_observed = due.evaluate or due.save or epoch_ends  # callbacks that observe these may set flags
            requests = control_sync.sync() if is_observed else control_sync.poll()
        if replan is not None and self.commands.are_due(requests):
            requests = requests.merge(self.commands.act(requests))
            due = replan()
            if not due.log:
                self.recorder.forget_gathered()
        requests = requests.merge(due)
        if requests.log:
            self.recorder.log_training()
            requests = requests.merge(control_sync.after_record())
        if requests.roll_back:
            requests = self._recover(requests)
        lacks_evaluation = self._args.eval_on_save and not self.evaluations.metrics()
        is_due = requests.evaluate or (requests.save and lacks_evaluation)
        if self.rollback is None and is_due:
            if self.evaluations.evaluate_step(control_sync.stop_requested_at_batch):
                self.saves.amend(self.evaluations.metrics())
            requests = self._recover(requests.merge(control_sync.sync()))
        if ends_step and (step_done := self._dispatcher.step_done) and not self._state.evaluations_owed:
            step_done.fill(self._state.global_step)
            step_done.fire()
        if self.rollback is not None:
            return
        if requests.stop or requests.abort:
            self._stop()
        if requests.abort:
            self.saves.failed.must_succeed = False
        if requests.end_epoch:
            self._state.epoch_is_cut = True
        if requests.save_done:
            self.saves.finalize()
        is_planned = requests.save or self._save_is_held
        save = is_planned or self.stopping
        self._save_is_held = save and epoch_ends and not self.stopping
        if save and not self._save_is_held and not requests.abort:
            self.save(is_planned=is_planned)
        elif not self.stopping:
            self.saves.prepare()
            if requests.save_in_memory and not epoch_ends:
                self._unless_called_off(self.saves.save_in_memory)

    def _recover(self, requests: ControlRequests, *, may_save: bool = True) -> ControlRequests:
        """Decide about a request to go back, collectively if there is one. Returns the other requests; those to end the
        leg among them, if the run cannot go back."""
        if not requests.roll_back:
            return requests
        self.saves.finalize()
        requests = requests._replace(roll_back=False)
        decision = self._rollbacks.decide(may_save=may_save)
        if isinstance(decision, ControlRequests):
            return requests.merge(decision)
        self.rollback = decision
        if requests.stop or requests.abort:  # the leg ends at the checkpoint
            self._stop()
            self.saves.failed.must_succeed = False
        return requests

    def save_held(self, *, also: bool) -> None:
        """Run a held save when the loop is left before on_epoch_end, or one that is ``also`` due there. Collective."""
        if self._save_is_held or also:
            self._save_is_held = False
            self.save()

    def save(self, *, is_planned: bool = True) -> None:
        """Save this step, ``is_planned`` or because the leg ends here, unless a handler of on_before_save calls that
        off. Collective."""
        self._saved_at = time.monotonic()
        self._unless_called_off(partial(self.saves.save, is_planned=is_planned))

    def _unless_called_off(self, save: Callable[[Mapping[str, float]], ControlRequests]) -> None:
        """Save this step; or stop without a checkpoint, if a handler of on_before_save asks for that."""
        control = self._control
        requested, control.stop_request = control.stop_request, None  # so that who calls the save off is named
        called_off = self._recover(save(self.evaluations.metrics()), may_save=False)
        if called_off.abort and self.rollback is None:
            control.stop_request = control.stop_request or requested  # which on_step_done has made
            self._stop()
            self.saves.failed.must_succeed = False
        else:
            control.stop_request = requested or control.stop_request

    def _stop(self) -> None:
        self.stopping = True
        self.commands.close()
        self._control_sync.broadcast_reason()
        request, args = self._control.stop_request, self._args
        self._state.given_up = request and request.given_up(args.max_steps, args.num_train_epochs)

    def _poll_clock(self) -> ControlRequests:
        """Request a save once the newest checkpoint is old enough, by rank 0's clock: one rank is enough."""
        is_time = collectives.rank() == 0 and time.monotonic() - self._saved_at >= self._save_interval_s
        return ControlRequests(save=True) if is_time else NO_REQUESTS
