"""Bad input gets an error that says what was wrong, where, and what to do: here is each text."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dalsegno as ds
from dalsegno.callbacks import DefaultMetrics, DivergenceDetector, EarlyStopping, GradNormLogger, JsonLogger, Notify
from dalsegno.checkpoint import Checkpoint, read_tensors, saved_states
from dalsegno.errors import (
    CannotSave,
    ConfigurationError,
    DalsegnoError,
    UnknownDialect,
    UnknownName,
)
from dalsegno.events.table import Event
from dalsegno.policies.retention import Best, Latest
from dalsegno.testing import FaultPlan, TinyRegression, compare_runs, tiny_regression_data
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.small import arguments, small_trainer

NAN = float("nan")

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"max_step": 3}, "unknown argument of TrainingArguments 'max_step'; did you mean 'max_steps'?"),
    "negative": ({"logging_steps": -1}, "logging_steps=-1; needs an integer of at least 0"),
    "nan": ({"learning_rate": NAN}, "learning_rate=nan; needs a number of at least 0"),
    "infinite": ({"max_grad_norm": float("inf")}, "max_grad_norm=inf; needs a number of at least 0"),
    "text": ({"max_steps": "10"}, "max_steps='10'; needs an integer of at least -1"),
    "bool": ({"save_steps": True}, "save_steps=True; needs an integer of at least 0"),
    "no such way": (
        {"parallel": "zero3"},
        "parallel='zero3'; allowed are 'auto', 'none', 'ddp', 'fsdp', FSDP(…), HSDP(…), TensorParallel(…), "
        "Pipeline(…), Parallelized(…), or a list of them",
    ),
    "two precisions": ({"bf16": True, "fp16": True}, "bf16=True and fp16=True; choose one of them"),
    "nothing to do": (
        {"max_steps": 0},
        "max_steps=0 or num_train_epochs=0 trains nothing; set max_steps=-1 to use epochs",
    ),
    "broken steps": ({"save_steps": 2.5}, "save_steps=2.5; needs an integer of at least 0"),
    "keep none": ({"save_total_limit": 0}, "save_total_limit=0; needs at least 1, or None for all"),
    "no best": (
        {"load_best_model_at_end": True},
        "load_best_model_at_end=True needs evaluations and checkpoints; see eval_steps, save_steps",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(tmp_path: Path, name: str) -> None:
    settings, text = ARGUMENTS[name]
    with pytest.raises(ConfigurationError) as caught:
        arguments(tmp_path, **settings)
    assert str(caught.value) == text


def test_a_misspelt_argument_is_a_type_error_too(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        arguments(tmp_path, max_step=3)


class Misspelt(ds.Callback):
    def on_step_ended(self, ctx: Any) -> None: ...


CALLBACKS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nan threshold": (
        lambda: DivergenceDetector(threshold=NAN),
        ConfigurationError,
        "threshold is nan; allowed: a finite number over 0, or None",
    ),
    "nan relative threshold": (
        lambda: DivergenceDetector(relative_threshold=NAN),
        ConfigurationError,
        "relative_threshold is nan; allowed: a finite number over 1, or None",
    ),
    "nan smoothing": (
        lambda: DivergenceDetector(smoothing=NAN),
        ConfigurationError,
        "smoothing is nan; allowed: a number over 0, up to 1",
    ),
    "a baseline as fast as the average": (
        lambda: DivergenceDetector(baseline_smoothing=0.3),
        ConfigurationError,
        "baseline_smoothing is 0.3; allowed: a number over 0 and under smoothing, which is 0.3, or None",
    ),
    "no such action": (
        lambda: DivergenceDetector(action="pause"),  # type: ignore[arg-type]
        ConfigurationError,
        "action is 'pause'; allowed: 'stop', 'abort' or 'rollback'",
    ),
    "nan flops": (
        lambda: DefaultMetrics(peak_hardware_flops=NAN),
        ConfigurationError,
        "DefaultMetrics: peak_hardware_flops=nan; needs a finite number over 0",
    ),
    "a field that is taken": (
        lambda: JsonLogger(epoch=3),
        ConfigurationError,
        "JsonLogger: epoch= is part of every record; use another key",
    ),
    "a class": (
        lambda: Notify,
        ConfigurationError,
        "callbacks: Notify is a class whose constructor needs arguments (missing a required argument: 'urls'); give an "
        "instance: Notify(…)",
    ),
    "a function": (
        lambda: iter,
        UnknownDialect,
        "callbacks: <built-in function iter> is not a dalsegno.Callback, and its dialect cannot be detected; if it was "
        "written for another library, name it: dalsegno.adapt(callback, dialect).",
    ),
    "a misspelt handler": (
        Misspelt,
        UnknownName,
        "unknown handler in Misspelt: 'on_step_ended'; did you mean 'on_step_end'?",
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(tmp_path: Path, name: str) -> None:
    """When the trainer is built, at the latest."""
    build, kind, text = CALLBACKS[name]
    with pytest.raises(kind) as caught:
        small_trainer(tmp_path, build())
    assert str(caught.value).partition(" Known dialects:")[0] == text
    assert isinstance(caught.value, DalsegnoError)


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"train_dataset": None}, "give exactly one of train_dataset= and train_dataloader="),
    "data twice": ({"train_dataloader": []}, "give exactly one of train_dataset= and train_dataloader="),
    "evaluation twice": (
        {"eval_dataset": [1], "eval_dataloader": [1]},
        "give eval_dataset= or eval_dataloader=, not both",
    ),
    "a number for data": (
        {"train_dataset": 7},
        "a int is not a dataset: it needs __len__ and __getitem__, or __iter__; pass a loader as train_dataloader= or "
        "eval_dataloader=",
    ),
    "a loader for data": (
        {"train_dataset": DataLoader(tiny_regression_data(8))},
        "a DataLoader is a loader, which already yields batches: pass it as train_dataloader= or eval_dataloader=",
    ),
    "a name for data": (
        {"train_dataset": "imdb"},
        "'imdb' is a string, not a dataset; pass the dataset that it names",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts(tmp_path: Path, name: str) -> None:
    parts, text = PARTS[name]
    with pytest.raises(ConfigurationError) as caught:
        small_trainer(tmp_path, parts=parts)
    assert str(caught.value) == text


def test_an_output_dir_that_is_a_dangling_link(tmp_path: Path) -> None:
    (link := tmp_path / "run").symlink_to(gone := tmp_path / "gone")
    with pytest.raises(ConfigurationError) as caught:
        small_trainer(link, max_steps=1).train()
    assert str(caught.value) == f"output_dir={str(link)!r}: is a symbolic link to {gone}, which does not exist"


def test_an_output_dir_that_cannot_be_written_to(tmp_path: Path) -> None:
    """At once, not at the first checkpoint."""
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(ConfigurationError) as caught:
        small_trainer(file / "run")
    assert str(caught.value) == f"output_dir={str(file / 'run')!r}: {file} is not a folder that can be written to"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_are_not_there(tmp_path: Path, parallel: str) -> None:
    expected = f"parallel='{parallel}': this process was started without a launcher, .* torchrun .*parallel='auto'"
    with pytest.raises(ConfigurationError, match=expected):
        small_trainer(tmp_path, parallel=parallel)


def test_texts_that_nobody_has_made_tensors_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a batch of 4 texts \('text'…\); convert .* data_collator="):
        small_trainer(tmp_path, parts={"train_dataset": ["text"] * 8}, max_steps=1).train()


@pytest.mark.parametrize("origin", [None, 7, [Path("a")]])
def test_a_beginning_that_is_none(tmp_path: Path, origin: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"resume_from_checkpoint=.*; pass True .*, False .* or a checkpoint's"
    ):
        small_trainer(tmp_path, max_steps=1).train(origin)


def test_evaluating_on_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.evaluate\(\): there is no evaluation set; pass eval_data"):
        small_trainer(tmp_path).evaluate()


COUNT_ON_EVALUATIONS: dict[str, tuple[list[ds.Callback], dict[str, Any], str]] = {
    "early stopping": ([EarlyStopping()], {}, "EarlyStopping needs evaluations"),
    "a divergence of the evaluation": ([DivergenceDetector(use_eval_loss=True)], {}, "DivergenceDetector needs"),
    "keep the best": (
        [],
        {"keep": Latest(2) | Best(2)},
        r"keep=Latest\(count=2\) \| Best\(count=2\) needs evaluations",
    ),
}


@pytest.mark.parametrize("name", COUNT_ON_EVALUATIONS)
def test_who_counts_on_evaluations_is_told_at_once_that_there_are_none(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first step; where there is a set, and only no schedule, a callback may still ask for them."""
    own, settings, text = COUNT_ON_EVALUATIONS[name]
    settings = {"max_steps": 2, "save_steps": 1, **settings}
    with pytest.raises(ConfigurationError, match=f"{text}.* no evaluation set: pass eval_dataset="):
        small_trainer(tmp_path, *own, eval_steps=1, **settings).train()
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "run.json").exists()
    loop = OwnLoop(tmp_path, *own, **settings)
    with (
        pytest.raises(ConfigurationError, match=text),
        ds.Run(loop.args, model=loop.model, optimizer=loop.optimizer, loader=loop.loader, callbacks=own),
    ):
        pass
    small_trainer(tmp_path, *own, parts={"eval_dataset": tiny_regression_data(4)}, **settings).train()
    assert [each for each in caplog.messages if "none is scheduled: set eval_steps" in each]


def test_a_best_that_no_evaluation_gives(tmp_path: Path) -> None:
    """At the first evaluation, before its step is saved."""
    parts = {"eval_dataset": tiny_regression_data(4)}
    settings = {"max_steps": 4, "eval_steps": 1, "save_steps": 1, "keep": "Best(2, metric=los)"}
    with pytest.raises(UnknownName, match=r"unknown metric in keep=.*: 'los'; did you mean 'eval_loss'"):
        small_trainer(tmp_path, parts=parts, **settings).train()
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_metric_that_no_evaluation_gives(tmp_path: Path) -> None:
    settings = {"metric_for_best_model": "acuracy", "max_steps": 1, "eval_steps": 1}
    trainer = small_trainer(tmp_path, parts={"eval_dataset": tiny_regression_data(4)}, **settings)
    with pytest.raises(UnknownName, match="unknown metric_for_best_model 'eval_acuracy'; "):
        trainer.train()


# --- states -----------------------------------------------------------------------------------------------------------


class Keeps(ds.Callback):
    """Has whatever it is given for a state."""

    name = "MyCb"

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Foo: ...


STATES: dict[str, tuple[Any, str]] = {
    "an object in a list": ({"history": [1, 2, 3, Foo()]}, "callbacks.MyCb.history[3]: cannot save a Foo"),
    "a function": ({"step": print}, "callbacks.MyCb.step: cannot save a builtin_function_or_method"),
    "a set": ({"seen": {1, 2}}, "callbacks.MyCb.seen: cannot save a set"),
    "a fraction in a tuple": ([(0, Fraction(1, 3))], "callbacks.MyCb[0][1]: cannot save a Fraction"),
    "a module": ({"model": nn.Linear(1, 1)}, "callbacks.MyCb.model: cannot save a Linear"),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_cannot_be_saved(tmp_path: Path, name: str) -> None:
    state, text = STATES[name]
    with pytest.raises(CannotSave) as caught:
        small_trainer(tmp_path, Keeps(state), max_steps=1, save_steps=1).train()
    assert str(caught.value).startswith(text)
    assert not (tmp_path / "checkpoints").exists(), "known before the first step, not at the first save"


class Grows(ds.Callback):
    """Has a state that can be saved until the first step is done."""

    def __init__(self) -> None:
        self.seen: object = None

    def on_step_end(self, ctx: ds.StepEndContext) -> None:
        self.seen = {ctx.step}

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.seen = state["seen"]


def test_a_state_that_cannot_be_saved_any_more(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match=r"callbacks.Grows.seen: cannot save a set; save sorted\(it\)"):
        small_trainer(tmp_path, Grows(), max_steps=1, save_steps=1).train()
    assert not list(tmp_path.glob("checkpoints/*")), "no half checkpoint stays"


def test_half_a_state(tmp_path: Path) -> None:
    class Typo(ds.Callback):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_statedict(self, state: dict[str, int]) -> None: ...

    expected = (
        "Typo has state_dict but no load_state_dict: its state would be lost; is 'load_statedict' meant to be it?"
    )
    with pytest.raises(ds.ConfigurationError, match=re.escape(expected)):
        small_trainer(tmp_path, Typo())


def test_a_handler_with_other_parameters(tmp_path: Path) -> None:
    class Foreign(ds.Callback):
        def on_save(self, args: object, state: object, control: object) -> None: ...

    with pytest.raises(
        ds.ConfigurationError, match=r"Foreign.on_save\(args.*\): a handler takes \(self, ctx\).*TrainerCallback"
    ):
        small_trainer(tmp_path, Foreign())


def test_the_best_model_of_nothing_that_is_measured(tmp_path: Path) -> None:
    data, model = tiny_regression_data(8), TinyRegression()
    args = ds.TrainingArguments(tmp_path, max_steps=1, load_best_model_at_end=True)
    with pytest.raises(ds.ConfigurationError, match="needs eval_dataset= or eval_dataloader="):
        ds.Trainer(model, args, train_dataset=data)
    with pytest.raises(ds.ConfigurationError, match="to one of eval_web_loss, eval_code_loss"):
        ds.Trainer(model, args, train_dataset=data, eval_dataset={"web": data, "code": data})


def test_arguments_of_the_trainer(tmp_path: Path) -> None:
    data, model, args = tiny_regression_data(8), TinyRegression(), ds.TrainingArguments(tmp_path, max_steps=1)
    with pytest.raises(ds.UnknownName, match="unknown argument of Trainer 'train_data'; did you mean 'train_dataset'"):
        ds.Trainer(model, args, train_data=data)
    with pytest.raises(ds.UnknownName, match="'lr'; did you mean 'learning_rate'"):
        ds.TrainingArguments(tmp_path, lr=1e-3)
    with pytest.raises(
        ds.ConfigurationError, match=r"Trainer\(TrainingArguments, TinyRegression, …\); it takes the model"
    ):
        ds.Trainer(args, model, train_dataset=data)
    with pytest.raises(ds.ConfigurationError, match=r"give a list: \[Callback\(…\)\]"):
        ds.Trainer(model, args, train_dataset=data, callbacks=ds.Callback())


def test_a_fault_plan_with_two_moments() -> None:
    with pytest.raises(ConfigurationError, match="give exactly one of event=, operation=, seconds="):
        FaultPlan(event=Event.STEP_END, seconds=1.0)


def test_what_is_refused_in_a_save_reaches_on_exception(tmp_path: Path) -> None:
    seen: list[str] = []
    watch = Listener({"on_exception": lambda ctx: seen.append(str(ctx.exception))})
    with pytest.raises(CannotSave):
        small_trainer(tmp_path, watch, Grows(), max_steps=1, save_steps=1).train()
    assert seen[0].startswith("callbacks.Grows.seen: cannot save a set")


def trained(tmp_path: Path, *callbacks: Any, **parts: Any) -> ds.TrainResult:
    return small_trainer(tmp_path, *callbacks, parts=parts, max_steps=1).train()


def in_a_step(tmp_path: Path, do: Callable[[Any], object]) -> object:
    return trained(tmp_path, Listener({"on_step_end": lambda ctx: (do(ctx), None)[1]}))


def with_handler(tmp_path: Path, name: str) -> object:
    return trained(tmp_path, type("C", (ds.Callback,), {name: lambda self, ctx: None})())


def frozen(tmp_path: Path) -> object:
    return small_trainer(tmp_path, model=TinyRegression().requires_grad_(False))


def resumed(tmp_path: Path, origin: str) -> object:
    trained(tmp_path)
    return small_trainer(tmp_path).train(origin.format(tmp_path))


def at(name: str) -> Callable[[Path], object]:
    return lambda tmp_path: getattr(small_trainer(tmp_path), name)


def killed() -> ds.TrainingLog:
    return ds.open_log(Path(__file__).parents[1] / "golden" / "logs" / "killed")


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(TinyRegression().parameters())


def own_loop(tmp_path: Path, **parts: Any) -> ds.Run:
    model = TinyRegression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ds.Run(arguments(tmp_path, max_steps=1), **{"model": model, "optimizer": optimizer, "loader": [], **parts})


EVERYDAY: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "an optimizer's class": (
        lambda path: trained(path, optimizer=torch.optim.AdamW),
        ConfigurationError,
        r"optimizer: AdamW is a class; give an instance: AdamW\(model.parameters\(\), …\)",
    ),
    "Hugging Face's pair": (
        lambda path: trained(path, optimizer=(adamw(), None)),
        ConfigurationError,
        r"optimizer: a tuple; .* apart: optimizer=…, lr_scheduler=…",
    ),
    "a name for a loss": (
        lambda path: trained(path, loss_fn="mse"),
        ConfigurationError,
        "loss_fn='mse'; needs a function",
    ),
    "a name for a collator": (
        lambda path: trained(path, data_collator="pad"),
        ConfigurationError,
        "data_collator='pad'; needs a function",
    ),
    "a weight that is none": (
        lambda path: trained(path, loss_weight=lambda batch: NAN),
        ConfigurationError,
        "loss_weight returned nan for a batch; needs a number of at least 0",
    ),
    "a weight below none": (
        lambda path: trained(path, loss_weight=lambda batch: torch.tensor(-1)),
        ConfigurationError,
        r"loss_weight returned tensor\(-1\) for a batch",
    ),
    "a weight in words": (
        lambda path: trained(path, loss_weight=lambda batch: "all"),
        ConfigurationError,
        "loss_weight returned 'all' for a batch",
    ),
    "a detached loss": (
        lambda path: trained(path, loss_fn=lambda *_: torch.tensor(1.0)),
        ConfigurationError,
        "the loss has no gradient: it depends on no trained parameter",
    ),
    "columns for a dataset": (
        lambda path: trained(path, train_dataset={"x": [1.0], "y": [2.0]}),
        ConfigurationError,
        "a dict of 'x', 'y' is not a dataset, since it has no sample 0; pass one of its values",
    ),
    "callbacks by name": (
        lambda path: ds.Trainer(TinyRegression(), arguments(path), callbacks="JsonLogger"),
        ConfigurationError,
        r"callbacks='JsonLogger'; give a list: \[JsonLogger\(…\)\]",
    ),
    "no list of callbacks": (
        lambda path: ds.Trainer(TinyRegression(), arguments(path), callbacks=None),  # type: ignore[arg-type]
        ConfigurationError,
        r"callbacks=None; give a list: \[\]",
    ),
    "a callback's name": (
        lambda path: trained(path, "JsonLogger"),
        UnknownDialect,
        r"'JsonLogger' is a text; give the callback, or dalsegno.load_callbacks\(\['JsonLogger'\]\)",
    ),
    "an optimizer's class in an own loop": (
        lambda path: ds.Run(
            arguments(path, max_steps=1),
            model=TinyRegression(),
            optimizer=torch.optim.SGD,  # type: ignore[arg-type]
            loader=[],
        ),
        ConfigurationError,
        r"optimizer: SGD is a class; give an instance: SGD\(model.parameters\(\), …\)",
    ),
    "no settings in an own loop": (
        lambda path: ds.Run("runs/a", model=TinyRegression(), optimizer=adamw(), loader=[]),  # type: ignore[arg-type]
        ConfigurationError,
        r"Run\(str, model=TinyRegression, …\); it takes TrainingArguments, and the model",
    ),
    "no optimizer in an own loop": (
        lambda path: ds.Run(arguments(path, max_steps=1), model=TinyRegression(), optimizer=None, loader=[]),  # type: ignore[arg-type]
        ConfigurationError,
        "optimizer=None: your loop steps it, so pass the one that you have built, or a list of several",
    ),
    "a metric for an evaluation in an own loop": (
        lambda path: own_loop(path, evaluate={"eval_loss": 1.0}),
        ConfigurationError,
        r"evaluate=\{'eval_loss': 1.0\}; needs a function",
    ),
    "a list for the state of an own loop": (
        lambda path: own_loop(path, state=[1]),
        ConfigurationError,
        r"state=\[1\]; needs a dict of the objects to save, by name",
    ),
    "a name for the loader of an own loop": (
        lambda path: own_loop(path, loader="imdb"),
        ConfigurationError,
        "a str is not a loader; pass an object that yields batches, such as a DataLoader",
    ),
    "a file for the folder of an own loop": (
        lambda path: own_loop(Path(__file__)),
        ConfigurationError,
        "test_error_messages.py is not a folder that can be written to",
    ),
    "a schedule's name": (
        lambda path: trained(path, lr_scheduler="cosine"),
        ConfigurationError,
        r"TrainingArguments\(lr_scheduler_type='cosine'\)",
    ),
    "a schedule's class": (
        lambda path: trained(path, lr_scheduler=torch.optim.lr_scheduler.StepLR),
        ConfigurationError,
        r"StepLR is a class; give an instance: StepLR\(optimizer, …\)",
    ),
    "no loss": (lambda path: trained(path, loss_fn=lambda *_: None), ConfigurationError, "the loss is None; needs one"),
    "many losses": (
        lambda path: trained(path, loss_fn=lambda *_: torch.ones(3, requires_grad=True)),
        ConfigurationError,
        r"the loss is a tensor of shape \(3,\); needs one number",
    ),
    "no as a flag": (
        lambda path: in_a_step(path, lambda ctx: setattr(ctx.control, "should_training_stop", "no")),
        ConfigurationError,
        "control.should_training_stop='no'; needs True or False",
    ),
    "all frozen": (frozen, ConfigurationError, r"all parameters of the model are frozen; set requires_grad_\(True\)"),
    "from a run's folder": (
        lambda path: resumed(path, "{}"),
        ConfigurationError,
        "the folder of a run; pass one of its checkpoints, such as .*step-00000500.* set output_dir= to it",
    ),
    "from the latest": (
        lambda path: resumed(path, "latest"),
        ConfigurationError,
        "'latest': there is no such path; pass True for the newest checkpoint",
    ),
    "an empty set among others": (
        lambda path: trained(path, eval_dataset={"full": tiny_regression_data(4), "void": []}),
        ds.EmptyDataset,
        "the set 'void': the dataset has length 0",
    ),
    "a path for logs": (lambda path: ds.open_logs(str(path / "none")), ds.NotFound, "none: no such file or folder"),
    "no path for a log": (
        lambda _: ds.open_log(None),
        ConfigurationError,
        r"^open_log\(path=None\): needs str \| os.PathLike",
    ),  # type: ignore[arg-type]
    "a number for a checkpoint": (
        lambda path: ds.export_model(7, path),  # type: ignore[arg-type]
        ConfigurationError,
        r"^export_model\(checkpoint=7\): needs str \| pathlib.Path",
    ),
    "a name for a curve": (
        lambda _: ds.find_spikes("loss"),  # type: ignore[arg-type]
        ConfigurationError,
        r"^find_spikes\(series='loss'\): needs dalsegno.analysis.series.Series",
    ),
    "a number for a record": (
        lambda path: small_trainer(path).log(7),  # type: ignore[arg-type]
        ConfigurationError,
        r"^log\(metrics=7\): needs collections.abc.Mapping",
    ),
    "a list for weights": (
        lambda _: ds.Mixture({"a": tiny_regression_data(4)}, [1.0]),  # type: ignore[arg-type]
        ConfigurationError,
        r"^Mixture\(weights=a list of 1\): needs collections.abc.Mapping",
    ),
    "a flag for changes": (
        lambda path: small_trainer(path).train(allow_changes=True),  # type: ignore[arg-type]
        ConfigurationError,
        r"^allow_changes=True; needs names, as \('model',\)",
    ),
    "nothing to predict": (
        lambda path: small_trainer(path).predict(None),
        ConfigurationError,
        "^None has no samples to evaluate; pass a dataset, or a dict of several",
    ),
    "overridden methods of Hugging Face's Trainer": (
        lambda _: type("Weighted", (ds.Trainer,), dict.fromkeys(["compute_loss", "evaluate", "mine"], len)),
        ConfigurationError,
        r"^class Weighted: training never .* use instead\n  of compute_loss\(\): loss_fn=, .*\n  of evaluate\(\): .*",
    ),
    "a handler that a mixin gives the trainer": (
        lambda _: type("Mine", (type("Mixin", (), {"on_step_end": len}), ds.Trainer), {}),
        ConfigurationError,
        r"^class Mine: .*\n  of on_step_end\(\): the same method of a callback in callbacks=\[",
    ),
    "compute_loss": (at("compute_loss"), AttributeError, "'compute_loss'; use loss_fn=, a function"),
    "fit": (at("fit"), AttributeError, r"'fit'; use trainer.train\(\)"),
    "save_model": (at("save_model"), AttributeError, "use dalsegno.export_model"),
    "the trainer's step": (at("global_step"), AttributeError, "use trainer.state.global_step"),
    "the context's step": (
        lambda path: in_a_step(path, lambda ctx: ctx.global_step),
        AttributeError,
        "'StepEndContext' object has no attribute 'global_step'; use ctx.state.global_step",
    ),
    "the trainer's optimizer": (at("optimizer"), AttributeError, "'optimizer'; use ctx.optimizer in a callback"),
    "a wrong name of the trainer": (at("evalute"), AttributeError, r"'evalute'; did you mean trainer.evaluate\?"),
    "a record's step": (
        lambda path: trained(path, Listener({"on_log": lambda ctx: ctx.step})),
        AttributeError,
        r"^'LogContext' object has no attribute 'step'; did you mean ctx.state.global_step\?",
    ),
    "should_stop is set": (
        lambda path: in_a_step(path, lambda ctx: setattr(ctx.control, "should_stop", True)),
        AttributeError,
        "set should_training_stop",
    ),
    "should_stop is read": (
        lambda path: in_a_step(path, lambda ctx: ctx.control.should_stop),
        AttributeError,
        "set should_training_stop",
    ),
    "Lightning's handler": (
        lambda path: with_handler(path, "on_train_batch_end"),
        UnknownName,
        "'on_train_batch_end'; did you mean 'on_microbatch_end'",
    ),
    "a function": (lambda path: trained(path, lambda ctx: None), UnknownDialect, r"dalsegno.on\(dalsegno.Event"),
    "an argument too many": (lambda path: type("C", (ds.Callback,), {})(3), TypeError, "argument"),
    "a setting that is set later": (
        lambda path: setattr(arguments(path), "max_step", 3),
        UnknownName,
        "unknown setting of TrainingArguments 'max_step'; did you mean 'max_steps'",
    ),
    "a setting that is set by a callback": (
        lambda path: in_a_step(path, lambda ctx: setattr(ctx.args, "max_grad_norm", 0.5)),
        ConfigurationError,
        r"^args.max_grad_norm = 0.5: settings are fixed while a run trains: .* the command set changes logging_steps",
    ),
    "a number for a metric of several": (
        lambda _: killed().series(["loss", 1]),  # type: ignore[list-item]
        ConfigurationError,
        r"^series\(names\[1\]=1\): needs collections.abc.Iterable\[str\]",
    ),
    "a number for a file": (
        lambda _: ds.export_log(killed(), "csv", 7),  # type: ignore[arg-type]
        ConfigurationError,
        r"^export_log\(path=7\): needs str \| pathlib.Path \| typing.BinaryIO",
    ),
    "numbers for a curve": (
        lambda _: ds.detect_divergence([1.0]),  # type: ignore[arg-type]
        ConfigurationError,
        r"^detect_divergence\(series=a list of 1\): needs dalsegno.analysis.series.Series",
    ),
    "names for curves": (
        lambda _: ds.sweep_settings([killed().metric("loss")], ["loss"]),  # type: ignore[list-item]
        ConfigurationError,
        r"^sweep_settings\(bad\[0\]='loss'\): needs collections.abc.Sequence\[dalsegno",
    ),
    "an unknown axis": (
        lambda _: ds.View(x="stp"),  # type: ignore[arg-type]
        UnknownName,
        "^unknown x of View 'stp'; did you mean 'step'",
    ),
    "one end of an axis": (
        lambda _: ds.View(xlim=(1,)),  # type: ignore[arg-type]
        ConfigurationError,
        r"^View\(xlim=a tuple of 1\): needs tuple\[float \| None, float \| None\] \| None",
    ),
    "a text on an axis": (
        lambda _: ds.View(ylim=(0, "1")),  # type: ignore[arg-type]
        ConfigurationError,
        r"^View\(ylim\[1\]='1'\): needs",
    ),
    "numbers for stages": (
        lambda _: ds.Pipeline([1]),  # type: ignore[list-item]
        ConfigurationError,
        r"^Pipeline: stages=\[1\]; give a number",
    ),
    "stages and names": (
        lambda _: ds.Pipeline(["a", ["b"]]),  # type: ignore[list-item]
        ConfigurationError,
        r"^Pipeline: stages=\['a', \['b'\]\]; give a number",
    ),
    "no moment for a fault": (lambda _: FaultPlan(), ConfigurationError, "give exactly one of event=, operation=, sec"),
    "an unknown operation": (
        lambda _: FaultPlan(operation="renam"),  # type: ignore[arg-type]
        UnknownName,
        "^unknown operation of FaultPlan 'renam'; did you mean 'rename'",
    ),
    "no time for a fault": (lambda _: FaultPlan(seconds=NAN), ConfigurationError, r"FaultPlan\(seconds=nan\): must be"),
    "the text of a path for a checkpoint": (
        lambda _: Checkpoint.open("runs/a"),  # type: ignore[arg-type]
        ConfigurationError,
        r"^open\(path='runs/a'\): needs pathlib.Path",
    ),
    "a path for an opened checkpoint": (saved_states, ConfigurationError, r"^saved_states\(checkpoint=PosixPath\("),  # type: ignore[dict-item]
    "a path for the tensors' checkpoint": (read_tensors, ConfigurationError, r"^read_tensors\(checkpoint=PosixPath"),  # type: ignore[dict-item]
    "one run to compare": (
        lambda path: compare_runs(path, None),  # type: ignore[arg-type]
        ConfigurationError,
        r"^compare_runs\(second=None\): needs str",
    ),
    "a text for a number of samples": (
        lambda path: small_trainer(path).skip_samples("3"),  # type: ignore[arg-type]
        ConfigurationError,
        r"^skip_samples\(samples='3'\): needs int",
    ),
    "no folder": (lambda _: ds.TrainingArguments(""), ConfigurationError, "output_dir=''; name the run's folder"),
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_what_is_often_got_wrong_in_the_first_week(tmp_path: Path, name: str) -> None:
    do, kind, text = EVERYDAY[name]
    with pytest.raises(kind, match=text):
        do(tmp_path)


def test_what_is_often_tried_in_the_first_week_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A set given to evaluate(), a read-only record, one path for a report; a schedule of evaluations without a set."""
    trainer = small_trainer(
        tmp_path / "run", JsonLogger(), GradNormLogger(), max_steps=1, logging_steps=1, eval_steps=1
    )
    trainer.train()
    said = "GradNormLogger does nothing, evaluations (Every(steps=1)) are not made: there is no"
    assert [each for each in caplog.messages if each.startswith(said)]
    in_a_step(tmp_path / "log", lambda ctx: ctx.trainer.log(MappingProxyType({"note": 1})))
    assert trainer.evaluate({"web": tiny_regression_data(4)}).keys() >= {"eval_web_loss"}
    assert ds.write_report(tmp_path / "run", tmp_path / "report.html").stat().st_size
    assert [log.name for log in ds.open_logs(str(tmp_path / "run"))] == ["run"]
    assert ds.TrainingArguments("~/run").output_dir == Path.home() / "run"


def test_an_optimizer_that_a_run_cannot_see(tmp_path: Path) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            self.param_groups, self.state, self.defaults = [{"params": [*model.parameters()], "lr": 0.1}], {}, {}  # type: ignore[assignment]

    model = TinyRegression()
    with pytest.raises(ConfigurationError, match="optimizer: Bare has no hooks, by which a run sees its steps; call"):
        ds.Run(arguments(tmp_path), model=model, optimizer=Bare(model), loader=[])
