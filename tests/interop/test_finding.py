"""How the dialect of a callback is found, what is refused when it is added, and that each dialect is a leaf."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.events.adapters import CallbackAdapter
from support.small import small_trainer


class Plain:
    """No base class: nothing says what it was written for."""

    def on_step_end(self, ctx: Any) -> None: ...


def kempner() -> Any:
    from kempnerforge.training.hooks import TrainingHook

    return TrainingHook


def cerebras() -> Any:
    from cerebras.modelzoo.trainer.callbacks import Callback

    return Callback


def huggingface() -> Any:
    return ds.TrainerCallback


def instructlab() -> Any:
    from instructlab.training import TrainerCallback

    return TrainerCallback


@pytest.mark.parametrize(
    ("base", "dialect"),
    [
        (kempner, "kempnerforge"),
        (cerebras, "cerebras"),
        (huggingface, "huggingface"),
        (instructlab, "instructlab"),
    ],
)
def test_by_the_module_of_a_base_class(base: Any, dialect: str) -> None:
    derived = type("Derived", (type("Own", (base(),), {}),), {})()
    adapted = ds.adapt(derived)
    assert isinstance(adapted, CallbackAdapter)
    assert (adapted.dialect, adapted.key) == (dialect, "Derived")
    assert adapted.handled_events() in ([], [ds.Event.TRAIN_END]), "what is not overridden is not called"


def test_by_name() -> None:
    adapted = ds.adapt(Plain(), "kempnerforge", name="mine")
    assert (adapted.key, adapted.handled_events()) == ("mine", [ds.Event.TRAIN_METRICS])
    with pytest.raises(ds.UnknownName, match="unknown dialect 'kempnerforg'; did you mean 'kempnerforge'"):
        ds.adapt(Plain(), "kempnerforg")


def test_else_the_dialects_are_listed(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"its dialect cannot be detected.*'cerebras', .*'instructlab', 'kempnerforge'"):
        small_trainer(tmp_path, Plain())


def misspelt(base: Any, method: str) -> Any:
    return type("Misspelt", (base,), {method: lambda self, *given: None})()


@pytest.mark.parametrize(
    ("base", "method", "nearest"),
    [
        (kempner, "on_step_ended", "on_step_end"),
        (cerebras, "on_train_batch_ends", "on_train_batch_end"),
        (huggingface, "on_step_ended", "on_step_end"),
        (instructlab, "on_evaluated", "on_evaluate"),
    ],
)
def test_a_misspelt_method(base: Any, method: str, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(ds.UnknownName) as caught:
        small_trainer(tmp_path, misspelt(base(), method))
    assert str(caught.value) == f"unknown handler in Misspelt: {method!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("base", "method", "called"),
    [
        (kempner, "on_eval_end", "(metrics, step)"),
        (cerebras, "on_before_backward", "(trainer, model, outputs)"),
        (cerebras, "on_save_checkpoint", "(trainer, state_dict)"),
        (huggingface, "on_log", "(args, state, control, model=, "),
        (instructlab, "on_save", "(context)"),
    ],
)
def test_a_method_with_other_parameters(base: Any, method: str, called: str, tmp_path: Path) -> None:
    wrong = type("Wrong", (base(),), {method: lambda self: None})()
    with pytest.raises(ds.ConfigurationError, match=rf"Wrong\.{method}\(\) cannot be called as") as caught:
        small_trainer(tmp_path, wrong)
    assert called in str(caught.value)


def test_two_of_one_class_need_names(tmp_path: Path) -> None:
    hook = type("Hook", (kempner(),), {})
    with pytest.raises(ds.DuplicateKey, match="a Hook and a Hook both have the key 'Hook'; set name= on one of them"):
        small_trainer(tmp_path, hook(), hook())
    small_trainer(tmp_path, hook(), ds.adapt(hook(), name="second"))


def test_a_class_is_no_callback(tmp_path: Path) -> None:
    with pytest.raises(ds.ConfigurationError, match="TrainingHook is a class; give an instance"):
        small_trainer(tmp_path, kempner())


def test_foreign_callbacks_come_and_go(tmp_path: Path) -> None:
    steps: list[int] = []
    hook = type("Hook", (kempner(),), {"on_step_end": lambda self, ctx: steps.append(ctx.step)})()
    trainer = small_trainer(tmp_path, max_steps=2, lr_scheduler_type="constant")
    trainer.add_callback(hook)
    trainer.train()
    trainer.remove_callback(hook)
    trainer.args.max_steps = 4
    trainer.train()
    assert steps == [1, 2]


def test_a_configuration_may_name_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_hooks.py").write_text(
        "from kempnerforge.training.hooks import TrainingHook\n\n\n"
        "class Beat(TrainingHook):\n    def __init__(self, every: int):\n        self.every = every\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = ds.load_callbacks(
        [{"use": "own_hooks:Beat", "every": 3}, {"use": "own_hooks:Beat", "every": 4, "name": "other"}]
    )
    (third,) = ds.load_callbacks([{"use": "interop.test_finding:Plain", "dialect": "kempnerforge", "name": "third"}])
    assert (third.key, third.handled_events()) == ("third", [ds.Event.TRAIN_METRICS])
    with pytest.raises(ds.ConfigurationError, match=r"callbacks\[0\] .*: unknown dialect 'kemp'"):
        ds.load_callbacks([{"use": "interop.test_finding:Plain", "dialect": "kemp"}])
    assert [(each.key, each.__wrapped__.every) for each in (first, second)] == [("Beat", 3), ("other", 4)]  # type: ignore[attr-defined]


# --- leaves -----------------------------------------------------------------------------------------------------------

NATIVE_RUN = """
import sys
import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.testing import TinyRegression, tiny_regression_data

class Foreign: ...

args = ds.TrainingArguments(sys.argv[1], max_steps=3, logging_steps=1, save_steps=2, use_cpu=True, disable_tqdm=True)
trainer = ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(), callbacks=[JsonLogger()])
assert trainer.train().reason == "finished"
try:
    trainer.add_callback(Foreign())
except ds.UnknownDialect as error:
    print(str(error).rpartition("Known dialects: ")[2])
"""


@pytest.mark.parametrize(
    ("deleted", "gone"),
    [
        ("kempnerforge", {"kempnerforge"}),
        ("cerebras", {"cerebras"}),
        ("hf", {"huggingface"}),
        (".", {"kempnerforge", "cerebras", "huggingface", "instructlab"}),
    ],
)
def test_without_a_dialect_native_runs_and_the_others_go_on(deleted: str, gone: set[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "dalsegno"
    shutil.copytree(Path(ds.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / "interop" / deleted
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    done = subprocess.run(
        [sys.executable, "-c", NATIVE_RUN, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(copy.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for dialect in ("cerebras", "huggingface", "instructlab", "kempnerforge"):
        assert (repr(dialect) in done.stdout) == (dialect not in gone)
