"""ProgressCallback: lines in a file or a pipe, a bar on a terminal."""

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

import dalsegno as ds
from callbacks.scripted import trainer
from callbacks.stage import Stage
from dalsegno.callbacks import InfoCallback, ProgressCallback
from dalsegno.callbacks.loggers import progress_callback
from dalsegno.callbacks.loggers.progress_callback import shown
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import LogContext, StepEndContext
from dalsegno.testing import tiny_regression_data
from support.listeners import Listener
from support.own_loops import OwnLoop
from support.small import small_trainer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def bars(self) -> list[tuple[int, int]]:
        """Steps done and planned, as often as the bar was drawn."""
        return [(int(done), int(planned)) for done, planned in re.findall(r"(\d+)/(\d+) \[", self.getvalue())]


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


class Crash(ds.Callback):
    def on_step_end(self, ctx: StepEndContext) -> None:
        if ctx.step == 6:
            raise RuntimeError("crash")


# -- lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "resumed exactly: steps 5 to 6 repeated bit for bit"),
        (
            {"learning_rate": 0.02},
            "not repeated bit for bit: learning rate of step 5 differs: learning_rate: saved 0.01",
        ),
    ],
)
def test_what_the_repeated_steps_show_is_said_once(
    tmp_path: Path, stream: type[io.StringIO], changed: dict[str, Any], line: str
) -> None:
    def leg(*callbacks: Any, **settings: Any) -> list[str]:
        progress = ProgressCallback(output_stream=(shown := stream()))
        usual = {"max_steps": 10, "save_steps": 4, "logging_steps": 2, "save_in_background": False}
        small_trainer(tmp_path, progress, *callbacks, **usual | settings).train()
        return re.split(r"[\r\n]+", shown.getvalue())

    with pytest.raises(RuntimeError):
        leg(Crash())
    (said,) = [each for each in leg(**changed) if "repeated" in each]
    assert said.startswith(line)


def test_what_is_printed(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = ProgressCallback(
        output_stream=stream,
        step_columns={"epoch": None, "loss": ".3f", "grad_norm": None, "learning_rate": ".1e"},
        final_metrics=["train_loss", "step"],
        header_interval=2,
    )
    run = trainer(tmp_path, [2.0, 1.0, 0.5], progress, learning_rate=0.3)
    run.train()
    run.log({"note": "done", "tokens_left": 1234})
    assert lines(stream) == [
        "     step       loss  learning_rate",
        "        1      2.000        3.0e-01",
        "        2      1.000        2.0e-01",
        "     step       loss  learning_rate",
        "        3      0.500        1.0e-01",
        "        3  final: train_loss 1.167, step 3",
        "        3  user: note done, tokens_left 1,234",
    ]


def test_columns_are_merged_with_the_default_ones(tmp_path: Path) -> None:
    """As Forgather merges them: single fields replace the default's, None removes a column, new names come last."""
    stream = io.StringIO()
    progress = ProgressCallback(
        output_stream=stream,
        step_columns={
            "epoch": None,
            "grad_norm": None,
            "learning_rate": {"label": "lr"},
            "loss": {"fmt": ".5f", "width": 12},
            "max_grad_norm": None,
            "big": "si",
            "memory": {"fmt": "gib"},
            "whole": ",d",
            "own": lambda value: f"<{value}>",
        },
        final_metrics={
            "train_loss": {"label": "mean loss", "fmt": ".2f"},
            "train_runtime": None,
            "train_samples_per_second": None,
            "train_steps_per_second": None,
            "step": {"label": "steps", "suffix": " in all"},
        },
    )

    def add(ctx: LogContext) -> None:
        if ctx.kind == "train":
            ctx.logs |= {"big": 4_567_890, "memory": 3 * 2**29, "whole": 1234.0, "own": "text"}

    trainer(tmp_path, [2.0], progress, Listener({"on_log_step": add}), learning_rate=0.3).train()
    assert lines(stream) == [
        "     step          loss         lr        big     memory      whole        own",
        "        1       2.00000   3.00e-01      4.57M  1.500 GiB      1,234     <text>",
        "        1  final: mean loss 2.00, steps 1 in all",
    ]


def test_an_evaluation_is_a_line_with_all_it_found(tmp_path: Path) -> None:
    stream = io.StringIO()
    trainer(tmp_path, [2.0, 1.0], ProgressCallback(output_stream=stream), eval_steps=2).train()
    [line] = [line for line in lines(stream) if "eval" in line]
    assert re.fullmatch(r" {8}2  eval: eval_loss 1\.000, eval_runtime [\d.e-]+, eval_samples_per_second [\d.,]+", line)


@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_a_long_evaluation_says_how_far_it_is_and_lines_say_how_long_it_takes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_callback, "SILENCE_S", 0.0)
    stream = io.StringIO()
    progress = ProgressCallback(output_stream=stream)
    settings = {"max_steps": 2, "eval_steps": 2, "logging_steps": 1}
    if kind == "trainer":
        small_trainer(tmp_path, progress, parts={"eval_dataset": tiny_regression_data(17)}, **settings).train()
    else:
        loop = OwnLoop(tmp_path, progress, **settings)
        run = ds.Run(
            loop.args,
            model=loop.model,
            optimizer=loop.optimizer,
            loader=loop.loader,
            callbacks=[progress],
            evaluate=lambda: [run.between_batches() for _ in range(3)] and {"eval_loss": 0.0},
        )
        with run:
            for batch in run.batches():
                loss = loop.model(**batch)
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                run.step_end(loss)
    header, first, last, *evaluation = lines(stream)[:6]
    assert re.search(r"e-0\d  of 2, [\d.,]+ steps/s, 0:00:0\d left$", first)
    assert "left" not in header + last
    of = " of 3" if kind == "trainer" else ""
    assert [each.strip() for each in evaluation] == [f"2  eval: {done}{of} batches" for done in range(3)]


def test_default_columns_are_those_that_there_are(tmp_path: Path) -> None:
    for with_tokens, last in [(False, "learning_rate"), (True, "tok_per_sec")]:
        stream = io.StringIO()
        progress = ProgressCallback(output_stream=stream, header_interval=100)
        trainer(tmp_path / last, [2.0, 1.0, 1.0], progress, with_tokens=with_tokens).train()
        header, *records, final = lines(stream)
        assert (
            header.split()
            == ["step", "epoch", "loss", "grad_norm", "learning_rate", "tok_per_sec"][: 6 - (not with_tokens)]
        )
        assert header.endswith(last)
        assert {len(line) for line in records} == {len(header)}, "columns stand below their names"
        assert "final: train_loss 1.333, train_runtime" in final
        assert stream.getvalue().replace("\n", "").isprintable()


class Late(ds.Callback):
    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.state.global_step == 2:
            ctx.logs["late"] = 7


def test_a_value_that_comes_late_or_not_at_all(tmp_path: Path) -> None:
    stream = io.StringIO()
    asked = ProgressCallback(output_stream=stream, step_columns=["step", "late", "never"], final_metrics=[])
    trainer(tmp_path / "asked", [1.0] * 3, asked, Late()).train()
    assert [line.split() for line in lines(stream)] == [
        ["step", "late", "never"],
        ["1", "-", "-"],
        ["2", "7", "-"],
        ["3", "-", "-"],
    ]


class LateGradNorm(Late):
    def on_log_step(self, ctx: LogContext) -> None:
        if ctx.state.global_step < 2:
            del ctx.logs["grad_norm"]


def test_a_specification_may_be_any_mapping(tmp_path: Path) -> None:
    stream = io.StringIO()
    columns = {"loss": MappingProxyType({"fmt": ".3f", "label": "the loss"}), "step": None, "epoch": None}
    trainer(tmp_path, [2.0], ProgressCallback(output_stream=stream, step_columns=columns)).train()
    assert "the loss" in lines(stream)[0]
    assert "2.000" in lines(stream)[1]


def test_a_default_column_that_comes_late_brings_a_new_header(tmp_path: Path) -> None:
    stream = io.StringIO()
    trainer(tmp_path, [1.0] * 3, ProgressCallback(output_stream=stream), LateGradNorm()).train()
    words = [line.split() for line in lines(stream)[:5]]
    assert [len(line) for line in words] == [4, 4, 5, 5, 5]
    assert "grad_norm" in words[2]


def test_lines_go_to_stdout_as_it_is_when_they_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0]).train()
    printed = capsys.readouterr()
    assert "learning_rate" in printed.out
    assert printed.err == ""


def test_a_stream_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0], ProgressCallback(output_stream="stderr")).train()
    printed = capsys.readouterr()
    assert "learning_rate" in printed.err and "learning_rate" not in printed.out


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (3, "", "3"),
        (1234567, "", "1,234,567"),
        (1234.56, "", "1,234.6"),
        (0.1 + 0.2, "", "0.3000"),
        (1.5e-7, "", "1.500e-07"),
        (float("nan"), "", "nan"),
        (float("-inf"), ",.0f", "-inf"),
        (float("nan"), ",d", "nan"),
        (12.0, ",d", "12"),
        (999.6, "si", "1K"),
        (12_345, "si", "12.3K"),
        (2.5e15, "si", "2.5e+03T"),
        (2, ".1f", "2.0"),
        (None, ".1f", "-"),
        (True, ".1f", "True"),
        ("text", ".1f", "text"),
    ],
)
def test_values_as_text(value: object, spec: str, text: str) -> None:
    assert shown(value, spec) == text


# -- bar ----------------------------------------------------------------------------------------------------------


def test_a_bar_begins_at_the_resumed_step_and_comes_to_the_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    crashed = Terminal()
    with pytest.raises(RuntimeError, match="crash"):
        trainer(tmp_path, [1.0] * 9, ProgressCallback(output_stream=crashed), Crash(), save_steps=5).train()
    assert crashed.bars[-1] == (6, 9)
    assert crashed.getvalue().endswith("\n"), "what is printed next begins a line of its own"

    resumed = Terminal()
    trainer(tmp_path, [1.0] * 9, ProgressCallback(output_stream=resumed), save_steps=5).train()
    assert min(resumed.bars) >= (5, 9)
    assert resumed.bars[-1] == (9, 9)
    assert "loss 1.000" in resumed.getvalue()
    assert "grad_norm" in resumed.getvalue()
    assert "final: train_loss 1.000" in resumed.getvalue()
    assert "learning_rate\n" not in resumed.getvalue(), "no columns beside a bar"
    assert set(threading.enumerate()) == before


def test_a_bar_is_not_drawn_before_the_first_step_and_stands_at_the_resumed_one(tmp_path: Path) -> None:
    terminal = Terminal()
    stage = Stage(tmp_path, ProgressCallback(output_stream=terminal))
    stage.state.global_step, stage.state.max_steps = 5, 9
    stage.begin()
    assert terminal.getvalue() == "", "other callbacks have something to print first"
    stage.end()
    assert terminal.bars == [(5, 9)]


def test_a_bar_goes_back_in_a_rollback(tmp_path: Path) -> None:
    terminal = Terminal()
    stage = Stage(tmp_path, ProgressCallback(output_stream=terminal))
    stage.state.max_steps = 20
    stage.begin()
    stage.state.global_step = 15
    stage.on.step_end.fill(1.0, None, None)
    stage.on.step_end.fire()
    stage.on.rollback.fill(15, 10, "a spike")
    stage.on.rollback.fire()
    stage.end()
    assert terminal.bars[-1] == (10, 20)


def test_without_a_planned_end_a_bar_counts(tmp_path: Path) -> None:
    terminal = Terminal()
    stage = Stage(tmp_path, ProgressCallback(output_stream=terminal))
    stage.begin()
    stage.state.global_step = 3
    stage.on.step_end.fill(1.0, None, None)
    stage.on.step_end.fire()
    stage.end()
    assert "3step [" in terminal.getvalue()


@pytest.mark.parametrize(
    ("use_tqdm", "disable_tqdm", "stream", "is_bar"),
    [
        (None, None, Terminal, True),
        (None, None, io.StringIO, False),
        (True, None, io.StringIO, True),
        (False, None, Terminal, False),
        (None, True, Terminal, False),
        (True, True, Terminal, False),
        (None, False, Terminal, True),
    ],
)
def test_bar_or_lines(
    tmp_path: Path, use_tqdm: bool | None, disable_tqdm: bool | None, stream: type[io.StringIO], is_bar: bool
) -> None:
    output = stream()
    progress = ProgressCallback(use_tqdm=use_tqdm, output_stream=output)
    trainer(tmp_path, [1.0], progress, disable_tqdm=disable_tqdm).train()
    assert ("1/1 [" in output.getvalue()) == is_bar
    assert ("learning_rate\n" in output.getvalue()) != is_bar


def test_a_notebook_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    output = io.StringIO()
    trainer(tmp_path, [1.0], ProgressCallback(output_stream=output)).train()
    assert "1/1 [" in output.getvalue()


def test_a_reader_that_goes_away_ends_no_training(tmp_path: Path) -> None:
    train = """import sys
from dalsegno.callbacks import InfoCallback, ProgressCallback
from support.small import small_trainer
small_trainer(sys.argv[1], ProgressCallback(), InfoCallback(), max_steps=3, logging_steps=1, save_steps=3).train()"""
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    start = [sys.executable, "-c", train, str(tmp_path)]
    end = subprocess.run(start, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, check=False)
    os.close(writer)
    assert end.returncode == 0, end.stderr
    assert end.stderr.count("<stdout> cannot be written to, so nothing more is printed there: [Errno 32]") == 1
    assert (tmp_path / "checkpoints/step-00000003").is_dir()


def test_no_standard_output_and_one_without_the_letters_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(stdout: io.TextIOBase | None, stderr: io.TextIOBase | None) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stdout)
            patched.setattr(sys, "stderr", stderr)
            printing = [ProgressCallback(), InfoCallback()]
            small_trainer(tmp_path / "ü", *printing, max_steps=3, logging_steps=1).train(resume_from_checkpoint=False)

    train(None, None)
    train(ascii_only := io.TextIOWrapper(io.BytesIO(), "ascii"), io.StringIO())
    ascii_only.seek(0)
    assert "/\\xfc\n" in ascii_only.read()


# -- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_tqdm": "yes"}, "use_tqdm='yes'; allowed are True, False and None"),
        ({"output_stream": "train.log"}, "output_stream='train.log'; needs a stream"),
        ({"step_columns": "loss"}, "step_columns='loss'; needs a list of names"),
        ({"step_columns": {"loss": ".3q"}}, r"step_columns\['loss'\]=.*'.3q'.*; needs a format for a number"),
        ({"step_columns": {"loss": {"wide": 3}}}, r"step_columns\['loss'\]=.*; needs a format for a number"),
        ({"final_metrics": {"train_loss": 3}}, r"final_metrics\['train_loss'\]=.*3.*; needs a format"),
        ({"header_interval": 0}, "header_interval=0; needs an integer of at least 1"),
        ({"header_interval": 2.5}, "header_interval=2.5; needs an integer of at least 1"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ProgressCallback: {message}"):
        ProgressCallback(**arguments)
