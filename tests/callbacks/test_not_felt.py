"""Callbacks that only observe change neither weights nor random numbers, and do not wait for the device."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dalsegno as ds
from dalsegno.testing import run_ranks, tiny_regression_data
from dalsegno.witness import Witness
from support.builtins import NAMES, Model, build
from support.languages import Letters
from support.listeners import Listener
from support.small import arguments

CHANGE_THE_TRAINING = {"EMA", "ScaleLoss", "ScopedFlags", "SkipSamples"}
ASK_MORE_OF_THE_TRAINING = {"GradientNoiseScale"}
"""It is refused without gradient accumulation and in shards: test_noise_scale.py shows that it is not felt."""
SLOW_PYTHON_DOWN = {"TraceMalloc"}
"""Under a tracer of every allocation the profiler's report takes minutes; the contract shows that it is not felt."""
OBSERVERS = sorted(set(NAMES) - CHANGE_THE_TRAINING - ASK_MORE_OF_THE_TRAINING - SLOW_PYTHON_DOWN)


def trainer(output_dir: Path, *own: ds.Callback, layout: str = "none", **settings: Any) -> ds.Trainer:
    """With just these callbacks."""
    torch.manual_seed(0)
    given = {"logging_steps": 4, "eval_steps": 10, "save_steps": 16, "max_steps": 40, **settings}
    trainer = ds.Trainer(
        Model(),
        arguments(output_dir, parallel=layout, disable_tqdm=True, **given),
        train_dataset=tiny_regression_data(),
        eval_dataset=tiny_regression_data(6, seed=1),
        processing_class=Letters(),
        callbacks=own,
    )
    for callback in trainer.callbacks:
        if callback not in own:
            trainer.remove_callback(callback)
    return trainer


# --- weights and random numbers ---------------------------------------------------------------------------------------


def outcome(output_dir: Path, layout: str, steps: int, observed: bool) -> list[bytes]:
    """This rank's weights, bit by bit, and its next random numbers."""
    own = [build(name) for name in OBSERVERS] if observed else []
    run = trainer(output_dir, *own, layout=layout, max_steps=steps)
    assert run.train().reason == "finished"
    mine = [each.to_local() if isinstance(each, DTensor) else each for each in run.model.state_dict().values()]
    return [each.detach().numpy().tobytes() for each in [*mine, torch.rand(8)]]


@pytest.mark.parametrize(("layout", "world_size", "steps"), [("none", 1, 40), ("ddp", 2, 12), ("fsdp", 2, 12)])
def test_all_of_them_at_once_change_nothing(tmp_path: Path, layout: str, world_size: int, steps: int) -> None:
    with_them, without = (
        run_ranks(outcome, world_size, tmp_path / f"{observed}", layout, steps, observed) for observed in (True, False)
    )
    assert with_them == without


def kinds_of_parameters(output_dir: Path) -> set[tuple[str, str]]:
    seen = set()

    def look(ctx: Any) -> None:
        seen.update((str(ctx.state.global_step), type(each.data).__name__) for each in ctx.model.parameters())

    looking = Listener({"on_evaluate": look, "on_train_end": look, "on_step_end": look})
    trainer(output_dir, looking, build("TextgenCallback"), layout="fsdp", max_steps=4, eval_steps=2).train()
    return seen


def test_after_an_evaluation_parameters_are_shards_again(tmp_path: Path) -> None:
    """Without a backward pass FSDP2 leaves some of them whole, and a callback would see them in two shapes."""
    seen, _ = run_ranks(kinds_of_parameters, 2, tmp_path)
    assert seen == {(str(step), "DTensor") for step in range(1, 5)}


# --- the device is not waited for -------------------------------------------------------------------------------------

DUE_AT_EVERY_STEP = {"DumpActivations"}  # what it is there for is to bring them all over
OWN_STEPS = {"ExpertLoadBalance": 2, "GradHistogram": 2, "LearningDynamics": 2}
"""These are due at steps of their own, when they read what they have counted, or write files of their own."""


@pytest.fixture(autouse=True)
def no_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock decides which steps the witness records. It reads numbers on the host; those on a device come late."""
    monkeypatch.setattr(Witness, "begin_leg", lambda witness, *args, **kwargs: None)
    monkeypatch.setattr(Witness, "begin_step", lambda witness, *args, **kwargs: None)


READS = {"item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__"}
SENDS = {"tensor", "as_tensor", "from_numpy"}  # from a list in Python: where there is a device, it is waited for
OPERATIONS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "_unique2", "unique_consecutive"}


class Waits(TorchFunctionMode):
    """A stand-in for an accelerator: notes whatever would have to wait for one, in the steps that are not due."""

    def __init__(self) -> None:
        self.noted: Counter[tuple[int, str]] = Counter()
        """Step, and how it waits."""
        self._step = 0
        self.listener = Listener({"on_step_begin": self._begin, "on_train_end": self._end}, name="waits")
        self.is_noting = False
        self._beneath = _Beneath(self)

    def __enter__(self) -> Self:
        self._beneath.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._beneath.__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        to_host = name in ("to", "copy_") and any(str(each) == "cpu" for each in (*args[1:], *(kwargs or {}).values()))
        if name in READS | SENDS or to_host:
            self.note(name)
        return function(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        if self.is_noting:
            self.noted[self._step, what] += 1

    def _begin(self, ctx: Any) -> None:
        state = ctx.state
        self._step = state.global_step + 1
        self.is_noting = not (state.will_log or state.will_evaluate or state.will_save)

    def _end(self, ctx: Any) -> None:
        self.is_noting = False


class _Beneath(TorchDispatchMode):
    """The same below Python, where operations ask for values by themselves."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if name in OPERATIONS:
            self._waits.note(f"aten.{name}")
        return operation(*args, **(kwargs or {}))


def waits(output_dir: Path, *own: ds.Callback) -> Counter[tuple[int, str]]:
    """What is waited for in 20 steps: a record at 8 and 16, evaluation at 10 and 20, a checkpoint at 20."""
    noting = Waits()
    run = trainer(output_dir, noting.listener, *own, max_steps=20, logging_steps=8, eval_steps=10, save_steps=50)
    with noting:
        run.train()
    return noting.noted


@pytest.fixture(scope="module")
def loop_alone(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[int, str]]:
    return waits(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("name", sorted(set(OBSERVERS) - DUE_AT_EVERY_STEP))
def test_nothing_waits_in_steps_that_are_not_due(
    tmp_path: Path, name: str, loop_alone: Counter[tuple[int, str]]
) -> None:
    waited = waits(tmp_path, build(name)) - loop_alone
    own = {(step, how): times for (step, how), times in waited.items() if step % OWN_STEPS.get(name, 99) == 0}
    assert waited.keys() == own.keys()
    assert sum(times for (_, how), times in own.items() if how in READS) == len({step for step, _ in own}), "once each"


@pytest.mark.parametrize(
    "handler",
    [
        {"on_step_end": lambda ctx: ctx.loss and None},
        {"on_microbatch_end": lambda ctx: ctx.outputs["loss"].tolist() and None},
        {"on_gradients_ready": lambda ctx: [p.grad.cpu() for p in ctx.model.parameters()] and None},
        {"on_before_zero_grad": lambda ctx: torch.equal(torch.zeros(2), torch.ones(2)) or None},
    ],
)
def test_one_that_waits_is_found(tmp_path: Path, handler: Any, loop_alone: Counter[tuple[int, str]]) -> None:
    assert waits(tmp_path, Listener(handler)) - loop_alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA itself says when it is waited for")
@pytest.mark.parametrize("name", sorted(set(OBSERVERS) - DUE_AT_EVERY_STEP))
def test_cuda_does_not_wait_in_steps_that_are_not_due(tmp_path: Path, name: str) -> None:
    def waited(output_dir: Path, *own: ds.Callback) -> int:
        noting = Waits()  # only for its listener

        def switch(ctx: Any) -> None:
            is_due = (ctx.state.global_step + 1) % OWN_STEPS.get(name, 99) == 0
            torch.cuda.set_sync_debug_mode("warn" if noting.is_noting and not is_due else "default")

        watching = Listener({"on_step_begin": switch, "on_train_end": switch}, name="switch")
        settings = {"max_steps": 20, "logging_steps": 8, "eval_steps": 10, "save_steps": 50, "use_cpu": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(output_dir, noting.listener, watching, *own, **settings).train()
        return sum("synchronizing CUDA operation" in str(each.message) for each in caught)

    assert waited(tmp_path / "with", build(name)) <= waited(tmp_path / "without")
