"""``dalsegno check-resume`` on trainers that lie in the user's own folder, one of them broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.command import dalsegno
from dalsegno.cli import main

OWN_TRAINING = '''
import torch
import dalsegno as ds
from dalsegno.distributed import collectives
from dalsegno.callbacks import JsonLogger
from dalsegno.testing import TinyRegression, tiny_regression_data

LIMIT = 3.0


class Counter(ds.Callback):
    """Changes what is logged and how is trained, by a number that is in no checkpoint."""

    def __init__(self):
        self.seen = 0

    def on_microbatch_end(self, ctx):
        self.seen += 1

    def on_pre_optimizer_step(self, ctx):
        if self.seen > 10:
            for parameter in ctx.model.parameters():
                parameter.grad.mul_(0.5)

    def on_log(self, ctx):
        ctx.logs["seen"] = self.seen


class Remembering(Counter):
    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Untrue(Counter):
    """Says that its number means nothing."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def build(output_dir, callback, samples=100):
    torch.manual_seed(0)
    print("building in", output_dir)
    return ds.Trainer(
        TinyRegression(),
        ds.TrainingArguments(
            output_dir=output_dir,
            max_steps=12,
            save_steps=3,
            per_device_train_batch_size=8 // collectives.world_size(),
            save_in_background=False,  # so that a kill between two steps always costs as many
            logging_steps=1,
            use_cpu=True,
        ),
        train_dataset=tiny_regression_data(samples),
        callbacks=[callback, JsonLogger()],
    )


def good(output_dir):
    return build(output_dir, Remembering())


def broken(output_dir):
    return build(output_dir, Counter())


def good_epochs(output_dir):
    return build(output_dir, Remembering(), 24)


def broken_epochs(output_dir):
    return build(output_dir, Untrue(), 48)


def from_file(args, callbacks):
    args.max_steps = 6
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(20), callbacks=callbacks)


def alone():
    return build("runs/a", Remembering())


def raises(output_dir):
    raise RuntimeError("the data is not there")


def nothing(output_dir):
    return None


class OwnLoop:
    def __init__(self, output_dir):
        self.args = ds.TrainingArguments(output_dir, max_steps=12, save_steps=3, logging_steps=1, use_cpu=True)

    def train(self):
        torch.manual_seed(0)
        model = TinyRegression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(tiny_regression_data(20), batch_size=4)
        with ds.Run(self.args, model=model, optimizer=optimizer, loader=loader, callbacks=[JsonLogger()]) as run:
            for batch in run.batches():
                loss = model(**batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step_end(loss=loss)
        return run.result
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own, where the user is."""
    (tmp_path / "own_training.py").write_text(OWN_TRAINING)
    (tmp_path / "torn.py").write_text("import os\nimport no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that the path is put back
    return tmp_path


def test_a_good_one(folder: Path) -> None:
    done = dalsegno("check-resume", "own_training:good", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "reference: finished without interruption after 12 steps"
    assert lines[1].startswith("killed at on_step_begin no. ")
    assert lines[2].startswith("killed before write of step-000000")
    assert lines[-2].startswith("Nothing differs after these kills. Kills at other steps may show a difference: ")
    assert "building in" not in done.stdout
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"own_training.py", "torn.py"}


def test_a_broken_one_is_found_out_down_to_tensor_and_record(folder: Path) -> None:
    words = ["--kill-at", "on_step_end:11", "--kill-at", "write:2:.partial", "--keep", "kept", "--json"]
    done = dalsegno("check-resume", "own_training:broken", *words, folder=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is False
    differences = {row["what"]: row["difference"] for row in result["rows"] if not row["identical"]}
    assert "elements differ, by up to" in differences["model"]
    assert differences["logs/train.jsonl"].startswith("train.jsonl record 11.seen: 10 and 1")
    assert "killed at on_step_end no. 11\nkilled before write of .partial no. 2\n" in done.stderr
    kept = folder / "kept"
    assert (kept / "killed.txt").read_text().count("building in") == 3
    assert (kept / "reference" / "logs" / "train.jsonl").exists()
    assert main(["check-resume", "own_training:good", "--keep", "kept"]) == 2


def test_a_configuration(folder: Path) -> None:
    """The function that 'train' calls, and its settings; but in folders of the check's own."""
    (folder / "run.toml").write_text(
        'trainer = "own_training:from_file"\n[args]\noutput_dir = "runs/a"\nuse_cpu = true\n'
    )
    words = ["--set", "args.save_steps=2", "--set", "args.save_in_background=false", "--kill-at", "on_step_end:4"]
    done = dalsegno("check-resume", "run.toml", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1] == "killed at on_step_end no. 4"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["own_training:goood"], "unknown function of own_training 'goood'; did you mean 'good'?"),
        (["own_trainin:good"], "no module 'own_trainin', neither in the current directory nor installed"),
        (["own_training.more:good"], "no module 'own_training.more', neither in the current directory nor installed"),
        (["torn:good"], "torn: cannot be imported\nTraceback"),
        (["own_training"], "'own_training': name the function as module:name"),
        (["own_training:LIMIT"], "unknown function of own_training 'LIMIT'"),
        (
            ["own_training:good", "--kill-at", "on_stepend:3"],
            "unknown event or operation 'on_stepend'; did you mean 'on_step_end'?",
        ),
        (["own_training:good", "--ranks", "0"], "--ranks 0: needs at least 1"),
        (["own_training:good", "--keep", "."], "--keep .: not an empty directory"),
        (["own_training:raises"], "RuntimeError: the data is not there"),
        (["own_training:from_file"], "own_training:from_file: args= is missing; it is of a configuration: give that"),
        (
            ["own_training:alone"],
            "own_training:alone: has no argument output_dir=; write it as def build(output_dir, …)",
        ),
        (["own_training:good", "--set", "args.max_steps=3"], "--set is for a configuration"),
        (["own_training:nothing"], "own_training:nothing returned a NoneType, not a trainer"),
        (["own_training:good", "--kill-at", "on_step_end:13"], "the run of 12 steps was never killed"),
    ],
)
def test_what_cannot_be_tried(
    words: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-resume", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_thoroughly(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In each epoch, by kill and by stop; a run of the user's that differs is broken off at each place alone."""
    status = main(["check-resume", "own_training:good_epochs", "--thorough", "--ranks", "1"])
    printed = capsys.readouterr()
    assert status == 0, printed
    lines = printed.out.splitlines()
    tried = [line for line in lines if line.startswith("exact      1 rank")]
    assert sum("killed" in line for line in tried) == sum("stopped" in line for line in tried) == 7
    assert all(sum(f"epoch {epoch}" in line for line in tried) == (4 if epoch < 4 else 2) for epoch in range(1, 5))
    assert lines[-1] == "Nothing differs at these places."


def test_what_differs_is_shown_with_its_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check-resume", "own_training:broken_epochs", "--thorough", "--ranks", "1", "--json"])
    printed = capsys.readouterr()
    assert status == 1, printed
    trials = json.loads(printed.out)
    verdicts = {(trial["breaks"][0]["how"], trial["verdict"]) for trial in trials}
    assert verdicts - {("stop", "exact")} == {("kill", "said"), ("stop", "not proven")}, "a stop repeats no step"
    assert [len(trial["breaks"]) for trial in trials] == [1] * 6, "two epochs, the last one's end left out"
    words = {trial["verdict"]: trial["words"] for trial in trials}
    assert words["said"].startswith("not resumed exactly: ")
    assert words["not proven"].startswith("model.layers.0.weight: "), "weights come first"
    assert main(["check-resume", "own_training:good", "--thorough", "--kill-at", "2s"]) == 2


def test_two_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-resume", "own_training:good", "--ranks", "2", "--kill-at", "on_step_end:5"]) == 0
    assert "\nNothing differs after these kills." in capsys.readouterr().out


def test_an_own_loop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-resume", "own_training:OwnLoop", "--kill-at", "on_step_end:5"]) == 0
    assert "\nNothing differs after these kills." in capsys.readouterr().out
