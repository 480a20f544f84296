"""Every ``dalsegno logs`` command that reads works without torch, and without what Windows lacks of POSIX.

A process hides both from dalsegno and then runs the commands. Libraries are imported before: numpy and others look at
the name of the system, which remains that of this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from dalsegno.cli.logs import COMMANDS

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"

HIDE = """
import os, signal, sys, warnings
import concurrent.futures, matplotlib.backends.backend_agg, matplotlib.backends.backend_svg, matplotlib.figure
import multiprocessing, numpy, plotille, polars, rich.console, rich.table, tempfile

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = {"torch", "torchdata", "safetensors", "tensorboard", "fsspec", "tqdm"}
hidden |= {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
for name in hidden & set(sys.modules):
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())
lacking = "pread preadv pwrite fork register_at_fork uname getuid geteuid getgid fchmod setpriority getpriority statvfs"
constants = "O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_CLOEXEC O_DIRECT PRIO_PROCESS"
for name in (*lacking.split(), *constants.split()):
    vars(os).pop(name, None)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGSTOP", "SIGCONT", "SIGCHLD"):
    vars(signal).pop(name, None)
warnings.filterwarnings("error", category=EncodingWarning, module="dalsegno")  # Windows' default is not UTF-8
"""

RUN = """
from dalsegno.cli import main
for line in sys.stdin:
    status = main(["logs", *line.split()])
    print("status", status, flush=True)
assert not {"torch", "fcntl"} & set(sys.modules)
"""

WITHOUT_TORCH = """
from pathlib import Path
from dalsegno.cli import main
Path("run.toml").write_text("trainer = 'my_run:build'\\n[args]\\noutput_dir = 'run'")
for line in sys.stdin:
    try:
        assert main(line.split()) == 2
    except SystemExit as end:
        assert end.code == 2
"""

TRAIN = """
from pathlib import Path
from dalsegno.errors import NotSupported
from dalsegno.system.lock import DirectoryLock
try:
    DirectoryLock(Path()).acquire()
except NotSupported as error:
    print(error)
"""

CALLS = {
    "list .": 0,
    "summary killed": 0,
    "show killed --step 1:3": 0,
    "tail killed -n 2": 0,
    "plot killed -o loss.png": 0,
    "plot killed --terminal": 0,
    "heatmap killed -o norms.png": 0,
    "compare pair-a pair-b": 1,
    "diff pair-a pair-b": 1,
    "spikes diverged": 0,
    "detect diverged": 0,
    "lineage killed": 0,
    "export killed --to csv -o killed.csv": 0,
    "report killed -o report.html": 0,
}


def other_system(code: str, folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-X", "warn_default_encoding", "-c", HIDE + code]
    return subprocess.run(words, cwd=folder, input=text, capture_output=True, text=True, encoding="utf-8", check=False)


def test_every_logs_command_works_without_torch_and_posix(tmp_path: Path) -> None:
    assert {call.split()[0] for call in CALLS} == set(COMMANDS)
    for run in ("killed", "diverged", "pair-a", "pair-b"):
        shutil.copytree(GOLDEN / run, tmp_path / run)
    done = other_system(RUN, tmp_path, "\n".join(CALLS))
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("status ")]
    assert statuses == [str(status) for status in CALLS.values()]
    assert {path.name for path in tmp_path.iterdir()} >= {"loss.png", "norms.png", "killed.csv", "report.html"}


def test_commands_that_need_torch_say_how_to_install_it_and_write_nothing(tmp_path: Path) -> None:
    train = [
        "demo --out demo",
        "train run.toml",
        "launch run.toml",
        "launch my_run:build",
        "check-resume my_run:build",
        "callbacks list",
    ]
    others = ["callbacks show JsonLogger", "checkpoints import run.toml -o run"]
    done = other_system(WITHOUT_TORCH, tmp_path, "\n".join([*train, *others]))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("dalsegno: ")]
    assert [line.partition(";")[0] for line in lines] == [
        f"dalsegno: {words.split()[0]} needs torch, which is not installed" for words in [*train, *others]
    ]
    assert all(line.endswith("; from an index, pip install 'dalsegno'") for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_training_there_is_refused_and_the_error_names_the_systems(tmp_path: Path) -> None:
    done = other_system(TRAIN, tmp_path)
    assert done.stdout.endswith("training needs Linux or macOS; on Windows, train in WSL\n"), done.stderr
