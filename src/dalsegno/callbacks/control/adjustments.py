"""ScaleLoss, SkipSamples, ScopedFlags, GarbageCollection: small changes to how a run trains."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from dalsegno.callbacks.argument_checks import mapping, number, whole
from dalsegno.distributed import collectives
from dalsegno.errors import ConfigurationError, UnknownName
from dalsegno.events import FlaglessCallback, contexts
from dalsegno.stateful.schema import Count


class ScaleLoss(FlaglessCallback):
    """Multiplies every micro-batch's loss by ``value``; gradients and the logged loss scale with it.

    Evaluation does not change. Gradient clipping and Adam cancel much of the effect.
    """

    background_safe = False

    def __init__(self, value: float) -> None:
        self._value = number("ScaleLoss", "value", value)

    def on_before_backward(self, ctx: contexts.BackwardContext) -> None:
        ctx.outputs["loss"] = ctx.outputs["loss"] * self._value


class SkipSamplesState(TypedDict):
    left: Count


class SkipSamples(FlaglessCallback):
    """Skips the first ``n`` samples that the run would train on.

    Samples are counted over all ranks and epochs, in the order in which the run would read them. Those of a map dataset
    are not loaded; other data are read in whole micro-batches, and the one with the last skipped sample is skipped
    entirely. This happens once in a run, before its first step, however often the run is resumed. Epochs count skipped
    samples, ``state.samples_seen`` does not.

    Args:
        n: number of samples.
    """

    background_safe = False
    state_schema = SkipSamplesState

    def __init__(self, n: int) -> None:
        self._left = whole("SkipSamples", "n", n, least=0)

    def on_epoch_begin(self, ctx: contexts.EpochContext) -> None:
        if self._left and ctx.state.global_step == 0:  # a run added to later has no first samples left
            here = ctx.trainer.skip_samples(self._left)
            (passed,) = collectives.all_reduce_max([here], "SkipSamples")  # loaders may differ
            self._left = max(0, self._left - passed)

    def state_dict(self) -> SkipSamplesState:
        return {"left": self._left}

    def load_state_dict(self, state: Any) -> None:
        self._left = state["left"]


class ScopedFlags(FlaglessCallback):
    """Sets flags of ``torch.backends``, such as TF32, while training runs, and restores them however it ends.

    ::

        ScopedFlags({"cuda.matmul.allow_tf32": True, "cudnn.benchmark": True})

    Args:
        flags: values by name below ``torch.backends``, of the flags' types.
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        for name, value in mapping("ScopedFlags", "flags", flags).items():
            owner, attribute = _place(name)
            present = getattr(owner, attribute)
            if type(value) is not type(present):
                raise ConfigurationError(
                    f"ScopedFlags: {name}={value!r}; torch.backends.{name} is a {type(present).__name__} ({present!r})"
                )
        self._flags = dict(flags)
        self._before: dict[str, Any] = {}

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        for name, value in self._flags.items():
            owner, attribute = _place(name)
            self._before[name] = getattr(owner, attribute)
            setattr(owner, attribute, value)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        while self._before:
            name, value = self._before.popitem()
            owner, attribute = _place(name)
            setattr(owner, attribute, value)


def _place(name: str) -> tuple[Any, str]:
    """Return the module or object that has the flag, and the flag's attribute name."""
    owner: Any = torch.backends
    found = owner
    step = ""
    for step in name.split("."):
        owner = found
        if step.startswith("_") or not hasattr(owner, step):
            before = name.rpartition(step)[0]
            known = {each for each in (*dir(owner), *dir(type(owner))) if not each.startswith("_")}
            raise UnknownName("ScopedFlags: flag", name, sorted(f"{before}{each}" for each in known))
        found = getattr(owner, step)
    return owner, step


class GarbageCollection(FlaglessCallback):
    """Turns off Python's automatic garbage collection during training, and collects every ``every`` steps.

    Automatic collection happens at another moment on each rank, and all other ranks wait for that rank in the next
    collective. Collections between steps cover generation 1; those at the leg's beginning and end cover all. The
    previous setting is restored at the end of training, also after an exception. Added by default on several ranks;
    ``trainer.remove_callback("GarbageCollection")`` keeps automatic collection.

    Args:
        every: steps between collections.
    """

    background_safe = False

    def __init__(self, every: int = 1000) -> None:
        self._every = whole("GarbageCollection", "every", every)
        self._was_enabled = False

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_step_done(self, ctx: contexts.StepDoneContext) -> None:
        if ctx.step % self._every == 0:
            gc.collect(1)

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        if self._was_enabled:
            gc.enable()
        gc.collect()
