"""``dalsegno launch``: a configuration, a function or a script on several ranks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import DALSEGNO, cold, environment
from dalsegno.cli import main
from dalsegno.logs import RunFile
from dalsegno.system.lock import DirectoryLock
from support import warm
from support.loopback import reserved_port
from support.warm import Program

OWN_TRAINING = """
import os, signal, sys
from pathlib import Path
import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data


class Kill(ds.Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_done(self, ctx):
        if ctx.step == self.step and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


class Last(ds.Callback):
    def on_step_done(self, ctx):
        if ctx.step == 1:
            with open(f"pid-{os.environ['RANK']}", "w") as fifo:  # waits until the test reads it
                fifo.write(str(os.getpid()))


def build(args, callbacks):
    torch.manual_seed(0)
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(20), callbacks=callbacks)


def short(output_dir: Path, callbacks, steps: int = 1):
    return build(ds.TrainingArguments(output_dir, max_steps=steps, use_cpu=True), callbacks)


def whole():
    args = ds.TrainingArguments(output_dir="runs/a", max_steps=2, use_cpu=True)
    return build(args, [])


if __name__ == "__main__":
    args = ds.TrainingArguments(output_dir="runs/a", use_cpu=True, max_steps=4, max_seconds=float(sys.argv[1]))
    sys.exit(build(args, []).train().exit_status)
"""

RUN = """
trainer = "own_launch:build"

[args]
output_dir = "runs/a"
max_steps = 6
save_steps = 2
save_in_background = false
logging_steps = 1
use_cpu = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own, where the user is."""
    (tmp_path / "own_launch.py").write_text(OWN_TRAINING)
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def launch(*words: str) -> int:
    return main(["launch", "--nproc", "2", *words])


def legs(folder: Path) -> list[tuple[int, str | None]]:
    record = RunFile(folder / "runs" / "a").load()
    assert record is not None
    return [(leg.first_step, leg.cause) for leg in record.legs]


def test_a_restart_does_not_start_over_again(folder: Path) -> None:
    assert launch("run.toml", "--set", "args.max_steps=2") == 0
    assert launch("run.toml", "--start-over", "--set", "callbacks.own_launch:Kill.step=5") == 0
    assert legs(folder) == [(0, "rank 1 was killed by SIGKILL"), (4, None)]


def test_a_function_gets_its_own_arguments_as_annotated(folder: Path) -> None:
    assert launch("own_launch:short", "output_dir=runs/a", "steps=3") == 0
    assert RunFile(folder / "runs/a").load().legs[0].last_step == 3  # type: ignore[union-attr]


def test_a_run_that_another_process_uses_has_an_exit_status_of_its_own(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs/a"
    run.mkdir(parents=True)
    with DirectoryLock(run):
        assert main(["train", "run.toml"]) == 5
        assert main(["launch", "--nproc", "1", "--max-restarts", "0", "run.toml"]) == 5
    assert f"rank 0 raised Locked: {run}: in use by process {os.getpid()} on " in capfd.readouterr().err


OWN_LOOP = """
import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data

model = TinyRegression()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(tiny_regression_data(20), batch_size=4)
args = ds.TrainingArguments("run", max_steps=3, use_cpu=True)
with ds.Run(args, model=model, optimizer=optimizer, loader=loader) as run:
    for batch in run.batches():
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step_end(loss=loss)
"""


def test_a_loop_of_the_users_own_is_launched(folder: Path) -> None:
    (folder / "loop.py").write_text(OWN_LOOP)
    assert main(["launch", "--nproc", "1", "loop.py"]) == 0
    assert RunFile(folder / "run").load().legs[0].last_step == 3  # type: ignore[union-attr]


def test_a_function_and_a_script_are_launched(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("own_launch:whole") == 0
    assert launch("own_launch.py", "1e-6") == 75, "its own status"
    assert launch("own_launch.py", "100") == 0
    assert legs(folder) == [(0, None), (2, None), (2, None)]
    assert launch("--max-restarts", "1", "own_launch.py", "soon") == 1
    assert "raised ValueError: could not convert string to float: 'soon'; no restart is left" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rnu.toml"], "rnu.toml: no such file"),
        (["run.toml", "--set", "args.max_step=1"], "did you mean 'max_steps'"),
        (["own_launch:biuld"], "unknown function of own_launch 'biuld'; did you mean 'build'?"),
        (["own_launch:build"], "build: args= is missing; it is of a configuration"),
        (["own_launch:short"], "short: output_dir= is missing; give it a default, or a value: output_dir=runs/a after"),
        (["own_launch:short", "output_dr=runs/a"], "own_launch:short: unknown argument 'output_dr'; did you mean 'out"),
        (["own_launch:short", "output_dir=a", "steps=few"], "own_launch:short: steps='few'; needs int"),
        (["own_launch:build", "--more"], "takes no arguments, but '--more' was given"),
        (["train"], "give a configuration (run.toml), a function"),
        (["missing.py"], "missing.py: no such file"),
    ],
)
def test_what_cannot_work_is_2_before_anything_starts(
    words: list[str], complaint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*words) == 2
    assert complaint in capsys.readouterr().err


def pid_fifos(folder: Path) -> list[Path]:
    """Where each rank writes its process id once its first step is done."""
    fifos = [folder / f"pid-{rank}" for rank in range(2)]
    for fifo in fifos:
        os.mkfifo(fifo)
    return fifos


def pids_of_ranks(launcher: Program, fifos: list[Path]) -> list[int]:
    """Wait for both ranks. The launcher must not end before."""
    ended, pids = os.pidfd_open(launcher.pid), []
    for fifo in fifos:
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        ready, _, _ = select.select([reader, ended], [], [])
        assert ended not in ready
        pids.append(int(os.read(reader, 100)))
        os.close(reader)
    os.close(ended)
    return pids


def test_no_rank_outlives_a_launcher_that_is_killed(folder: Path) -> None:
    words = ["launch", "--nproc", "2", "run.toml", "--set", "args.max_steps=1000000"]
    words += ["--set", "callbacks.own_launch:Last.name=last"]
    fifos = pid_fifos(folder)
    launcher = Program([DALSEGNO, *words], env={**environment(), "TMPDIR": str(folder)})  # which it leaves
    ranks = [os.pidfd_open(pid) for pid in pids_of_ranks(launcher, fifos)]
    launcher.kill()
    launcher.wait()
    for rank in ranks:
        select.select([rank], [], [])  # readable once the process has ended
        os.close(rank)


def test_a_signal_to_the_whole_group_stops_the_ranks_with_a_checkpoint(folder: Path) -> None:
    """As a terminal's Ctrl-C, or Slurm, which signals every process: the one that ranks are forked from, too."""
    words = ["launch", "--nproc", "2", "run.toml", "--set", "args.max_steps=1000000", "--set", "args.save_steps=0"]
    words += ["--set", "callbacks.own_launch:Last.name=last"]
    fifos = pid_fifos(folder)
    launcher = Program([DALSEGNO, *words], env=environment(), start_new_session=True)
    pid, _ = pids_of_ranks(launcher, fifos)
    template = int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
    os.kill(template, signal.SIGTERM)
    os.killpg(launcher.pid, signal.SIGTERM)
    assert launcher.wait() == 75
    assert list((folder / "runs" / "a" / "checkpoints").iterdir())


def test_two_hosts_restart_together(folder: Path) -> None:
    with reserved_port() as port:
        words = ["launch", "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "both"]
        words += ["run.toml", "--set", "callbacks.own_launch:Kill.step=5"]
        hosts = [Program([DALSEGNO, *words], env=environment()) for _ in range(2)]
        assert [host.wait() for host in hosts] == [0, 0]
    assert legs(folder) == [(0, "rank 1 was killed by SIGKILL"), (4, None)]


NOTEBOOK = """
import sys
import torch
import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data

class Steps(ds.Callback):
    def __init__(self, transform):
        self.transform, self.seen = transform, []

    def on_step_end(self, ctx):
        self.seen.append(self.transform(ctx.step))

steps = Steps(lambda step: 10 * step)

def build(callbacks):
    args = ds.TrainingArguments("run", max_steps=3, use_cpu=True)
    return ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(), callbacks=callbacks)

for factory, callbacks in ((build, []), (print, [Steps(print)]), ("own_launch:whole", [])):
    try:
        ds.launch(factory, nproc=2, callbacks=callbacks)
    except ds.ConfigurationError as error:
        print(error)
result = ds.launch(build, nproc=2, callbacks=[steps], start="fork")
print(result.global_step, result.reason, steps.seen)
"""


def test_a_notebook_forks_what_no_other_process_could_import(folder: Path) -> None:
    """Here, standard input: its code is in no file either."""
    done = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    function, kind, argument, *_, trained = done.stdout.splitlines()
    assert function.startswith("the function build: build is defined in a notebook or on standard input; define it")
    assert kind.startswith("callbacks: Steps: Steps is defined in a notebook") and kind.endswith("start='fork'")
    assert argument.startswith("a program on standard input cannot be imported by its ranks")
    assert trained == "3 finished [10, 20, 30]"


PROGRAM = """
import os, sys
import dalsegno as ds
from own_launch import build


class Steps(ds.Callback):
    def __init__(self):
        self.seen = 0

    def on_step_end(self, ctx):
        self.seen += 1


def make(callbacks):
    return build(ds.TrainingArguments("run", max_steps=3, use_cpu=True), callbacks)


if __name__ == "__main__":
    steps = Steps()
    steps.seen = 100
    result = ds.launch(make, nproc=2, callbacks=[steps])
    print(result.global_step, steps.seen)
"""


def test_a_programs_own_classes_travel(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    done = warm.run(["program.py"], folder=folder, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3 103"


def test_the_help_has_the_statuses(folder: Path) -> None:
    done = cold("launch", "--help", folder=folder)
    assert "75 stopped in time" in " ".join(done.stdout.split())
