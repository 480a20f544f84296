"""DivergenceDetector, CheckLoss, NaNChecker: stop a run that has diverged, or roll it back."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dalsegno.analysis.divergence import DetectorSettings, Divergence, DivergenceState, Mode
from dalsegno.callbacks.argument_checks import flag, one_of, text
from dalsegno.data.loader import tensors_in
from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.sharded_tensors import are_finite, dense, local_gradients, named_parameters, strip_wrappers
from dalsegno.errors import ConfigurationError
from dalsegno.events import Callback, Event, contexts

logger = logging.getLogger("dalsegno")


class DivergenceCallback(Callback):
    """Does what ``action`` names: ``"rollback"`` goes back to a checkpoint, any other ends the run."""

    def __init__(self, action: str) -> None:
        self._action = action

    def on_init_end(self, ctx: contexts.Context) -> None:
        if self._action == "rollback" and not ctx.control.can_roll_back:
            raise ConfigurationError(
                f"{self.key}(action='rollback') needs TrainingArguments(recovery=RecoveryPolicy(…))"
            )

    def end_or_roll_back(self, ctx: contexts.Context, reason: str, *, save: bool = False) -> None:
        """Request the action. ``save``: save a checkpoint before the run ends."""
        if self._action == "rollback":
            ctx.control.roll_back(reason)
        else:
            ctx.control.stop(reason, save=save, diverged=True)


class DivergenceDetector(DivergenceCallback):
    """Stops training, or rolls it back, when a logged metric diverges, as :class:`Divergence` defines it.

    A metric that is NaN or infinite stops training at once, and always without a checkpoint: the checkpoint would
    contain broken weights. An infinite gradient norm is ignored while the weights are finite: the fp16 gradient scaler
    skips such steps, among them often the first ones.

    Args:
        smoothing: weight of the newest observation in the moving average, 0 < a ≤ 1.
        threshold: an observation is bad from this distance between average and best average, in the metric's unit; or
            None.
        relative_threshold: an observation is bad from this multiple (above 1) of the best average; or None. If both
            thresholds are None, it is bad if a quarter of the gain since the beginning is lost, and more than noise
            explains.
        patience: number of consecutive bad observations that stops training.
        warmup: number of observations at the run's beginning that are not judged. NaN and infinity always are.
        action: ``"stop"`` saves a checkpoint, ``"abort"`` does not; NaN and infinity never save one. ``"rollback"``
            goes back to a checkpoint, chosen by the run's ``RecoveryPolicy``.
        use_eval_loss: watch ``eval_loss`` in evaluation records instead of ``loss`` in training records.
        metric_key: another metric to watch; if its name begins with ``eval_``, in evaluation records.
        mode: ``"max"`` for a metric that should rise, such as an accuracy.
        baseline_smoothing: weight of the newest observation in a second, slower moving average. The first average is
            compared with that one instead of with its best, so that a slow rise is tolerated. Below ``smoothing``; or
            None.
        name: the key of its state in checkpoints; None: the class's name.
    """

    state_schema = DivergenceState

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = None,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort", "rollback"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        mode: Mode = "min",
        baseline_smoothing: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if action not in ("stop", "abort", "rollback"):
            raise ConfigurationError(f"action is {action!r}; allowed: 'stop', 'abort' or 'rollback'")
        flag("DivergenceDetector", "use_eval_loss", use_eval_loss)
        if metric_key is not None:
            text("DivergenceDetector", "metric_key", metric_key)
        super().__init__(action)
        self.name = name
        self._metric = metric_key or ("eval_loss" if use_eval_loss else "loss")
        self._kind = "eval" if use_eval_loss or self._metric.startswith("eval_") else "train"
        settings = DetectorSettings(
            smoothing=smoothing,
            threshold=threshold,
            relative_threshold=relative_threshold,
            patience=patience,
            warmup=warmup,
            mode=mode,
            baseline_smoothing=baseline_smoothing,
        )
        self._divergence = Divergence(settings)
        self.needs_evaluations = self._kind == "eval"
        self.reads_nonfinite_loss = self._metric == "loss"
        self._warned_missing = False

    def on_log(self, ctx: contexts.LogContext) -> None:
        if ctx.kind != self._kind:
            return
        if self._metric not in ctx.logs:
            if not self._warned_missing:
                self._warned_missing = True
                text = "%s: no %r in the %s record of step %d (it has %s); such records are ignored"
                known = ", ".join(ctx.logs) or "nothing"
                logger.warning(text, self.key, self._metric, self._kind, ctx.state.global_step, known)
            return
        value = float(ctx.logs[self._metric])
        is_number = math.isfinite(value)
        if not is_number and "grad_norm" in self._metric and are_finite(ctx.model):
            return  # fp16: the gradient scaler skipped that step, as it does until it has found its scale
        verdict = self._divergence.observe(value)
        if verdict.diverged:
            reason = f"{self._metric} diverged at step {ctx.state.global_step}: {verdict.reason}"
            self.end_or_roll_back(ctx, reason, save=is_number and self._action == "stop")

    def state_dict(self) -> dict[str, Any]:
        return self._divergence.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._divergence.load_state_dict(state)


class CheckLoss(DivergenceCallback):
    """Stops training, without a checkpoint, once a micro-batch's loss is NaN or infinite.

    The stop reason names the first such micro-batch, its step and its rank. Each loss is checked on its device; the
    result is read at steps with a record and before each save only. Padding is not checked.

    Args:
        action: ``"abort"`` stops training; ``"rollback"`` goes back to a checkpoint, chosen by the run's
            ``RecoveryPolicy``.
    """

    background_safe = False

    def __init__(self, action: Literal["abort", "rollback"] = "abort") -> None:
        super().__init__(one_of("CheckLoss", "action", action, ("abort", "rollback")))
        self._first: tuple[Tensor, Tensor, Tensor] | None = None
        """Step (0: none so far), micro-batch and value of the first non-finite loss; 0-dim, on the device."""

    def requesting_events(self) -> Collection[Event]:
        return Event.LOG_STEP, Event.BEFORE_SAVE

    def on_train_begin(self, ctx: contexts.Context) -> None:
        self._first = None

    on_rollback = on_train_begin

    def on_microbatch_end(self, ctx: contexts.MicrobatchEndContext) -> None:
        if not ctx.samples:
            return
        loss: Tensor = ctx.outputs["loss"].detach().float()
        if self._first is None:
            nothing = torch.zeros((), dtype=torch.long, device=loss.device)
            self._first = nothing, nothing, loss
        step, index, value = self._first
        is_first = (step == 0) & ~loss.isfinite()
        self._first = (
            torch.where(is_first, ctx.state.global_step + 1, step),
            torch.where(is_first, ctx.index, index),
            torch.where(is_first, loss, value),
        )

    def on_log_step(self, ctx: contexts.LogContext) -> None:
        if ctx.kind == "train":
            self._judge(ctx)

    def _judge(self, ctx: contexts.Context) -> None:
        """Stop if any rank has a non-finite loss. Collective."""
        own = [0.0, 0.0, 0.0]
        if self._first is not None:
            own = torch.stack([accelerator.wide(each) for each in self._first]).tolist()
        found = enumerate(collectives.gather_floats(own, "CheckLoss"))
        broken = sorted((step, rank, index, value) for rank, (step, index, value) in found if step)
        if broken:
            step, rank, index, value = broken[0]
            where = f"micro-batch {index:.0f} (from 0) of step {step:.0f} on rank {rank}"
            self.end_or_roll_back(ctx, f"the loss is {value} in {where}")

    on_before_save = _judge


_NONE = 2**62
_GRADIENT = "the gradient of "
_OF_WEIGHTS = f"{_GRADIENT}weights "
_SKIPS = 20  # in a row: by then a gradient scaler's scale has fallen from 65536 to below 1, and is not the cause


class NaNChecker(DivergenceCallback):
    """Finds the first module that produces NaN or infinity, and stops the run there; for debugging.

    Checks the outputs of every module, the gradients of these, and the gradients of all parameters: after the reduction
    over ranks and before clipping. Stops the run, without a checkpoint, if one contains NaN or infinity. The stop
    reason names the first such module in the order of execution, with its step and rank; if all outputs and their
    gradients are finite, the parameter. Each tensor is checked on its device, which costs a pass over all activations
    and gradients; results are read at steps with a record, and before each save. Gradients of a step that the fp16
    gradient scaler skipped are ignored, unless it skips many steps in a row.

    Args:
        gradients: check gradients, too.
        action: ``"abort"`` stops training; ``"rollback"`` goes back to a checkpoint, chosen by the run's
            ``RecoveryPolicy``.
    """

    background_safe = False
    optional_events = (Event.GRADIENTS_READY, Event.STEP_SKIPPED)

    def __init__(self, gradients: bool = True, action: Literal["abort", "rollback"] = "abort") -> None:
        super().__init__(one_of("NaNChecker", "action", action, ("abort", "rollback")))
        self._gradients = flag("NaNChecker", "gradients", gradients)
        self._handles: list[RemovableHandle] = []
        self._last: tuple[Callable[[], Tensor | None], int] = (lambda: None), 0
        """Weak reference to the output that was checked last, and its version, which counts changes in place."""
        self._forget()

    def _forget(self) -> None:
        self._what: list[str] = []  # checked in this step, in order
        self._extremes: list[Sequence[Tensor]] = []  # minimum and maximum of each, 0-dim
        self._steps: list[tuple[int, int, list[str]]] = []
        """Of each step since the last reading: the number of its first check, the step, and what was checked."""
        self._skips = 0  # consecutive skipped steps
        self._is_skipped = False
        self._first: Tensor | None = None
        """Number of the first check that failed, or _NONE; on the device."""

    def requesting_events(self) -> Collection[Event]:
        return (Event.BEFORE_SAVE,)  # and STEP_END at steps with a record, where the ranks agree anyway

    def on_rollback(self, ctx: contexts.Context) -> None:
        self._forget()

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._forget()
        if hasattr(ctx.model, "_orig_mod") or getattr(ctx.model, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                "NaNChecker: a compiled model's modules cannot be observed; train with torch_compile=False"
            )
        for name, module in ctx.model.named_modules():
            shown = strip_wrappers(f"{name}.").removesuffix(".") or type(module).__name__
            self._handles.append(module.register_forward_hook(self._looking_at(shown)))

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        self._skips, self._is_skipped = self._skips if self._is_skipped else 0, False
        self._note_step(ctx.step)
        if ctx.state.will_log:
            self._judge(ctx)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        while self._handles:
            self._handles.pop().remove()

    def on_gradients_ready(self, ctx: contexts.Context) -> None:
        if not self._gradients:
            return
        named = [(name, each) for name, each in named_parameters(ctx.model) if each.grad is not None]
        parts = local_gradients([each for _, each in named], [each.grad for _, each in named if each.grad is not None])
        here = [(name, part) for (name, _), part in zip(named, parts, strict=True) if part.numel()]
        self._what.extend(f"{_OF_WEIGHTS}{name}" for name, _ in here)
        self._extremes.extend(_extremes(part) for _, part in here)

    def on_step_skipped(self, ctx: contexts.StepSkippedContext) -> None:
        self._skips, self._is_skipped = self._skips + 1, True
        if self._skips <= _SKIPS:
            kept = [each for each in zip(self._what, self._extremes, strict=True) if not each[0].startswith(_GRADIENT)]
            self._what, self._extremes = [what for what, _ in kept], [extremes for _, extremes in kept]

    def _judge(self, ctx: contexts.Context) -> None:
        """Stop if a rank has found something. Collective: one rank's NaN is in all ranks' weights a step later."""
        broken = self._read()
        if collectives.all_reduce_max([broken is not None], "NaNChecker")[0]:
            gathered = collectives.gather(broken, "what NaNChecker found")
            found = ((*each, rank) for rank, each in enumerate(gathered) if each is not None)
            # Parameters' gradients are reduced over all ranks: what one rank has found in a module comes before.
            step, what, rank = min(found, key=lambda each: (each[0], each[1].startswith(_OF_WEIGHTS)))
            where = f"on rank {rank}" if not what.startswith(_OF_WEIGHTS) or len(gathered) == 1 else "over all ranks"
            self.end_or_roll_back(ctx, f"{what} is not finite, first in step {step}, {where}")

    on_before_save = _judge

    def _looking_at(self, name: str) -> Any:
        what = f"the output of {name}"
        note_gradient = partial(self._note, f"{_GRADIENT}{what}")

        def look(module: nn.Module, args: Any, outputs: Any) -> None:
            if not torch.is_grad_enabled():  # in an evaluation
                return
            for tensor in tensors_in(outputs):
                is_number = tensor.is_floating_point() or tensor.is_complex()
                if not is_number or self._has_just_seen(tensor):  # returned unchanged from its last submodule
                    continue
                self._note(what, tensor)
                if self._gradients and tensor.requires_grad:
                    tensor.register_hook(note_gradient)  # type: ignore[no-untyped-call]

        return look

    def _has_just_seen(self, tensor: Tensor) -> bool:
        last, version = self._last
        self._last = weakref.ref(tensor), tensor._version
        return last() is tensor and version == tensor._version

    def _note(self, what: str, tensor: Tensor) -> None:
        local = dense(tensor.detach())
        if local.numel():
            self._what.append(what)
            self._extremes.append(_extremes(local))

    def _note_step(self, step: int) -> None:
        """Reduce this step's checks to one number, on the device."""
        what, extremes, self._what, self._extremes = self._what, self._extremes, [], []
        if not what:
            return
        begins = 0
        if self._steps:
            begins, _, before = self._steps[-1]
            begins += len(before)
            what = before if what == before else what  # shared, since most steps are alike
        self._steps.append((begins, step, what))
        place = extremes[0][0].device
        flat = [each for pair in extremes for each in pair]
        together = torch.stack([each if each.device == place else each.to(place) for each in flat])
        finite = together.isfinite().view(-1, 2).all(1)
        first = torch.where(finite.all(), _NONE, begins + finite.byte().argmin())
        self._first = first if self._first is None else torch.minimum(self._first, first)

    def _read(self) -> tuple[int, str] | None:
        """Return step and name of the first check that failed."""
        steps, first, self._steps, self._first = self._steps, self._first, [], None
        number = _NONE if first is None else int(first)
        for begins, step, what in steps:
            if begins <= number < begins + len(what):
                return step, what[number - begins]
        return None


def _extremes(values: Tensor) -> Sequence[Tensor]:
    """Return minimum and maximum, both NaN if one value is. One pass, where ``isfinite`` takes several, and on a CPU a
    tenth of the time of the norm of order infinity."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif values.element_size() == 1:
        values = values.float()  # of float8, which has no reductions
    return torch.aminmax(values)
