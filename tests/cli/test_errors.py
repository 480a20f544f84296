"""What commands say where they cannot do as asked: one line, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dalsegno.cli import main
from dalsegno.system.lock import DirectoryLock
from support.small import small_trainer


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line on stderr of a command that fails."""
    try:
        assert main(words) == 2
    except SystemExit as end:
        assert end.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        (["--max_steps", "3"], "; did you mean --set args.max_steps=3?"),
        (["--max-steps=3"], "; did you mean --set args.max_steps=3?"),
        (["--lr", "1e-3"], "; did you mean --set args.learning_rate=1e-3?"),
        (["--fp16"], "; did you mean --set args.fp16=VALUE?"),
        (["--width", "64"], "; to override a setting of the file, use --set KEY=VALUE"),
    ],
)
def test_a_setting_as_an_option(capsys: pytest.CaptureFixture[str], option: list[str], meant: str) -> None:
    message = error_of(capsys, "train", "run.toml", *option)
    assert message == f"dalsegno train: error: unrecognized arguments: {' '.join(option)}{meant}"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["logs", "spikes", "run", "--metrik", "loss"], "--metric"),
        (["logs", "summary", "--al"], "--all"),
        (["checkpoints", "prune", "--keep-last=3"], "--keep-latest"),
        (["launch", "run.toml", "--chek"], "--check"),
        (["train", "run.toml", "--start-ovr"], "--start-over"),
        (["jobs", "--hepl"], "--help"),
        (["--versoin"], "--version"),
    ],
)
def test_an_unknown_option_shows_its_commands_usage_and_the_nearest(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    usage, *_, message = capsys.readouterr().err.splitlines()
    command = " ".join(["dalsegno", *(word for word in words[:2] if word not in ("run.toml", *words[-1:]))])
    assert usage.startswith(f"usage: {command} ")
    assert message.startswith(f"{command}: error: unrecognized arguments: -")
    assert message.endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logs", "detect", "a", "--threshold", "high"], "argument --threshold: 'high': needs a number, or none"),
        (["logs", "plot", "a", "--xlim", "1:b"], "argument --xlim: '1:b': needs a range of numbers: A:B, A: or :B"),
        (["logs", "plot", "a", "--ylim", "7"], "argument --ylim: '7': needs a range of numbers: A:B, A: or :B"),
        (["logs", "spikes", "a", "--window", "1.5"], "argument --window: '1.5': needs an integer"),
        (["logs", "compare", "a", "--sigmas", "x"], "argument --sigmas: 'x': needs a number"),
    ],
)
def test_a_wrong_value_is_answered_in_words(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert error_of(capsys, *words) == f"dalsegno {words[0]} {words[1]}: error: {message}"


def test_metric_and_metrics_are_one_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    records = '{{"global_step": {0}, "loss": {0}.0, "norms": {{"w": 1.0}}}}\n'
    Path("log.jsonl").write_text("".join(map(records.format, range(1, 30))))
    for command in ("show", "tail", "spikes", "detect", "compare log.jsonl", "plot --terminal"):
        for option in ("--metric", "--metrics"):
            main(["logs", *command.split(), "log.jsonl", option, "los"])
            message = capsys.readouterr().err
            assert command == "tail" or message.endswith("'los'; did you mean 'loss'?\n"), (command, message)
    for option in ("--metric", "--metrics"):
        assert main(["logs", "heatmap", "log.jsonl", option, "grad_norm", "--force"]) == 0
        assert main(["checkpoints", "prune", option, "loss"]) == 2


@pytest.mark.parametrize("metric", ["grad_norm", "norm", "spectral_norm"])
def test_a_heatmap_without_its_log_names_the_callback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metric: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text('{"global_step": 10, "loss": 2.0}\n')
    writer = "GradNormLogger" if metric == "grad_norm" else "ParameterNormLogger"
    message = error_of(capsys, "logs", "heatmap", "log.jsonl", "--metric", metric)
    assert message.endswith(f"_norms.jsonl: no such log; the callback {writer} writes it")


@pytest.mark.parametrize("words", [("checkpoints", "list"), ("logs", "show"), ("checkpoints", "diff", ".")])
def test_a_url_keeps_its_slashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DALSEGNO_CACHE", str(tmp_path))
    message = error_of(capsys, *words, "s3://bucket/run")
    assert "s3://bucket/run is a URL, and this command reads local directories" in message
    assert str(tmp_path) in message


def test_a_disk_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_trainer(tmp_path, max_steps=1, save_steps=1).train()

    def read_only(lock: DirectoryLock) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / ".lock"))

    monkeypatch.setattr(DirectoryLock, "acquire", read_only)
    message = error_of(capsys, "checkpoints", "prune", str(tmp_path), "--keep-latest", "1")
    assert message == f"dalsegno: [Errno 30] Read-only file system: '{tmp_path / '.lock'}'"


def test_one_checkpoint_is_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each was when it was saved, since the loss falls."""
    from dalsegno.testing import tiny_regression_data

    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    small_trainer(tmp_path, parts=parts, max_steps=6, save_steps=2, eval_steps=2).train()
    capsys.readouterr()
    for place, bests in ((tmp_path, 1), (tmp_path / "checkpoints/step-00000002", 0)):
        assert main(["checkpoints", "list", str(place)]) == 0
        assert capsys.readouterr().out.count("  best  ") == 1 + bests  # with the column's title


def test_a_file_that_is_there_is_not_replaced_unasked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text('{"global_step": 1, "loss": 2.0}\n{"global_step": 2, "loss": 1.0}\n')
    commands = {"plot.png": ["plot"], "report.html": ["report"], "a.csv": ["export", "--to", "csv", "-o", "a.csv"]}
    for name, (command, *options) in commands.items():
        Path(name).write_text("mine")
        message = error_of(capsys, "logs", command, "log.jsonl", *options)
        assert message == f"dalsegno: {name} exists; --force overwrites it, -o names another file"
        assert Path(name).read_text() == "mine"
        assert main(["logs", command, "log.jsonl", *options, "--force"]) == 0
        assert f"wrote {name}" in capsys.readouterr().out
        assert Path(name).read_bytes() != b"mine"


def test_descriptions_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["callbacks", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [metrics] = [line for line in lines if line.startswith("DefaultMetrics ")]
    assert metrics.endswith(
        "Logs speed, hardware utilization and peak memory in each training record: `tok_per_sec`, `mfu`, `peak_mem`."
    )
    assert all(line.endswith(".") for line in lines[1:] if " built-in " in line)
