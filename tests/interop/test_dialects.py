"""What holds for every dialect: how a callback's is found, and what is refused when it is added."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import JsonLogger
from dalsegno.events.adapters import CallbackAdapter
from interop.libraries import EXAMPLES
from support.small import small_trainer

for_each_library = pytest.mark.parametrize("library", EXAMPLES.values(), ids=EXAMPLES)


class Plain:
    """No base class, and no handler whose parameters tell what it was written for."""


def counting(library: ModuleType, base: type | None = None) -> Any:
    """A callback that counts the beginnings of training."""

    def count(self: Any, *given: Any, **named: Any) -> None:
        self.begins += 1

    return type("Counting", (base or library.base(),), {"begins": 0, library.AT_TRAIN_BEGIN: count})()


@for_each_library
def test_by_the_module_of_a_base_class(library: ModuleType) -> None:
    derived = type("Derived", (type("Own", (library.base(),), {}),), {})()
    adapted = ds.adapt(derived)
    assert isinstance(adapted, CallbackAdapter)
    assert (adapted.dialect, adapted.key) == (library.DIALECT, "Derived")
    assert adapted.handled_events() in ([], [ds.Event.TRAIN_END]), "what is not overridden is not called"


@pytest.mark.parametrize(("folder", "library"), EXAMPLES.items(), ids=EXAMPLES)
def test_the_library_need_not_be_installed(folder: str, library: ModuleType, tmp_path: Path) -> None:
    """dalsegno has a base class of its own for each: with the library's methods, which are not called."""
    shipped = getattr(importlib.import_module(f"dalsegno.interop.{folder}"), library.SHIPPED)
    methods = {name for name in dir(library.base()) if not name.startswith("_") and callable(getattr(shipped, name))}
    assert library.AT_TRAIN_BEGIN in methods
    assert ds.adapt(shipped()).handled_events() in ([], [ds.Event.TRAIN_END])
    callback = counting(library, shipped)
    assert ds.adapt(callback).dialect == library.DIALECT  # type: ignore[attr-defined]
    small_trainer(tmp_path, callback, max_steps=1).train()
    assert callback.begins == 1


@for_each_library
def test_a_name_is_by_default_that_of_the_class(library: ModuleType) -> None:
    adapted = ds.adapt(counting(library))
    assert adapted.name == adapted.key == "Counting"
    adapted.name = "own"
    assert adapted.name == adapted.key == "own"
    adapted.name = None
    assert adapted.name == "Counting"


def test_so_is_that_of_dalsegnos_own() -> None:
    class Own(ds.Callback): ...

    class Named(Own):
        name = "named"

    assert [Own().name, Named().name, JsonLogger().name, JsonLogger(name="second").name] == [
        *("Own", "named", "JsonLogger", "second")
    ]


@for_each_library
def test_by_name(library: ModuleType) -> None:
    adapted = ds.adapt(Plain(), library.DIALECT, name="mine")
    assert isinstance(adapted, CallbackAdapter)
    assert (adapted.dialect, adapted.key) == (library.DIALECT, "mine")
    with pytest.raises(ds.UnknownName, match=f"unknown dialect '{library.DIALECT[:-1]}'; did you mean"):
        ds.adapt(Plain(), library.DIALECT[:-1])


def test_else_the_dialects_are_listed(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="its dialect cannot be detected") as caught:
        small_trainer(tmp_path, Plain())
    known = ", ".join(sorted(repr(library.DIALECT) for library in EXAMPLES.values()))
    assert str(caught.value).endswith(f"Known dialects: {known}")


@for_each_library
def test_a_misspelt_method(library: ModuleType, tmp_path: Path) -> None:
    method, nearest = library.MISSPELT
    misspelt = type("Misspelt", (library.base(),), {method: lambda self, *given: None})()
    with pytest.raises(ds.UnknownName) as caught:
        small_trainer(tmp_path, misspelt)
    assert str(caught.value) == f"unknown handler in Misspelt: {method!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("library", "method", "called"),
    [(library, *each) for library in EXAMPLES.values() for each in library.CALLED],
)
def test_a_method_with_other_parameters(library: ModuleType, method: str, called: str, tmp_path: Path) -> None:
    wrong = type("Wrong", (library.base(),), {method: lambda self: None})()
    with pytest.raises(ds.ConfigurationError, match=rf"Wrong\.{method}\(\) cannot be called as") as caught:
        small_trainer(tmp_path, wrong)
    assert called in str(caught.value)


@for_each_library
def test_two_of_one_class_need_names(library: ModuleType, tmp_path: Path) -> None:
    own = type("Own", (library.base(),), {})
    with pytest.raises(ds.DuplicateKey, match="a Own and a Own both have the key 'Own'; set name= on one of them") as e:
        small_trainer(tmp_path, own(), own())
    assert str(e.value).endswith("e.g. dalsegno.adapt(Own(…), name='Own-2')")
    small_trainer(tmp_path, own(), ds.adapt(own(), name="Own-2"))


def test_one_of_dalsegnos_own_is_named_likewise(tmp_path: Path) -> None:
    second = ds.adapt(JsonLogger(path="second.jsonl"), name="JsonLogger-2")
    small_trainer(tmp_path, JsonLogger(), second)
    assert second.key == "JsonLogger-2"


@for_each_library
def test_a_class_stands_for_an_instance(library: ModuleType, tmp_path: Path) -> None:
    counting_class = type(counting(library))
    trainer = small_trainer(tmp_path, counting_class, max_steps=1)
    trainer.train()
    callback = trainer.pop_callback(counting_class)
    assert (type(callback), callback.begins) == (counting_class, 1)  # type: ignore[attr-defined]
    with pytest.raises(ds.UnknownName, match="unknown callback 'Counting'"):
        trainer.remove_callback(counting_class)


@for_each_library
def test_a_class_that_needs_arguments_is_refused(library: ModuleType, tmp_path: Path) -> None:
    needy = type("Needy", (library.base(),), {"__init__": lambda self, every: None})
    with pytest.raises(ds.ConfigurationError, match="Needy is a class whose constructor needs arguments"):
        small_trainer(tmp_path, needy)


@for_each_library
def test_foreign_callbacks_come_and_go(library: ModuleType, tmp_path: Path) -> None:
    callback = counting(library)
    trainer = small_trainer(tmp_path, max_steps=2, lr_scheduler_type="constant")
    trainer.add_callback(callback)
    trainer.train()
    trainer.remove_callback(callback)
    trainer.args.max_steps = 4
    trainer.train()
    assert callback.begins == 1


@for_each_library
def test_a_configuration_may_name_them(library: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base, module = library.base(), f"own_{library.DIALECT}"
    (tmp_path / f"{module}.py").write_text(
        f"from {base.__module__} import {base.__name__}\n\n\n"
        f"class Beat({base.__name__}):\n    def __init__(self, every: int):\n        self.every = every\n\n\n"
        "class Plain: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first, second = ds.load_callbacks(
        [{"use": f"{module}:Beat", "every": 3}, {"use": f"{module}:Beat", "every": 4, "name": "other"}]
    )
    assert [(each.key, each.__wrapped__.every) for each in (first, second)] == [("Beat", 3), ("other", 4)]  # type: ignore[attr-defined]
    (third,) = ds.load_callbacks([{"use": f"{module}:Plain", "dialect": library.DIALECT, "name": "third"}])
    assert isinstance(third, CallbackAdapter)
    assert (third.key, third.dialect) == ("third", library.DIALECT)
    with pytest.raises(ds.ConfigurationError, match=r"callbacks\[0\] .*: unknown dialect 'no such'"):
        ds.load_callbacks([{"use": f"{module}:Plain", "dialect": "no such"}])
