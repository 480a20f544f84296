"""NaNChecker: the module in which a number first stops being one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import dense, local_gradients, named_parameters, strip_wrappers
from dalsegno.errors import ConfigurationError
from dalsegno.events.callback import Binder, Callback
from dalsegno.events.contexts import (
    BeforeSaveContext,
    Context,
    StepEndContext,
    StepSkippedContext,
    TrainBeginContext,
    TrainEndContext,
)
from dalsegno.events.table import Event
from dalsegno.state import Handler

from .argument_checks import flag
from .measures.module_outputs import tensors_in

_NONE = 2**62
_GRADIENT = "the gradient of "
_OF_WEIGHTS = f"{_GRADIENT}weights "
_SKIPS = 20  # in a row: by then a gradient scaler's 65536 has come down below 1, and explains nothing any more


class NaNChecker(Callback):
    """Looks at what every module puts out, at the gradient of that, and at the gradient of every parameter, and ends
    the run, without a checkpoint, where one holds NaN or infinity. The reason names the first such module, in the order
    in which they ran, with its step and rank; where all outputs and their gradients are finite, the parameter. Its
    gradient is that of all ranks together, before it is clipped: clipping spreads one NaN to all of them.

    Each is looked at on the device; the answers are read at steps that log, and before each save. It costs a pass over
    all activations and gradients, and keeps nothing of them: a tool for finding out, not for every run. Tensors inside
    of tuples, lists and dicts are found too. Infinity where a model means it, in an attention mask say, is none of a
    module's output. Under fp16, gradients are scaled up until they do not fit any more, and the scaler skips that step:
    such gradients are no finding, unless it skips one step after the other.

    Args:
        gradients: look at gradients too.

    Raises:
        ConfigurationError: if that is neither True nor False.
    """

    makes_wishes = False  # but where records and checkpoints are due, where the ranks agree anyway

    def __init__(self, gradients: bool = True) -> None:
        self._gradients = flag("NaNChecker", "gradients", gradients)
        self._handles: list[RemovableHandle] = []
        self._what: list[str] = []  # of this step, in order
        self._extremes: list[Sequence[Tensor]] = []  # its smallest and its largest number, 0-dim
        self._steps: list[tuple[int, int, list[str]]] = []
        """Of the steps since the last reading: the number of the first finding, the step, what was looked at."""
        self._last: tuple[Callable[[], Tensor | None], int] = (lambda: None), 0
        """The output that was looked at last, as long as it is there, and how often it had been changed in place."""
        self._skips = 0  # steps that were skipped, in a row
        self._is_skipped = False
        self._first: Tensor | None = None
        """The number of the first broken finding, or _NONE; on the device."""

    def bound_handlers(self, binder: Binder) -> list[tuple[Event, Handler]]:
        """Also what only some loops can tell: so that others need not refuse it."""
        some = [(Event.GRADIENTS_READY, self._note_gradients), (Event.STEP_SKIPPED, self._note_skip)]
        return [*super().bound_handlers(binder), *some]

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._what, self._extremes, self._steps, self._first = [], [], [], None
        if hasattr(ctx.model, "_orig_mod") or getattr(ctx.model, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                "NaNChecker: a compiled model has no modules left to look into; give it as it is, torch_compile=False"
            )
        for name, module in ctx.model.named_modules():
            shown = strip_wrappers(f"{name}.").removesuffix(".") or type(module).__name__
            self._handles.append(module.register_forward_hook(self._looking_at(shown)))

    def on_step_end(self, ctx: StepEndContext) -> None:
        self._skips, self._is_skipped = self._skips if self._is_skipped else 0, False
        self._note_step(ctx.step)
        if ctx.state.will_log:
            self._judge(ctx)

    def on_before_save(self, ctx: BeforeSaveContext) -> None:
        self._judge(ctx)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _note_gradients(self, ctx: Context) -> None:
        if not self._gradients:
            return
        named = [(name, each) for name, each in named_parameters(ctx.model) if each.grad is not None]
        parts = local_gradients([each for _, each in named], [each.grad for _, each in named if each.grad is not None])
        here = [(name, part) for (name, _), part in zip(named, parts, strict=True) if part.numel()]
        if here:
            self._what.extend(f"{_OF_WEIGHTS}{name}" for name, _ in here)
            largest = torch._foreach_norm([part for _, part in here], torch.inf)  # NaN if one is
            self._extremes.extend((each, each) for each in largest)

    def _note_skip(self, ctx: StepSkippedContext) -> None:
        self._skips, self._is_skipped = self._skips + 1, True
        if self._skips <= _SKIPS:
            kept = [each for each in zip(self._what, self._extremes, strict=True) if not each[0].startswith(_GRADIENT)]
            self._what, self._extremes = [what for what, _ in kept], [extremes for _, extremes in kept]

    def _judge(self, ctx: Context) -> None:
        """On all ranks: what breaks on one of them is in the weights of all a step later."""
        broken = self._read()
        if collectives.all_reduce_max([broken is not None], "NaNChecker")[0]:
            told = collectives.gather(broken, "what NaNChecker found")
            found = ((*each, rank) for rank, each in enumerate(told) if each is not None)
            # A weight's gradient has gone through all ranks: what one of them has found in a module comes before it.
            step, what, rank = min(found, key=lambda each: (each[0], each[1].startswith(_OF_WEIGHTS)))
            where = f"on rank {rank}" if not what.startswith(_OF_WEIGHTS) or len(told) == 1 else "over all ranks"
            ctx.control.stop(f"{what} is not finite, first in step {step}, {where}", save=False, final=True)

    def _looking_at(self, name: str) -> Any:
        what = f"the output of {name}"
        note_gradient = partial(self._note, f"{_GRADIENT}{what}")

        def look(module: nn.Module, args: Any, outputs: Any) -> None:
            if not torch.is_grad_enabled():  # an evaluation's
                return
            for tensor in tensors_in(outputs):
                is_number = tensor.is_floating_point() or tensor.is_complex()
                if not is_number or self._has_just_seen(tensor):  # what a module hands on from its last part
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
            self._extremes.append(torch.aminmax(local))  # NaN is both; one pass, where isfinite takes several

    def _note_step(self, step: int) -> None:
        """Make one number of this step's findings, where they lie."""
        what, extremes, self._what, self._extremes = self._what, self._extremes, [], []
        if not what:
            return
        begins = 0
        if self._steps:
            begins, _, before = self._steps[-1]
            begins += len(before)
            what = before if what == before else what  # most steps are alike
        self._steps.append((begins, step, what))
        place = extremes[0][0].device
        flat = [each for pair in extremes for each in pair]
        together = torch.stack([each if each.device == place else each.to(place) for each in flat])
        finite = together.isfinite().view(-1, 2).all(1)
        first = torch.where(finite.all(), _NONE, begins + finite.byte().argmin())
        self._first = first if self._first is None else torch.minimum(self._first, first)

    def _read(self) -> tuple[int, str] | None:
        """Step and name of the first that was broken."""
        steps, first, self._steps, self._first = self._steps, self._first, [], None
        number = _NONE if first is None else int(first)
        for begins, step, what in steps:
            if begins <= number < begins + len(what):
                return step, what[number - begins]
        return None
