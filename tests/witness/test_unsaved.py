"""State of the user's own code that no checkpoint contains: named at a save, and in the verdict on a resume."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
import time
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import dalsegno as ds
from dalsegno.logs import RunFile
from dalsegno.testing import TinyRegression, tiny_regression_data
from dalsegno.witness import Unsaved
from support.crash import Crash
from support.listeners import Listener
from support.small import arguments, small_trainer

LENGTH = 16


def trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **given: Any) -> ds.Trainer:
    """A checkpoint after steps 4 and 8 of ten, four of them an epoch."""
    usual: dict[str, Any] = {"max_steps": 10, "save_steps": 4, "logging_steps": 2, "save_in_background": False}
    return small_trainer(output_dir, *callbacks, model=model, length=LENGTH, parts=given, **usual)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "a resumed run may differ" in each.getMessage()]


class Outputs(TinyRegression):
    """Returns outputs, for a loss function."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs


def squared(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["y"])


# -- what is named ----------------------------------------------------------------------------------------------------


class Average(ds.Callback):
    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        for name, weight in ctx.model.named_parameters():
            self.shadow[name] = weight.detach().clone()


class Patience(ds.Callback):
    bad = 0

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.bad += 1


class Phase(Enum):
    FIRST = 1
    SECOND = 2


@dataclass(slots=True)
class Slot:
    count: int = 0


class OddKinds(ds.Callback):
    def __init__(self) -> None:
        self.slot, self.seen, self.money, self.phase = Slot(), frozenset[int](), Decimal(0), Phase.FIRST

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        if ctx.step > 2:
            self.slot.count, self.seen = ctx.step, self.seen | {ctx.step}
            self.money, self.phase = self.money + 1, Phase.SECOND


class Switched(ds.Callback):
    has_switched = False

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.has_switched = ctx.state.global_step > 2


class Curriculum:
    epochs = 0


def average(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, Average())


def patience(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, Patience())


def odd_kinds(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, OddKinds())


def switched(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, Switched())


def class_attribute(output_dir: Path) -> ds.Trainer:
    def count(ctx: Any) -> None:
        Curriculum.epochs += 1

    return trainer(output_dir, Listener({"on_epoch_end": count}))


def function_callback(output_dir: Path) -> ds.Trainer:
    losses: list[float] = []

    def collect(ctx: Any) -> None:
        losses.append(float(ctx.loss))

    return trainer(output_dir, ds.on(ds.Event.STEP_END, collect))


STEPS = itertools.count()


def next_step() -> int:
    return next(STEPS)


def global_counter(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, model=Outputs(), loss_fn=lambda out, batch: squared(out, batch) + 0.0 * next_step())


def teacher(output_dir: Path) -> ds.Trainer:
    model = Outputs()
    slow = copy.deepcopy(model)

    def follow(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        for theirs, ours in zip(slow.parameters(), model.parameters(), strict=True):
            theirs.data.lerp_(ours.data, 0.1)
        return squared(out, batch)

    return trainer(output_dir, model=model, loss_fn=follow)


def namespace(output_dir: Path) -> ds.Trainer:
    kept = SimpleNamespace(calls=0)

    def counted(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        kept.calls += 1
        return squared(out, batch)

    return trainer(output_dir, model=Outputs(), loss_fn=counted)


def own_generator(output_dir: Path) -> ds.Trainer:
    def noisy(generator: random.Random, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return squared(out, batch) + 0.0 * generator.random()

    return trainer(output_dir, model=Outputs(), loss_fn=functools.partial(noisy, random.Random(1)))


def queue_in_the_model(output_dir: Path) -> ds.Trainer:
    class Queue(TinyRegression):
        def __init__(self) -> None:
            super().__init__()
            self.last: deque[Tensor] = deque(maxlen=2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.last.append(x.mean())
            return super().forward(x, y)

    return trainer(output_dir, model=Queue())


def forward_hook(output_dir: Path) -> ds.Trainer:
    seen: dict[str, float] = {}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["mean"] = seen.get("mean", 0.0) + float(output.mean())

    model = TinyRegression()
    model.layers[0].register_forward_hook(hook)
    return trainer(output_dir, model=model)


def gradient_hook(output_dir: Path) -> ds.Trainer:
    rest = SimpleNamespace(error=torch.zeros(()))
    model = TinyRegression()
    model.layers[0].weight.register_hook(lambda gradient, kept=[rest.error]: kept[0].add_(gradient.mean()) and None)
    return trainer(output_dir, model=model)


def inner_optimizer(output_dir: Path) -> ds.Trainer:
    class Outer(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.01)
            self.inner = torch.optim.Adam(self.param_groups, lr=0.01)

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = TinyRegression()
    return trainer(output_dir, model=model, optimizer=Outer([*model.parameters()]))


def schedule(output_dir: Path) -> ds.Trainer:
    calls = [0]

    def factor(step: int) -> float:
        calls[0] += 1
        return 1.0

    model = TinyRegression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return trainer(output_dir, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.samples = tiny_regression_data(LENGTH)
        self.reads = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return self.samples[index]


def counting_dataset(output_dir: Path) -> ds.Trainer:
    return trainer(output_dir, train_dataset=Counting())


def metric_of_several_steps(output_dir: Path) -> ds.Trainer:
    mean = pytest.importorskip("torchmetrics").MeanMetric()

    def measure(ctx: Any) -> None:
        mean.update(ctx.loss)
        if ctx.step == 5:
            mean.reset()

    return trainer(output_dir, Listener({"on_step_end": measure}))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (average, "Average.shadow"),
        (patience, "Patience.bad"),
        (odd_kinds, "OddKinds.money, OddKinds.phase, OddKinds.seen, OddKinds.slot.count"),
        (switched, "Switched.has_switched"),
        (class_attribute, "Curriculum.epochs"),
        (function_callback, "collect(): losses"),
        (global_counter, "next_step(): STEPS"),
        (teacher, "follow(): slow"),
        (namespace, "counted(): kept.calls"),
        (own_generator, "loss_fn"),
        (queue_in_the_model, "model.last"),
        (forward_hook, "hook(): seen"),
        (gradient_hook, "<lambda>(): a default"),
        (inner_optimizer, "optimizer.inner.state"),
        (schedule, "factor(): calls"),
        (counting_dataset, "train_dataset.reads"),
        (metric_of_several_steps, "measure(): mean"),
    ],
)
def test_state_without_an_effect_yet_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Callable[[Path], ds.Trainer], name: str
) -> None:
    build(tmp_path).train()
    assert any(f"training has changed {name}, which no checkpoint contains" in each for each in warned(caplog))


def test_a_verdict_names_what_it_does_not_prove(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer(tmp_path, Patience(), Average(), Crash(7)).train()
    again = trainer(tmp_path, Patience(), Average())
    again.train()
    run = RunFile(tmp_path).load()
    assert run is not None and run.legs[-1].resumed == again.state.resume_proof
    proof = run.legs[-1].resumed
    assert proof is not None and (proof.verdict, proof.unsaved) == ("exact", "Average.shadow, Patience.bad")
    assert proof.line == (
        "resumed exactly: steps 5 to 7 repeated bit for bit; the later steps are not proven, since training changes "
        "Average.shadow, Patience.bad, which no checkpoint contains"
    )


def test_a_verdict_names_what_the_leg_before_was_warned_of(tmp_path: Path) -> None:
    class Seldom(ds.Callback):
        last = 0.0

        def on_step_end(self, ctx: ds.StepEndContext) -> None:
            if ctx.step == 3:
                self.last = float(ctx.loss)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer(tmp_path, Seldom(), Crash(7)).train()
    again = trainer(tmp_path, Seldom())
    again.train()
    assert again.state.resume_proof is not None
    assert again.state.resume_proof.unsaved == "Seldom.last"


def test_a_difference_is_said_with_what_may_cause_it(tmp_path: Path) -> None:
    class Delayed(Patience):
        def on_before_backward(self, ctx: Any) -> None:
            ctx.outputs["loss"] = ctx.outputs["loss"] * (2.0 if self.bad == 6 else 1.0)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer(tmp_path, Delayed(), Crash(7)).train()
    again = trainer(tmp_path, Delayed())
    again.train()
    proof = again.state.resume_proof
    assert proof is not None and (proof.verdict, proof.differs_at) == ("differs", 7)
    assert proof.line.endswith("or the script is another; training changes Delayed.bad, which no checkpoint contains")


def test_another_structure_of_the_model_is_named_before_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prune(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            torch.nn.utils.parametrizations.weight_norm(ctx.model.layers[0])

    listener = Listener({"on_step_end": prune})
    trainer(tmp_path, listener).train()
    assert any("the structure of model.layers.0" in each and "Build the model so" in each for each in warned(caplog))
    with pytest.raises(ds.StateMismatch, match="parametrizations"):
        trainer(tmp_path, listener).train()


class MadeInForward(TinyRegression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.ones(x.shape[1]))
        return super().forward(x, y)


def test_what_the_first_forward_pass_makes_is_named_before_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, model=MadeInForward()).train()
    assert any("the structure of model" in each and "call it on a batch" in each for each in warned(caplog))
    with pytest.raises(ds.StateMismatch, match=r"unexpected in the checkpoint: scale(?s:.*)call it on a batch once"):
        trainer(tmp_path, model=MadeInForward()).train()


# -- what is not ------------------------------------------------------------------------------------------------------


class Healthy(ds.Callback):
    """Has a time, a flag of each leg's first step, an attribute that it makes, a cache, and what the run saves."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.since = 0.0
        self.is_ready = False
        self.sizes: dict[str, int] = {}

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.since, self.is_ready = time.monotonic(), True
        self.optimizer, self.newest = ctx.optimizer, float(ctx.loss)
        for name, weight in ctx.model.named_parameters():
            self.sizes.setdefault(f"{name} {ctx.state.global_step // 2}", weight.numel())


class Cached(Counting):
    """Keeps samples that it has read, draws from its own generator, and knows the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = [None] * LENGTH
        self.generator = np.random.default_rng(1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.kept[index] is None:
            self.kept[index] = self.samples[index]
        self.generator.random()
        return self.kept[index]


class Epochs(Cached):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Dropping(TinyRegression):
    """Counts in attributes and buffers, which are saved with the model."""

    calls = 0
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.mean = self.mean + x.mean()
        return super().forward(x, y)


class Remembers:
    """A loss function with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return squared(out, batch)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Saved(Average):
    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shadow = state


@pytest.mark.parametrize("dataset", [Cached, Epochs])
def test_what_is_saved_or_made_again_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dataset: type[Cached]
) -> None:
    model = Dropping()
    first = trainer(tmp_path / "first", Healthy(model), Saved(), model=model, train_dataset=dataset())
    first.train()
    second = trainer(tmp_path / "second", model=Outputs(), loss_fn=Remembers())
    second.train()
    assert warned(caplog) == []


def test_what_only_a_library_changes_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bar = pytest.importorskip("tqdm").tqdm(total=10, disable=True)

    def count(ctx: Any) -> None:
        bar.n += 1

    trainer(tmp_path, Listener({"on_step_end": count})).train()
    assert warned(caplog) == []


def output_for_the_loss(output_dir: Path) -> ds.Trainer:
    kept: dict[str, Any] = {"sums": []}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept["output"], kept["sums"] = output, [output.sum()] * (1 + len(kept["sums"]) % 2)

    model = Outputs()
    model.layers[0].register_forward_hook(keep)
    return trainer(output_dir, model=model, loss_fn=lambda out, batch: squared(out, batch) + 0.0 * kept["output"].sum())


def newest_samples(output_dir: Path) -> ds.Trainer:
    class Newest(Counting):
        def __init__(self) -> None:
            self.samples = tiny_regression_data(LENGTH)
            self.newest: OrderedDict[int, str] = OrderedDict()
            self.sizes: list[int | None] = [None] * LENGTH

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            self.newest[index], self.sizes[index] = f"sample {index}", index
            self.newest.move_to_end(index)
            if len(self.newest) > 4:
                self.newest.popitem(last=False)
            return self.samples[index]

    return trainer(output_dir, train_dataset=Newest())


def metrics(output_dir: Path) -> ds.Trainer:
    class Accuracy:
        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.total = 0.0

        def compute(self) -> float:
            return self.total

    mean = pytest.importorskip("torchmetrics").MeanMetric
    measured, at_saves, now_and_then = [Accuracy(), mean()], mean(), mean()

    def evaluate(ctx: Any) -> None:
        for each in measured:
            each.reset()
        measured[0].total += float(ctx.loss)
        measured[1].update(ctx.loss)
        measured[1].compute()
        at_saves.update(ctx.loss)
        if ctx.step % 2 == 0:  # as after a record
            at_saves.reset()
            now_and_then.reset()
            for _ in range(ctx.step):
                now_and_then.update(ctx.loss)

    return trainer(output_dir, Listener({"on_step_end": evaluate}))


def thread(output_dir: Path) -> ds.Trainer:
    class Uploader(threading.Thread):
        def run(self) -> None:
            pass

    uploader = Uploader()

    def start(ctx: Any) -> None:
        if ctx.state.global_step == 3:
            uploader.start()
            uploader.join()

    return trainer(output_dir, Listener({"on_step_end": start}))


def late_buffer(output_dir: Path) -> ds.Trainer:
    class Masked(TinyRegression):
        calls = 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                self.register_buffer("mask", torch.ones(3), persistent=False)
            return super().forward(x, y)

    return trainer(output_dir, model=Masked())


@pytest.mark.parametrize("build", [output_for_the_loss, newest_samples, metrics, thread, late_buffer])
def test_what_is_set_again_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Callable[[Path], ds.Trainer]
) -> None:
    build(tmp_path).train()
    assert warned(caplog) == []


def test_what_a_loop_keeps_in_a_saved_dict_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(TinyRegression):
        def __init__(self) -> None:
            super().__init__()
            self.sums = {"last": torch.zeros(())}

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = super().forward(x, y)
            self.sums = {"last": loss.detach()}
            return loss

        def get_extra_state(self) -> dict[str, Tensor]:
            return self.sums

        def set_extra_state(self, state: dict[str, Tensor]) -> None:
            self.sums = state

    model, losses, best = Scaled(), list[float](), {"step": 0, "weights": torch.zeros(3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(tiny_regression_data(LENGTH), batch_size=4)
    args = arguments(tmp_path, max_steps=10, save_steps=4, eval_steps=2, save_in_background=False)

    def evaluate() -> dict[str, float]:
        best["step"] += 2
        best["weights"] += 1
        losses.append(1.0)
        return {"eval_loss": 1.0}

    state = {"best": best, "kept": {"losses": losses}}
    with ds.Run(args, model=model, optimizer=optimizer, loader=loader, evaluate=evaluate, state=state) as run:
        for batch in run.batches():
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss=loss)
    assert warned(caplog) == []


def test_a_variable_that_the_loop_sets_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, number = TinyRegression(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(tiny_regression_data(LENGTH), batch_size=4)
    args = arguments(tmp_path, max_steps=10, save_steps=4, save_in_background=False)

    def say(ctx: Any) -> None:
        str(number)

    with ds.Run(
        args, model=model, optimizer=optimizer, loader=loader, callbacks=[ds.on(ds.Event.STEP_END, say)]
    ) as run:
        for batch in run.batches():
            number += 1
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step_end(loss)
    assert number == 10
    assert warned(caplog) == []


# -- what each leg sets anew -------------------------------------------------------------------------------------------


class Distance(ds.Callback):
    """From the weights with which training began."""

    def on_train_begin(self, ctx: ds.TrainBeginContext) -> None:
        self.first = [weight.detach().clone() for weight in ctx.model.parameters()]
        self.zeros, self.began = torch.zeros(3), time.time()


def test_what_a_leg_begins_with_otherwise_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trainer(tmp_path, Distance(), Crash(7)).train()
    trainer(tmp_path, Distance()).train()
    assert warned(caplog) == []
    run = RunFile(tmp_path).load()
    proof = run.legs[-1].resumed if run is not None else None
    assert proof is not None
    assert (proof.verdict, proof.why) == ("exact", "Distance.first was another as the leg began")


# -- how it is looked at ----------------------------------------------------------------------------------------------


def test_a_look_calls_nothing_and_copies_nothing() -> None:
    class Refusing:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class Lazy(dict[str, int]):
        def items(self) -> Any:
            raise AssertionError

    class Text(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = str.__hash__

    class Holder:
        def __init__(self) -> None:
            self.refusing, self.lazy, self.text, self.count = Refusing(), Lazy(a=1), Text("a"), 0
            self.fake = FakeTensorMode().from_tensor(torch.ones(3))
            self.numbers, self.samples = list(range(1_000_000)), dict.fromkeys(range(100_000))
            self.columns, self.rows = np.zeros((1_000_000, 4))[:, :3], torch.zeros(4, 1_000_000)[:, ::2]

    held = Holder()
    unsaved = Unsaved(list, {"held": held}, list)
    unsaved.begin()
    held.count, held.text = 1, Text("b")
    tracemalloc.start()
    names, (_, most) = unsaved.names(), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert names == ["held.count"]
    assert most < 4_000_000  # bytes


def test_what_is_forgotten_takes_no_memory() -> None:
    newest: dict[int, int] = {}

    def remember(number: int) -> None:
        newest.clear()
        newest[number] = number

    unsaved = Unsaved(list, {"remember": remember}, list)
    unsaved.begin()
    for number in range(100):
        remember(number)
        assert unsaved.names() == []
    assert len(unsaved._known) == 1
