"""``ds.launch``: callbacks travel to the ranks and back; ranks that are killed, fail or hang start again."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dalsegno as ds
from dalsegno.launcher import agent, heartbeats
from dalsegno.logs import Leg, RunFile
from dalsegno.testing import compare_runs
from support import launched
from support.launched import AtStep, Fail, Hang, Kill, Losses, SlowSave, Stop, Titles, Tokens, Touch, build


def launch(output_dir: Path, *callbacks: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    arguments = {"output_dir": str(output_dir), **(settings or {})}
    return ds.launch(build, nproc=2, callbacks=callbacks, arguments=arguments, **options)


def legs(output_dir: Path) -> list[Leg]:
    record = RunFile(output_dir).load()
    assert record is not None
    return record.legs


@pytest.mark.parametrize("start", ["forkserver", "fork"])
def test_callbacks_travel_with_their_state_and_come_back_with_it(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    util.get_temp_dir()  # keeps the short one that it finds: the path of a socket has at most 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tokens = Tokens(torch.tensor([1.0, 2.0, 3.0]))
    tokens.load_state_dict({"seen": torch.tensor([10.0, 0.0, 0.0])})
    losses = Losses(3.0, launched.half, ds.Every(steps=7), folder=tmp_path)
    losses.meter.values.append(-1.0)
    functions = [launched.note_save, launched.note_step]
    result = launch(tmp_path / "run", tokens, losses, *functions, start=start, settings={"max_steps": 4})
    assert (result.global_step, result.reason, result.exit_status) == (4, "finished", 0)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000004"
    assert tokens.seen() == [14.0, 8.0, 12.0]
    assert losses.meter.values == [-1.0, 1.5, 3.0, 4.5, 6.0]
    assert (losses.every, losses.folder) == (ds.Every(steps=7), tmp_path)
    assert (tmp_path / "run" / "noted").exists() and (tmp_path / "run" / "step-4").exists()
    assert {mode & 0o077 for mode in losses.modes.values()} == {0}, "nobody else can read it"
    assert start == "fork" or "target.json" in losses.modes
    assert not list(tmp_path.glob("dalsegno-launch-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems let no process change its name")
def test_ranks_and_their_data_workers_are_known_by_their_names(tmp_path: Path) -> None:
    launch(tmp_path / "run", Titles(tmp_path), settings={"max_steps": 2, "dataloader_num_workers": 1})
    assert (tmp_path / "rank").read_text() == "rank 1/2: dalse\nrank 1/2: dalsegno launch build"
    assert (tmp_path / "worker").read_text() == "data worker 0, \ndata worker 0, rank 1/2: dalsegno launch build"


class Local(ds.Callback):
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function


def test_a_factory_that_needs_callbacks_gets_an_empty_list(tmp_path: Path) -> None:
    arguments = {"output_dir": str(tmp_path), "max_steps": 1}
    assert ds.launch(launched.build_with, nproc=1, callbacks=[], arguments=arguments).global_step == 1


def test_callbacks_that_a_factory_does_not_take_are_said_before_anything_starts() -> None:
    with pytest.raises(
        ds.ConfigurationError, match=r"misconfigured: has no argument callbacks=; write it as def build"
    ):
        ds.launch(launched.misconfigured, nproc=1, callbacks=[Stop()])


def replaced() -> ds.Callback:
    callback = Local(signal.getpid if hasattr(signal, "getpid") else os.getpid)  # type: ignore[arg-type]
    callback.function = lambda: None
    return callback


def inside() -> ds.Callback:
    class Inner(ds.Callback): ...

    return Inner()


CANNOT_TRAVEL: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: Local(lambda: None), "callbacks: Local, argument 0: a lambda has no name"),
    "lambda set later": (replaced, "callbacks: Local.function: a lambda has no name"),
    "class in a function": (inside, "callbacks: Inner: inside.<locals>.Inner is defined inside a function"),
    "module": (lambda: Local(torch.nn.Linear(2, 2)), "argument 0: a Linear"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", CANNOT_TRAVEL)
def test_what_cannot_travel_is_refused_before_anything_starts(what: str, tmp_path: Path) -> None:
    make, complaint = CANNOT_TRAVEL[what]
    with pytest.raises(ds.ConfigurationError) as refused:
        launch(tmp_path / "run", make())
    assert complaint in str(refused.value) and "start='fork'" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_killed_rank_is_started_again_and_the_run_equals_an_uninterrupted_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch(tmp_path / "whole", Kill(99))
    result = launch(tmp_path / "killed", Kill(5))
    assert result.global_step == 8
    assert compare_runs(tmp_path / "whole", tmp_path / "killed").identical
    first, second = legs(tmp_path / "killed")
    assert (first.cause, second.cause) == ("rank 1 was killed by SIGKILL", None)
    assert "rank 1 was killed by SIGKILL; restarting from the newest checkpoint (1 of 3)" in caplog.messages


def test_so_is_one_that_hangs_and_its_stacks_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """To the launcher, a thousand seconds pass while it hangs, and none else that would matter."""
    hangs = tmp_path / "hangs"
    both = [hangs / "0", hangs / "1"]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * all(each.exists() for each in both))
    monkeypatch.setattr(heartbeats, "time", clock)
    result = launch(tmp_path / "run", Hang(3, hangs), hang_timeout=500.0, start="fork")
    assert result.global_step == 8
    assert legs(tmp_path / "run")[0].cause == "no step for 500 s after step 3"
    stacks = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[rank ")]
    assert stacks == sorted(stacks, key=lambda line: line[:9])
    for rank, function in enumerate(("act", "run_rank")):
        assert any(line.startswith(f"[rank {rank}] ") and line.endswith(f" in {function}") for line in stacks), stacks


def test_a_rank_that_raises_is_named_not_the_one_that_lost_it(tmp_path: Path) -> None:
    launch(tmp_path, Fail(3))
    assert legs(tmp_path)[0].cause == "rank 1 raised RuntimeError: out of luck"


def test_a_mistake_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    with pytest.raises(ds.RankFailed, match=r"NameError: .*misspelled.*; a restart would only repeat it"):
        ds.launch(launched.build_wrongly, nproc=1, arguments={"attempts": str(attempts)})
    assert attempts.read_text() == "x"
    with pytest.raises(ds.RankFailed, match="a restart would only repeat it"):
        launch(tmp_path / "first", launched.Misspell())
    assert len(legs(tmp_path / "first")) == 1


def test_restarts_that_lead_nowhere_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(ds.RankFailed, match="killed by SIGKILL; 3 legs in a row got no further than step 3"):
        launch(tmp_path, Kill(3, always=True), max_restarts=10, settings={"save_in_background": False})
    assert [leg.first_step for leg in legs(tmp_path)] == [0, 2, 2]


def test_restarts_are_limited(tmp_path: Path) -> None:
    with pytest.raises(ds.RankFailed, match="rank 1 was killed by SIGKILL; no restart is left"):
        launch(tmp_path, Kill(3), max_restarts=0)


def test_a_wrong_argument_is_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ds.ConfigurationError, match="width=-1; needs a number over 0; a restart would only repeat it"):
        ds.launch(launched.misconfigured, nproc=1)


@pytest.mark.parametrize(("diverged", "status"), [(False, 0), (True, 3)])
def test_a_stop_by_a_callback_is_no_failure(diverged: bool, status: int, tmp_path: Path) -> None:
    for _ in range(1 + diverged):
        result = launch(tmp_path, Stop(diverged=diverged))
        assert (result.global_step, result.stopped_by, result.exit_status) == (3, "Stop", status)
    assert len(legs(tmp_path)) == 1


def send_once_there(signals: dict[Path, signal.Signals]) -> None:
    """Send each signal to the launcher, this process, once its file exists."""

    def send() -> None:
        for path, number in signals.items():
            while not path.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_once_and_their_save_is_waited_for(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_GRACE", 0.1)
    touched = tmp_path / "touched"
    send_once_there({touched: number})
    result = launch(tmp_path / "run", Touch(touched), SlowSave(), settings={"max_steps": 1_000_000, "save_steps": 0})
    assert (result.reason, result.why, result.stopped_by, result.exit_status) == ("stopped", number.name, "signal", 75)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [result.checkpoint.name]
    assert len(legs(tmp_path / "run")) == 1
    assert launch(tmp_path / "run", settings={"max_steps": result.global_step + 1}).exit_status == 0


def test_a_second_ctrl_c_ends_the_ranks_at_once(tmp_path: Path) -> None:
    saving = tmp_path / "run" / "saving"
    send_once_there({tmp_path / "touched": signal.SIGINT, saving: signal.SIGINT})
    with pytest.raises(KeyboardInterrupt):
        launch(
            tmp_path / "run",
            Touch(tmp_path / "touched"),
            SlowSave(),
            settings={"max_steps": 1_000_000, "save_steps": 0},
        )
    assert not list((tmp_path / "run").glob("checkpoints/step-*[0-9]"))
    assert [leg.reason for leg in legs(tmp_path / "run")] == ["interrupted"]


def test_a_signal_before_training_ends_the_job_without_a_restart(tmp_path: Path) -> None:
    send_once_there({tmp_path / "touched": signal.SIGTERM})
    with pytest.raises(ds.RankFailed, match="killed by SIGTERM; SIGTERM asked the job to stop"):
        ds.launch(launched.never_built, nproc=2, arguments={"path": str(tmp_path / "touched")})


def test_a_name_will_do_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    result = ds.launch("support.launched:build", nproc=1, arguments={"output_dir": str(tmp_path), "max_steps": 1})
    assert result is not None and result.global_step == 1
    with pytest.raises(ds.UnknownName, match="did you mean 'build'"):
        ds.launch("support.launched:biuld", nproc=1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nproc": 0}, "nproc=0; needs the number of ranks"),
        ({"nnodes": 2}, "several hosts need --rdzv-endpoint"),
        ({"nnodes": "3:2"}, "nnodes='3:2'; needs a number of hosts"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"hang_timeout": 0}, "hang_timeout=0"),
        ({"start": "spawn"}, "start='spawn'; allowed: 'forkserver' or 'fork'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=complaint):
        ds.launch(build, **options)


def test_the_callbacks_of_a_run_are_not_changed_by_a_launch_that_fails(tmp_path: Path) -> None:
    callback: AtStep = Kill(3, always=True)
    with pytest.raises(ds.RankFailed):
        launch(tmp_path, callback, max_restarts=0)
    assert (callback.step, callback.rank, callback.always) == (3, 1, True)
