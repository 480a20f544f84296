"""A whole run from a file: what is checked, what is built, and what is kept of it in the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from config import sample
from dalsegno.testing import run_ranks

BEAT = "config.sample:Beat"


def settings(output_dir: Path, **more: Any) -> dict[str, Any]:
    """A run of two steps."""
    args = {"output_dir": str(output_dir), "max_steps": 2, "use_cpu": True, "disable_tqdm": True}
    return {"trainer": "config.sample:build", "args": args, **more}


def kept(output_dir: Path, name: str = "config.json") -> Any:
    return json.loads((output_dir / name).read_text())


# --- from file to trainer ---------------------------------------------------------------------------------------------


def test_the_function_gets_settings_callbacks_and_its_own_arguments(tmp_path: Path) -> None:
    config = ds.RunConfig.read(settings(tmp_path / "a", factory={"length": 40}, callbacks=[{"use": BEAT, "every": 4}]))
    assert sample.built == [], "nothing is built before it is asked for"
    trainer = config.build()
    assert trainer.args.max_steps == 2
    assert [each.given["every"] for each in trainer.callbacks if isinstance(each, sample.Beat)] == [4]
    assert trainer.train().reason == "finished"
    assert trainer.state.epoch == pytest.approx(2 / 5), "two steps of 8 samples, of 40"


def test_a_file_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'trainer = "config.sample:build"\n[args]\noutput_dir = "a"\nlearning_rate = 1e-3\neval_strategy = "epoch"\n'
        '[factory]\nlength = 8\n[[callbacks]]\nuse = "JsonLogger"\nrun = "baseline"\n'
    )
    config = ds.RunConfig.read(path)
    assert (config.args.learning_rate, config.args.eval_strategy) == (1e-3, "epoch")
    assert (config.trainer, config.factory) == ("config.sample:build", {"length": 8})
    assert [each.use for each in config.entries] == ["JsonLogger"]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"trainer": None}, "the configuration, trainer: is missing; name the function that builds the trainer"),
        ({"trainer": 3}, "the configuration, trainer: is 3; name the function"),
        (
            {"trainer": "config.sample:biuld"},
            "the configuration, trainer: unknown function of config.sample 'biuld'; did",
        ),
        (
            {"trainer": "config.sample:build_alone"},
            "the configuration, trainer: has no argument args=; write it as def build",
        ),
        ({"arg": {}}, "the configuration: unknown key 'arg'; did you mean 'args'?"),
        ({"args": []}, "the configuration, args: is []; must be a table, [args]"),
        ({"args": {}}, "the configuration, args: output_dir= is missing; needs str or Path"),
        (
            {"args": {"output_dir": "a", "max_step": 1}},
            "the configuration, args: unknown argument 'max_step'; did you m",
        ),
        (
            {"args": {"output_dir": "a", "lr": 1}},
            "the configuration, args: unknown argument 'lr'; did you mean 'learnin",
        ),
        (
            {"args": {"output_dir": "a", "max_steps": "1"}},
            "the configuration, args: max_steps='1'; needs int; this is ",
        ),
        (
            {"args": {"output_dir": "a", "max_steps": 0}},
            "the configuration, args: max_steps=0 or num_train_epochs=0 tr",
        ),
        ({"factory": {"lenght": 1}}, "the configuration, factory: unknown argument 'lenght'; did you mean 'length'?"),
        ({"factory": {"length": "1"}}, "the configuration, factory: length='1'; needs int"),
        ({"factory": {"args": {}}}, "the configuration, factory.args: has its own section; remove it here"),
        (
            {"callbacks": [{"use": BEAT, "evry": 1}]},
            "the configuration, callbacks[0] (config.sample:Beat): unknown arg",
        ),
    ],
)
def test_what_cannot_work_is_said_with_its_place(changed: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    tables = {key: value for key, value in {**settings(tmp_path), **changed}.items() if value is not None}
    with pytest.raises(ds.ConfigurationError) as caught:
        ds.RunConfig.read(tables)
    assert str(caught.value).startswith(complaint)
    assert sample.built == []


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("build_nothing", "config.sample:build_nothing returned a NoneType, not a trainer"),
        (
            "build_without_them",
            "config.sample:build_without_them returned a trainer without the callbacks it was given",
        ),
    ],
)
def test_what_the_function_returns_is_looked_at(function: str, complaint: str, tmp_path: Path) -> None:
    config = ds.RunConfig.read(settings(tmp_path, trainer=f"config.sample:{function}", callbacks=[BEAT]))
    with pytest.raises(ds.ConfigurationError, match=complaint):
        config.build()


# --- other values than the file's -------------------------------------------------------------------------------------


def overridden(tmp_path: Path, *assignments: str, **more: Any) -> ds.RunConfig:
    return ds.RunConfig.read(settings(tmp_path, **more), assignments)


def test_values_are_toml_and_else_text(tmp_path: Path) -> None:
    changed = ["args.max_steps=7", "args.bf16=true", "args.learning_rate=1e-3", "args.run_name=first try"]
    args = overridden(tmp_path, *changed, "factory.length = 3", "args.output_dir=x=y").args
    assert (args.max_steps, args.bf16, args.learning_rate) == (7, True, 1e-3)
    assert (args.run_name, args.output_dir) == ("first try", Path.cwd() / "x=y")


def test_callbacks_are_found_by_class_or_name_and_added(tmp_path: Path) -> None:
    given = [{"use": "JsonLogger", "run": "a"}, {"use": BEAT, "name": "one"}, {"use": BEAT, "name": "two"}]
    changed = ["JsonLogger.run=b", "two.every=4", "two.windows=[{begin = 2}]", "one.due.steps=5"]
    changed += ["ProgressCallback.enabled=false", "ProgressCallback.header_interval=5"]
    entries = overridden(tmp_path, *(f"callbacks.{each}" for each in changed), callbacks=given).entries
    assert [(each.use, each.arguments) for each in entries] == [
        ("JsonLogger", {"run": "b"}),
        (BEAT, {"due": ds.Every(steps=5)}),
        (BEAT, {"every": 4, "windows": [sample.Window(2)]}),
        ("ProgressCallback", {"header_interval": 5}),
    ]
    assert [each.enabled for each in entries] == [True, True, True, False]


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("args.max_step=3", "--set args.max_step=3: unknown argument 'max_step'; did you mean 'max_steps'?"),
        ("args.max_steps=x", "--set args.max_steps=x: max_steps='x'; needs int"),
        ("arg.max_steps=3", "unknown key in --set arg.max_steps=3: 'arg'; did you mean 'args'?"),
        ("max_steps", "--set max_steps: write it as key=value, such as args.max_steps=100"),
        ("args..x=1", "--set args..x=1: write it as key=value"),
        ("trainer.x=1", "--set trainer.x=1: 'trainer' is 'config.sample:build', which has no keys"),
        ("factory.lenght=1", "--set factory.lenght=1: unknown argument 'lenght'; did you mean 'length'?"),
        ("callbacks.Beat=1", "--set callbacks.Beat=1: name the callback and its argument"),
        ("callbacks.Beat.every=1", "--set callbacks.Beat.every=1: 2 callbacks have that name; set name="),
        ("callbacks.one.evry=1", "--set callbacks.one.evry=1: unknown argument 'evry'; did you mean 'every'?"),
        ("callbacks.JsonLoger.run=b", "--set callbacks.JsonLoger.run=b (JsonLoger): unknown callback 'JsonLoger'; did"),
    ],
)
def test_an_assignment_that_cannot_be_is_named(assignment: str, complaint: str, tmp_path: Path) -> None:
    given = [{"use": BEAT, "name": "one"}, {"use": BEAT, "name": "two"}]
    with pytest.raises(ds.ConfigurationError) as caught:
        overridden(tmp_path, assignment, callbacks=given)
    assert str(caught.value).startswith(complaint)


# --- what the run keeps -----------------------------------------------------------------------------------------------


def train(output_dir: Path, *assignments: str, resume: bool = True) -> Any:
    given = [{"use": "JsonLogger", "run": "a"}, {"use": BEAT, "limit": float("inf")}]
    config = ds.RunConfig.read(settings(output_dir, callbacks=given, factory={"length": 40}), assignments)
    return config.build().train(resume)


def test_every_setting_is_kept_in_the_run_and_can_be_trained_from(tmp_path: Path) -> None:
    train(tmp_path / "a")
    config = kept(tmp_path / "a")
    assert config["since_leg"] == 1
    assert (
        config["args"] == ds.TrainingArguments(tmp_path / "a", max_steps=2, use_cpu=True, disable_tqdm=True).to_dict()
    )
    assert config["factory"] == {"length": 40}
    assert config["callbacks"][0] == {"use": "JsonLogger", "path": None, "name": None, "run": "a"}
    assert config["callbacks"][1]["limit"] == "Infinity"
    again = ds.RunConfig.read(tmp_path / "a" / "config.json", [f"args.output_dir={tmp_path / 'b'}"])
    assert again.build().train().reason == "finished"
    assert kept(tmp_path / "b") == {**config, "args": {**config["args"], "output_dir": str(tmp_path / "b")}}


def test_what_a_former_leg_had_is_kept_if_it_was_another(tmp_path: Path) -> None:
    for assignment in ("args.max_steps=2", "args.max_steps=2", "args.max_steps=4", "args.max_steps=6"):
        train(tmp_path, assignment)
    assert [kept(tmp_path, f"config.json{part}")["args"]["max_steps"] for part in (".0001", ".0002", "")] == [2, 4, 6]
    legs = json.loads((tmp_path / "run.json").read_text())["legs"]
    assert [(leg["leg"], leg["last_step"]) for leg in legs] == [(1, 2), (2, 4), (3, 6)]
    assert [kept(tmp_path, f"config.json{part}")["since_leg"] for part in (".0001", ".0002", "")] == [1, 2, 3]


def test_a_run_that_was_moved_has_the_same_settings(tmp_path: Path) -> None:
    """And is trained from its own file where it is now."""
    trainer = ds.RunConfig.read(settings(tmp_path / "a")).build()
    trainer.add_callback(sample.StopAfterFirst())
    assert trainer.train().reason == "stopped"
    (tmp_path / "a").rename(tmp_path / "b")
    assert ds.RunConfig.read(settings(tmp_path / "b")).build().train().reason == "finished"
    config = kept(tmp_path / "b")
    assert (config["args"]["output_dir"], config["since_leg"]) == (str(tmp_path / "b"), 1)
    assert not (tmp_path / "b/config.json.0001").exists()


def test_the_same_settings_leave_the_file_alone(tmp_path: Path) -> None:
    trainer = ds.RunConfig.read(settings(tmp_path)).build()
    trainer.add_callback(sample.StopAfterFirst())
    assert trainer.train().reason == "stopped"
    before = written(tmp_path / "config.json")
    assert ds.RunConfig.read(settings(tmp_path)).build().train().reason == "finished"
    assert written(tmp_path / "config.json") == before


def written(path: Path) -> tuple[int, int, int]:
    """Which file it is and when it was last written; its time of access moves with every reader."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def test_a_file_that_somebody_has_broken_is_moved_aside(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text("{")
    train(tmp_path)
    assert (tmp_path / "config.json.0001").read_text() == "{"
    assert kept(tmp_path)["args"]["max_steps"] == 2


def test_starting_over_takes_it_to_the_old_timeline(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path, "args.max_steps=3", resume=False)
    assert kept(tmp_path)["args"]["max_steps"] == 3
    assert kept(tmp_path / "rewound" / "timeline.0001")["args"]["max_steps"] == 2
    assert not (tmp_path / "config.json.0001").exists()


def train_on_a_rank(output_dir: Path) -> None:
    train(output_dir, "args.parallel=ddp")


def test_one_rank_of_several_writes_it(tmp_path: Path) -> None:
    run_ranks(train_on_a_rank, 2, tmp_path)
    assert kept(tmp_path)["args"]["parallel"] == "ddp"
    assert sorted(path.name for path in tmp_path.glob("config*")) == ["config.json"]
