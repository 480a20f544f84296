"""NaNChecker: the module in which a number first stops being one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dalsegno import ranks
from dalsegno.callback import Callback
from dalsegno.contexts import MicrobatchBeginContext, StepEndContext, TrainBeginContext, TrainEndContext
from dalsegno.errors import ConfigurationError
from dalsegno.pieces import cleaned

from .arguments import flag

_AT_ONCE = 4096  # findings looked at together where nothing is logged for long


class NaNChecker(Callback):
    """Looks at what every module puts out, and at the gradient of that, and ends the run, without a checkpoint, where
    one holds NaN or infinity. The reason names the first such module, in the order in which they ran, with its step and
    rank.

    Each is looked at on the device; the answers are read at the steps that log or save. It costs a pass over all
    activations and keeps nothing of them: a tool for finding out, not for every run. Tensors inside of tuples, lists
    and dicts are found too. Infinity where a model means it, in an attention mask say, is none of a module's output.

    Args:
        gradients: look at gradients too.

    Raises:
        ConfigurationError: if that is neither True nor False.
    """

    makes_wishes = False  # but at steps that log or save, where the ranks agree anyway

    def __init__(self, gradients: bool = True) -> None:
        self._gradients = flag("NaNChecker", "gradients", gradients)
        self._handles: list[RemovableHandle] = []
        self._findings: list[tuple[int, str, Tensor]] = []  # step, what, whether all is finite; in order
        self._broken: tuple[int, str] | None = None
        self._step = 0

    def on_train_begin(self, ctx: TrainBeginContext) -> None:
        self._findings, self._broken = [], None
        if getattr(ctx.model, "_compiled_call_impl", None) is not None:
            raise ConfigurationError(
                "NaNChecker: a compiled model has no modules left to look into; torch_compile=False"
            )
        for name, module in ctx.model.named_modules():
            shown = cleaned(f"{name}.").removesuffix(".") or type(module).__name__
            self._handles.append(module.register_forward_hook(self._looking_at(shown)))

    def on_microbatch_begin(self, ctx: MicrobatchBeginContext) -> None:
        self._step = ctx.state.global_step + 1

    def on_step_end(self, ctx: StepEndContext) -> None:
        if not (ctx.state.will_log or ctx.state.will_save or len(self._findings) > _AT_ONCE):
            return
        self._read()
        if self._broken is not None:
            step, what = self._broken
            ctx.control.stop(f"{what} is not finite, first in step {step}, on rank {ranks.rank()}", save=False)

    def on_train_end(self, ctx: TrainEndContext) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _looking_at(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, outputs: Any) -> None:
            if not torch.is_grad_enabled():  # an evaluation's
                return
            for tensor in _tensors(outputs):
                self._findings.append((self._step, f"the output of {name}", tensor.detach().isfinite().all()))
                if self._gradients and tensor.requires_grad:
                    tensor.register_hook(partial(self._note_gradient, name))  # type: ignore[no-untyped-call]

        return look

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        what = f"the gradient of the output of {name}"
        self._findings.append((self._step, what, gradient.detach().isfinite().all()))

    def _read(self) -> None:
        findings, self._findings = self._findings, []
        if findings and self._broken is None:
            finite = torch.stack([each.to(findings[0][2].device) for *_, each in findings]).tolist()
            broken = (found[:2] for found, is_finite in zip(findings, finite, strict=True) if not is_finite)
            self._broken = next(broken, None)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returns."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point() or tree.is_complex():
            yield tree
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)
