"""Callbacks named in a file: which, with what, and the error when that cannot be."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from config import sample
from config.sample import Beat, Colour, Window
from dalsegno.callbacks import DivergenceDetector, JsonLogger
from dalsegno.config.signature import coerce, complaint
from dalsegno.stateful.annotations import Mismatch
from support.small import small_trainer

BEAT = "config.sample:Beat"


def beat(**given: Any) -> dict[str, Any]:
    (made,) = ds.load_callbacks([{"use": BEAT, **given}])
    assert isinstance(made, Beat)
    return made.given


# --- where they come from ---------------------------------------------------------------------------------------------

TOML = """
callbacks = [
  "GradNormLogger",
  {use = "DivergenceDetector", patience = 5},
  {use = "config.sample:Beat", every = 3, limit = inf, windows = [{begin = 1}]},
]
"""
YAML = """
callbacks:
  - GradNormLogger
  - {use: DivergenceDetector, patience: 5}
  - use: config.sample:Beat
    every: 3
    limit: .inf
    windows:
      - begin: 1
"""
JSON = """
{"callbacks": [
  "GradNormLogger",
  {"use": "DivergenceDetector", "patience": 5},
  {"use": "config.sample:Beat", "every": 3, "limit": "Infinity", "windows": [{"begin": 1}]}
]}
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)])
def test_every_kind_of_file_says_the_same(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    logger, detector, own = ds.load_callbacks(tmp_path / name)
    assert [each.key for each in (logger, detector, own)] == ["GradNormLogger", "DivergenceDetector", "Beat"]
    assert isinstance(detector, DivergenceDetector)
    assert detector._divergence._settings.patience == 5
    assert isinstance(own, Beat)
    assert (own.given["every"], own.given["limit"], own.given["windows"]) == (3, math.inf, [Window(1)])


def test_a_dict_and_a_list_are_taken_too_and_left_as_they_are() -> None:
    entries: list[Any] = ["JsonLogger", {"use": BEAT}]
    for source in (entries, {"callbacks": entries}):
        assert [type(each) for each in ds.load_callbacks(source)] == [JsonLogger, Beat]
    assert entries == ["JsonLogger", {"use": BEAT}]


def test_keywords_that_a_constructor_passes_on(tmp_path: Path) -> None:
    trainer = small_trainer(
        tmp_path, *ds.load_callbacks([{"use": "JsonLogger", "run": "baseline", "lr": 0.1}]), max_steps=1
    )
    trainer.train()
    header = json.loads((tmp_path / "logs" / "train.jsonl").read_text().splitlines()[0])
    assert (header["run"], header["lr"]) == ("baseline", 0.1)


def test_a_name_is_the_key_whether_the_constructor_takes_it_or_not() -> None:
    entries = [{"use": "JsonLogger", "name": "mine"}, {"use": BEAT, "name": "one"}, {"use": BEAT, "name": "two"}]
    assert [each.key for each in ds.load_callbacks(entries)] == ["mine", "one", "two"]


def test_a_function_that_makes_one() -> None:
    (made,) = ds.load_callbacks(["config.sample:make_other"])
    assert isinstance(made, sample.Other)


# --- packages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which packages can be installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path, package: str, **offered: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in offered.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dalsegno.callbacks]", *lines]))


def test_what_an_installed_package_offers_has_a_bare_name(plugins: Path) -> None:
    install(plugins, "beats", Heart="config.sample:Beat")
    (made,) = ds.load_callbacks([{"use": "Heart", "every": 7}])
    assert isinstance(made, Beat)
    assert made.given["every"] == 7
    with pytest.raises(ds.UnknownName, match="unknown callback 'Hart'; did you mean 'Heart'"):
        ds.load_callbacks(["Hart"])


def test_one_name_of_two_packages_is_no_name(plugins: Path) -> None:
    install(plugins, "beats", JsonLogger="config.sample:Beat", Mine="config.sample:Beat")
    with pytest.raises(
        ds.ConfigurationError, match="'JsonLogger' is provided by built-in and beats; name one of them as mod"
    ):
        ds.load_callbacks(["JsonLogger"])
    assert len(ds.load_callbacks(["Mine"])) == 1


def test_a_broken_package_is_named(plugins: Path) -> None:
    install(plugins, "beats", Gone="no_such_module:Beat", Text="config.sample:BUILT")
    with pytest.raises(
        ds.ConfigurationError, match="'Gone', provided by beats, cannot be imported: ModuleNotFoundError"
    ):
        ds.load_callbacks(["Gone"])
    with pytest.raises(ds.ConfigurationError, match="'Text', provided by beats, cannot be imported: AttributeError"):
        ds.load_callbacks(["Text"])


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "written", "given"),
    [
        ("every", 3, 3),
        ("mode", "loud", "loud"),
        ("weight", 2, 2.0),
        ("weight", 2.5, 2.5),
        ("limit", None, None),
        ("limit", 1, 1.0),
        ("path", "a/b", Path("a/b")),
        ("names", ["a", "b"], ["a", "b"]),
        ("pair", [1, "x"], (1, "x")),
        ("shown", ["a"], ["a"]),
        ("shown", {"a": ".2f"}, {"a": ".2f"}),
        ("due", {"steps": 3}, ds.Every(steps=3)),
        ("windows", [{"begin": 1, "end": 2}, {"begin": 3}], [Window(1, 2), Window(3)]),
        ("colour", "blue", Colour.BLUE),
        ("hidden", "whatever", "whatever"),
        ("loose", [1, {"a": 2}], [1, {"a": 2}]),
    ],
)
def test_an_argument_becomes_what_its_annotation_says(argument: str, written: Any, given: Any) -> None:
    received = beat(**{argument: written})[argument]
    assert received == given
    assert type(received) is type(given)


@pytest.mark.parametrize(
    ("argument", "written", "complaint"),
    [
        ("evry", 3, "unknown argument 'evry'; did you mean 'every'?"),
        ("every", "three", "every='three'; needs int"),
        ("every", 3.5, "every=3.5; needs int"),
        ("every", True, "every=True; needs int"),
        ("mode", "louder", "mode='louder'; allowed: 'loud', 'soft'"),
        ("mode", False, "mode=False; allowed: 'loud', 'soft'; put it in quotes"),
        ("weight", "1e-3", "weight='1e-3'; needs float; this is a string: write it without quotes, and in YAML with a"),
        ("limit", [], "limit=[]; needs float or None"),
        ("names", "a", "names='a'; needs a list of str"),
        ("names", ["a", 1], "names[1]=1; needs str"),
        ("pair", [1], "pair=[1]; needs 2 values, int, str"),
        ("pair", [1, 2], "pair[1]=2; needs str"),
        ("shown", {"a": 1}, "shown['a']=1; needs str"),
        ("shown", 3, "shown=3; needs a list of str or a table of str or None"),
        ("due", {"step": 3}, "due={'step': 3}; unknown key for Every: 'step'; did you mean 'steps'?"),
        ("due", {"steps": -1}, "due={'steps': -1}; Every(steps=-1): needs an integer, 0 (never) or more"),
        ("due", 3, "due=3; needs a table with steps, epochs, seconds, minutes or None"),
        ("windows", [{"begin": 1}, {}], "windows[1]={}; Window needs begin"),
        ("windows", [{"begin": "x"}], "windows[0].begin='x'; needs int"),
        ("colour", "green", "colour='green'; allowed: 'red', 'blue'"),
    ],
)
def test_one_that_does_not_fit_is_refused_before_anything_is_built(
    argument: str, written: Any, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"callbacks": [BEAT, {"use": BEAT, "name": "second", argument: written}]}))
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.load_callbacks(path)
    assert str(caught.value).startswith(f"{path}, callbacks[1] (config.sample:Beat): {complaint}")
    assert sample.built == []


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"use": "JsonLoger"}, "(JsonLoger): unknown callback 'JsonLoger'; did you mean 'JsonLogger'?"),
        ({"use": "config.sample:Baet"}, "(config.sample:Baet): unknown class of config.sample 'Baet'; did you mean"),
        (
            {"use": "config.smple:Beat"},
            "(config.smple:Beat): no module 'config.smple', neither in the current directory nor installed",
        ),
        ({"use": ":Beat"}, "(:Beat): ':Beat': name the class as module:name, such as my_package.hooks:Beat"),
        ({"use": BEAT, "enabled": "no"}, f"({BEAT}): enabled='no'; needs true or false"),
        ({"use": BEAT, "name": 3}, f"({BEAT}): name=3; needs a string"),
        ({"use": "config.sample:Picky"}, "(config.sample:Picky): size= is missing; needs int"),
        ({"use": "config.sample:Picky", "size": 10}, "(config.sample:Picky): size=10; allowed are 0 to 9"),
        ({"use": "config.sample:Other", "size": 3}, "(config.sample:Other): unknown argument 'size'; known: none"),
        ({"every": 3}, ": is {'every': 3}; must be {use = \"…\"}, with the name of a callback and its arguments"),
        (3, ": is 3; must be {use ="),
    ],
)
def test_an_entry_that_cannot_be(entry: Any, complaint: str) -> None:
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.load_callbacks([entry])
    assert str(caught.value).startswith(
        f"the configuration, callbacks[0]{'' if complaint[0] == ':' else ' '}{complaint}"
    )


def test_what_a_constructor_raises_goes_up_as_it_is_with_the_place() -> None:
    with pytest.raises(RuntimeError, match="below zero") as caught:
        ds.load_callbacks([{"use": "config.sample:Picky", "size": -1}])
    assert caught.value.__notes__ == ["raised while building the configuration, callbacks[0] (config.sample:Picky)"]


@pytest.mark.parametrize(
    ("callbacks", "complaint"),
    [
        ([BEAT, BEAT], "the configuration: callbacks: a Beat and a Beat both have the key 'Beat'; set name= on one"),
        (["config.sample:make_nothing"], "the configuration: callbacks: None is"),
        ({"use": BEAT}, "the configuration, callbacks: must be a list"),
    ],
)
def test_callbacks_that_cannot_be_together(callbacks: Any, complaint: str) -> None:
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.load_callbacks({"callbacks": callbacks})
    assert str(caught.value).startswith(complaint)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.toml", "callbacks = [", "(at end of document)"),
        ("a.toml", "a = 1\na = 2\n", "(at line 2, column 6)"),
        ("a.yaml", "callbacks: [", "line 1, column 13"),
        ("a.yaml", "callbacks: !!python/object/apply:os.getcwd []", "could not determine a constructor for the tag"),
        ("a.yaml", "- JsonLogger", "contains a list; must be a table with names"),
        ("a.json", '{"callbacks": ', "line 1 column 15"),
        ("a.ini", "", "a configuration file must end in .toml, .yaml, .yml, .json"),
    ],
)
def test_a_broken_file_is_named_with_the_place(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.load_callbacks(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert complaint in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ds.NotFound, match=r"run\.toml: no such file"):
        ds.load_callbacks(tmp_path / "run.toml")


# --- default callbacks ------------------------------------------------------------------------------------------------


def keys(tmp_path: Path, *entries: Any) -> list[str]:
    """Of those that a trainer has which listen to anything."""
    from dalsegno.testing import TinyRegression, tiny_regression_data

    trainer = ds.Trainer(
        TinyRegression(),
        ds.TrainingArguments(tmp_path, use_cpu=True),
        train_dataset=tiny_regression_data(),
        callbacks=ds.load_callbacks(entries),
    )
    return [each.key for each in trainer.callbacks if each.handled_events() and each.key != "model flops"]


def test_a_default_is_replaced_or_taken_away(tmp_path: Path) -> None:
    assert keys(tmp_path) == ["DefaultMetrics", "ProgressCallback", "InfoCallback"]
    changed = {"use": "ProgressCallback", "header_interval": 5}
    assert keys(tmp_path, changed) == ["DefaultMetrics", "InfoCallback", "ProgressCallback"]
    off = {"use": "ProgressCallback", "enabled": False}
    assert keys(tmp_path, off) == ["DefaultMetrics", "InfoCallback"]
    assert keys(tmp_path, off, changed) == ["DefaultMetrics", "InfoCallback", "ProgressCallback"]


def test_any_other_that_is_not_enabled_is_left_out_and_checked_all_the_same(tmp_path: Path) -> None:
    assert ds.load_callbacks([{"use": BEAT, "enabled": False}]) == []
    assert sample.built == []
    with pytest.raises(ds.UnknownName, match="unknown argument 'evry'"):
        ds.load_callbacks([{"use": BEAT, "enabled": False, "evry": 3}])


@dataclass
class Stage:
    steps: int
    following: Stage | None = None


def test_a_dataclass_that_contains_itself() -> None:
    assert coerce({"steps": 1, "following": {"steps": 2}}, Stage) == Stage(1, Stage(2))
    with pytest.raises(Mismatch) as found:
        coerce({"steps": 1, "following": {"steps": "two"}}, Stage)
    assert complaint(found.value) == ".following.steps='two'; needs int"


def test_a_key_that_does_not_match() -> None:
    with pytest.raises(Mismatch) as found:
        coerce({"one": 1.0}, dict[int, float])
    assert complaint(found.value) == "='one'; as a key, needs int"
