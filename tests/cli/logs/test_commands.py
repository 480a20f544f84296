"""The commands that read logs: what they refuse, how they end, and what they do while a log is being written."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from cli.command import DALSEGNO, dalsegno, environment
from dalsegno.cli import main
from dalsegno.logs import RecordLog, RunFile

GOLDEN = Path(__file__).parents[2] / "golden" / "logs"


def error(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    assert main(["logs", *words]) == status
    return capsys.readouterr().err


@pytest.mark.parametrize("word", ["sumary", "summry"])
def test_the_nearest_command_is_named(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"unknown logs command {word!r}; did you mean 'summary'?" in error(capsys, word)


def test_a_folder_without_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["list", str(tmp_path)], ["summary", str(tmp_path)], ["tail", "-f", str(tmp_path)]):
        assert "no log in it; looked for logs/train.jsonl" in error(capsys, *words)


@pytest.fixture
def one_is_bad(tmp_path: Path) -> Path:
    """Of three runs one has no steps, and the log of another is a file that the system refuses to read."""
    for name, line in {"good": '{"step": 1, "loss": 2.0}', "bad": '{"loss": 2.0}'}.items():
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "train.jsonl").write_text(line + "\n")
    (tmp_path / "locked" / "logs").mkdir(parents=True)
    (tmp_path / "locked" / "logs" / "train.jsonl").symlink_to("/proc/self/mem")  # opens; its first byte cannot be read
    return tmp_path


def test_what_cannot_be_read_is_listed_too(one_is_bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "list", "--json", str(one_is_bad)]) == 2
    rows = json.loads(capsys.readouterr().out)
    states = [(row["run"], row["state"]) for row in rows]
    assert states == [("bad", "unreadable"), ("good", "unknown"), ("locked", "unreadable")]
    assert "no step in its records" in rows[0]["error"]


def test_a_file_of_an_unknown_format_hides_no_other(one_is_bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one_is_bad / "bad/logs/train.jsonl").write_bytes(b"\xff\x00\n\x01")
    assert main(["logs", "list", "--json", str(one_is_bad)]) == 2
    bad, good, _ = json.loads(capsys.readouterr().out)
    assert (bad["state"], good["state"]) == ("unreadable", "unknown")
    assert "not a log that dalsegno can read" in bad["error"]


def test_a_damaged_first_line_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.jsonl"
    log.write_bytes(b"\x00\x00torn\n" + b'{"global_step": 2, "loss": 1.0}\n')
    assert main(["logs", "show", "--json", str(log)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["global_step"], record["loss"]) == (2, 1.0)


@pytest.mark.parametrize("command", ["list", "summary", "detect", "spikes"])
def test_one_log_that_cannot_be_read_hides_no_other(
    command: str, one_is_bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", command, str(one_is_bad)]) == 2
    output = capsys.readouterr()
    assert "good" in output.out or (command, output.out) == ("spikes", "No spikes.\n")
    bad, locked = output.err.splitlines()
    assert bad.startswith("dalsegno: bad: ")
    assert "no step in its records" in bad
    assert locked.startswith("dalsegno: locked: ")
    assert "train.jsonl: cannot be read: " in locked


def test_without_a_run_the_newest_that_can_be_read_is_taken(
    one_is_bad: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(one_is_bad)
    os.utime("good/logs/train.jsonl", (1e9, 1e9))
    for command in (["summary"], ["plot", "--terminal"]):
        assert main(["logs", *command]) == 0
        output = capsys.readouterr()
        assert "good" in output.out and "bad" not in output.out
        bad, locked = sorted(output.err.splitlines())
        assert locked.startswith("dalsegno: locked: ") and bad.startswith("dalsegno: bad: ")
    shutil.rmtree("good")
    assert error(capsys, "summary").count("dalsegno: ") == 1


def test_a_log_that_cannot_be_read_is_no_traceback(one_is_bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["show"], ["tail"], ["export", "--to", "csv"]):
        assert "train.jsonl: cannot be read: " in error(capsys, *words, str(one_is_bad / "locked"))


def test_detect_goes_on_where_a_run_has_no_such_metric(one_is_bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(one_is_bad / "good"), str(GOLDEN / "pair-a")]
    assert main(["logs", "detect", "--metric", "grad_norm", "--good", *runs]) == 2
    output = capsys.readouterr()
    assert "of 1 good runs" in output.out
    assert output.err.startswith("dalsegno: good: unknown metric of good 'grad_norm'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "x:3"], "--step x:3: write steps as 100:200"),
        (["--where", "loss >"], "condition 'loss >', at character 7: a number or a string expected"),
        (["--metrics", "los"], "unknown metric of killed 'los'; did you mean 'loss'?"),
        (["--where", "step > 3 and los < 9"], "unknown metric of killed 'los'; did you mean 'loss'?"),
    ],
)
def test_show_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in error(capsys, "show", str(GOLDEN / "killed"), *words)


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["--where", "loss > 1e9"], "records in the log: 25, of steps 2 to 40"),
        (["--where", "step > 1e9 or time < 0"], "records in the log: 25, of steps 2 to 40"),
        (["--step", "50:", "--json"], "records in the log: 25, of steps 2 to 40"),
        (["--kind", "sync"], "records of kind sync in the log: none"),
    ],
)
def test_show_says_that_nothing_matches(words: list[str], known: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "show", str(GOLDEN / "killed"), *words]) == 1
    assert capsys.readouterr() == ("", f"dalsegno: no record of killed matches; {known}\n")


def test_diff_tells_two_runs_of_one_name_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, loss in (("x", 1.0), ("y", 2.0)):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run" / "train.jsonl").write_text(json.dumps(train(1, loss=loss)))
    assert main(["logs", "diff", *(str(tmp_path / folder / "run") for folder in ("x", "y"))]) == 1
    header, *_, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "kind", "field", "x/run", "y/run"]
    assert last == "1 record differs"


def test_what_was_skipped_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"global_step": 1, "loss": 2.0}\n{"glo')
    assert main(["logs", "show", str(path)]) == 0
    assert "dalsegno: skipped 1: line 2: torn" in capsys.readouterr().err
    main(["logs", "summary", str(path)])
    assert "1: line 2: torn" in capsys.readouterr().out


def test_a_damaged_run_file_hides_no_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "killed"
    shutil.copytree(GOLDEN / "killed", run)
    (run / "run.json").write_text('{"format": 1, "run_id": "4f')
    for words in ("summary", "list", "plot --terminal", f"report -o {tmp_path / 'report.html'}"):
        caplog.clear()
        assert main(["logs", *words.split(), str(run)]) == 0
        (message,) = caplog.messages
        assert message.startswith(f"{run / 'run.json'}: damaged (Unterminated string"), "once"
    assert re.search(r"killed\n  state +finished\n  steps +40\n", capsys.readouterr().out)
    assert "no run.json that lists the legs" in error(capsys, "lineage", str(run))


def test_what_a_power_cut_has_zeroed_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "killed", tmp_path / "killed")
    log = tmp_path / "killed/logs/train.jsonl"
    whole = log.read_bytes()
    log.write_bytes(bytes(1 << 17) + whole[whole.index(b"\n") - 9 :])
    assert main(["logs", "summary", str(tmp_path)]) == 0
    assert re.search(r"skipped +1: line 1: 131,072 of its bytes are zero", capsys.readouterr().out)


def test_lineage_of_a_log_without_legs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"global_step": 1, "loss": 2.0}\n')
    assert "no run.json" in error(capsys, "lineage", str(tmp_path))


def test_a_run_that_failed_before_its_first_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (run := RunFile(tmp_path / "a")).begin(None, 1, 0)
    run.end("exception", None, 0, {}, "ValueError: no such data set")
    assert main(["logs", "list", str(tmp_path), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["run"], row["state"], row["step"]) == ("a", "failed", None)
    assert main(["logs", "summary", str(tmp_path / "a")]) == 0
    assert re.search(r"state +failed\n(.*\n)* +records +.* \(no log yet\)", capsys.readouterr().out)
    assert main(["logs", "lineage", str(tmp_path / "a")]) == 0
    assert re.search(r"a  failed, 1 leg\n(.*\n)*.*ValueError: no such data set", capsys.readouterr().out)
    log = ds.open_log(tmp_path / "a")
    (tmp_path / "a" / "train.jsonl").write_text('{"global_step": 1, "loss": 2.0}\n')
    assert log.summary().step == 1


def test_export_and_read_again(tmp_path: Path) -> None:
    import polars as pl

    log = ds.open_log(GOLDEN / "killed")
    for to in ("csv", "parquet", "json"):
        path = tmp_path / f"killed.{to}"
        assert main(["logs", "export", str(GOLDEN / "killed"), "--to", to, "-o", str(path)]) == 0
    assert pl.read_csv(tmp_path / "killed.csv", infer_schema_length=None).equals(log.frame(), null_equal=True)
    assert pl.read_parquet(tmp_path / "killed.parquet").equals(log.frame(), null_equal=True)
    assert list(ds.open_log(tmp_path / "killed.json").records()) == list(log.records())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.csv", "killed.json", "killed.parquet"]


@pytest.mark.parametrize("words", [["summary", "--json"], ["export", "--to", "csv"]])
def test_what_an_output_names_keeps_its_kind(tmp_path: Path, words: list[str]) -> None:
    pipe, former, link = tmp_path / "pipe", tmp_path / "former", tmp_path / "link"
    os.mkfifo(pipe)
    former.write_text("former")
    link.symlink_to(former)
    reading = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    for path in (pipe, link):
        assert main(["logs", *words, str(GOLDEN / "killed"), "-o", str(path), "--force"]) == 0
    assert pipe.is_fifo() and link.is_symlink()
    assert os.read(reading, 1 << 16) == former.read_bytes()
    os.close(reading)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["former", "link", "pipe"]


def test_export_to_tensorboard_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder = str(GOLDEN / "killed"), str(tmp_path / "events")
    assert main(["logs", "export", run, "--to", "tensorboard", "-o", folder]) == 0
    mine, other = ds.open_log(run), ds.open_log(folder)
    assert other.metrics()[:2] == ["loss", "grad_norm"]
    for name in ("loss", "eval_loss"):
        assert other.metric(name).steps.tolist() == mine.metric(name).steps.tolist()
        assert other.metric(name).values.tolist() == pytest.approx(mine.metric(name).values.tolist(), rel=1e-6)
        assert other.metric(name).times is not None
    assert "already has event files" in error(capsys, "export", run, "--to", "tensorboard", "-o", folder)


def test_each_run_has_its_own_event_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs := tmp_path / "runs").mkdir()
    for name in ("x.json", "x.jsonl"):
        (runs / name).write_text(f'{{"step": 1, "loss": 2.0, "{name}": 1}}\n{{"step"')
    shutil.copytree(GOLDEN / "killed", runs / "deeper" / "killed")
    words = ["logs", "export", str(runs), "--to", "tensorboard", "-o", str(tmp_path / "events")]
    assert main(words) == 0
    assert "skipped 2: x: line 2: torn" in capsys.readouterr().err
    exported = {run.name: run for run in ds.open_log(tmp_path / "events")}
    assert [*exported] == ["deeper/killed", "x", "x (2)"]
    assert len(exported["deeper/killed"].metric("loss")) == len(ds.open_log(GOLDEN / "killed").metric("loss"))
    assert main(words) == 2
    assert f"{tmp_path}/events/x: already has event files" in capsys.readouterr().err


def test_events_without_times_are_not_of_1970(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert main(["logs", "export", str(tmp_path), "--to", "tensorboard", "-o", str(tmp_path / "events")]) == 0
    summary = ds.open_log(tmp_path / "events").summary()
    assert (summary.step, summary.began, summary.changed, summary.training_seconds) == (2, None, None, None)


def test_export_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(GOLDEN / "killed")
    assert "--to parquet needs -o" in error(capsys, "export", run, "--to", "parquet")
    assert "there is no directory" in error(capsys, "export", run, "--to", "csv", "-o", str(tmp_path / "x" / "y.csv"))


def test_diff_takes_one_run_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert "contains 4 runs; name the one to compare" in error(capsys, "diff", str(GOLDEN / "killed"), str(GOLDEN))


def test_a_text_in_a_record_is_shown_in_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"step": 1, "a\x07": 2.0, "note": "\x1b[31mtwo\nlines"}) + "\n")
    for words in (["show"], ["show", "--metrics", "note"], ["tail"]):
        assert main(["logs", words[0], str(tmp_path), *words[1:]]) == 0
        out = capsys.readouterr().out
        assert r"\x1b[31mtwo\nlines" in out
        assert not {"\x1b", "\x07"} & set(out)


def train(step: int, **metrics: Any) -> dict[str, Any]:
    return {"timestamp": 1.7e9 + step, "global_step": step, "epoch": 0.0, "loss": 1.0, **metrics}


def test_tail_follows_runs_side_by_side_and_through_a_rewind(tmp_path: Path) -> None:
    logs = [RecordLog("logs/train.jsonl", tmp_path / name) for name in ("a", "b")]
    for log in logs:
        log.open()
    for step in (1, 2):
        logs[0].append(train(step))
    saved = logs[0].state()
    logs[0].append(train(3))
    follower = subprocess.Popen(
        [DALSEGNO, "logs", "tail", "-f", "-n", "2", "--interval", "0.01", "a", "b"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert follower.stdout is not None
    try:
        lines = [follower.stdout.readline() for _ in range(3)]
        assert lines[0].split() == ["a", "b"]
        assert [line.split()[1] for line in lines[1:]] == ["2", "3"]
        logs[1].append(train(7))
        line = follower.stdout.readline()
        assert line.index("step 7") > 40
        logs[0].open(saved)
        assert follower.stdout.readline() == "-- back to step 2 --\n"
        logs[0].append(train(3, loss=5.0))
        assert "step 3  loss 5  epoch 0" in follower.stdout.readline()
    finally:
        follower.send_signal(signal.SIGINT)
        _, complaint = follower.communicate()
    assert (follower.returncode, complaint) == (130, "\ndalsegno: interrupted\n")


def test_a_running_run_is_said_to_run(tmp_path: Path) -> None:
    """While its process holds the lock, and not a moment longer."""
    holder = (
        "import sys, pathlib\nfrom dalsegno.system.lock import DirectoryLock\nfrom dalsegno.logs import RunFile\n"
        "DirectoryLock(pathlib.Path('.')).acquire()\nRunFile('.').begin(None, 1, 0)\nprint('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "train.jsonl").write_text('{"global_step": 1, "loss": 2.0}\n')
    process = subprocess.Popen(
        [DALSEGNO.with_name("python"), "-c", holder], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert ds.open_log(tmp_path).summary().state == "running"
    process.kill()
    process.communicate()
    assert ds.open_log(tmp_path).summary().state == "died"


def test_small_logs_are_summed_up_without_polars_and_torch() -> None:
    code = (
        "import sys\nfrom dalsegno.cli import main\nmain(['logs', 'summary', sys.argv[1]])\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [DALSEGNO.with_name("python"), "-c", code, str(GOLDEN / "killed")], capture_output=True, text=True, check=True
    )
    assert not {"polars", "torch", "matplotlib", "pandas", "rich", "tensorboard"} & set(done.stderr.split())


def test_a_pipe_gets_no_colours(tmp_path: Path) -> None:
    done = dalsegno("logs", "list", str(GOLDEN), folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


EVIL = "\x1b]0;pwned\x07\x1b[2J=1+1"


def test_a_strangers_run_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(GOLDEN / "killed", tmp_path / "run")
    run = json.loads((tmp_path / "run/run.json").read_text())
    for leg in run["legs"]:
        leg |= {"why": EVIL, "cause": f"{EVIL}\nleg 9", "host": EVIL, "by": EVIL}
    (tmp_path / "run/run.json").write_text(json.dumps(run))
    assert main(["logs", "lineage", str(tmp_path / "run")]) == 0
    assert main(["logs", "show", f"{tmp_path}/{EVIL}"]) == 2
    printed = "".join(capsys.readouterr())
    assert printed.count(r"\x1b]0;pwned\x07") > 3 and "\nleg 9" not in printed
    assert not [each for each in printed if not each.isprintable() and each != "\n"]

    (tmp_path / "train.jsonl").write_text(json.dumps({"step": 1, "note": EVIL}) + "\n")
    shown = on_a_terminal(f"export {tmp_path}/train.jsonl --to csv", 80)
    assert any(r"\x1b]0;pwned\x07\x1b[2J=1+1" in line for line in shown)


def on_a_terminal(command: str, columns: int) -> list[str]:
    """What it shows there, without colours."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, columns))
    alone = {name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen([DALSEGNO, "logs", *command.split()], cwd=GOLDEN, env=alone, stdout=follower) as process:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # there is nobody behind it any more
            while piece := os.read(leader, 1 << 16):
                shown += piece
        os.close(leader)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("command", ["summary killed", "show killed", "tail pair-a pair-b", "show --help"])
def test_lines_are_no_longer_than_the_terminal(command: str, columns: int) -> None:
    lines = on_a_terminal(command, columns)
    assert lines
    too_long = [line for line in lines if len(line) > columns]
    assert [line for line in too_long if not line.startswith("    dalsegno")] == []


def test_list_fits_an_ordinary_terminal() -> None:
    header, *rows = on_a_terminal("list", 90)
    assert header.endswith("last change")
    assert len(rows) == 4
    assert all(re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d$", row) for row in rows)


def test_in_a_pipe_long_records_stand_alone_in_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "tail", str(GOLDEN / "pair-a"), str(GOLDEN / "pair-b"), "-n", "1"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("final  step 40") and first.count("step 40") == 2  # a metric is called step, too
    assert second.index("final") == header.index("pair-b") == 56


def test_tail_puts_runs_beside_each_other() -> None:
    header, *rows = on_a_terminal("tail pair-a pair-b -n 2 --metrics train_loss,eval_loss", 100)
    assert header.split() == ["pair-a", "pair-b"]
    assert [row.count("step 40") for row in rows] == [2, 2]
