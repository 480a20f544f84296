"""What holds for every bridge: dalsegno's callbacks in another library's loop."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.callbacks import (
    ComputeBudget,
    DefaultMetrics,
    EarlyStopping,
    FlopUtilization,
    JsonLogger,
    SamplesStreamedInfo,
)
from dalsegno.testing import run_ranks, start_ranks
from interop.bridges import (
    STEPS,
    Reader,
    Verdict,
    assert_rows,
    by_step,
    examples,
    records,
    refused_builtins,
    several,
    sums,
    training_records,
)
from support.listeners import Journal, Listener, Trace
from support.threads import one_thread

BRIDGED = sorted(path.parent.name for path in Path(__file__).parent.glob("*/bridged.py"))
"""Folders whose module ``bridged`` says how one looks in that library."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=BRIDGED)
def library(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"interop.{request.param}.bridged")


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def checkpoint(library: ModuleType, output_dir: Path, index: int = -1) -> Path:
    """One of its checkpoints, in their order."""
    found: dict[int, Path] = library.checkpoints(output_dir)
    return found[sorted(found)[index]]


def resumed(library: ModuleType, output_dir: Path, index: int = -1) -> Verdict:
    """Resume with several callbacks; a run that is only listened to is the same."""
    verdict = Verdict()
    library.train(output_dir, [*several(), verdict], resume=checkpoint(library, output_dir, index))
    return verdict


@pytest.fixture(scope="module")
def uninterrupted(library: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with one_thread():
        library.train(folder, several())
    return folder


def assert_same(library: ModuleType, output_dir: Path, uninterrupted: Path) -> None:
    found, expected = (getattr(library, "records", records)(folder) for folder in (output_dir, uninterrupted))
    assert found == expected
    assert min(len(log) for log in expected.values()) >= 2 and len(expected) == 3
    states = library.states(checkpoint(library, uninterrupted))
    assert {"callbacks.EMA", "callbacks.DivergenceDetector", "callbacks.EarlyStopping"} <= states.keys()
    assert library.states(checkpoint(library, output_dir)) == states
    assert list((output_dir / "logs" / "rewound").glob("train.jsonl*")), "what was logged later is archived"


# --- killed and resumed -----------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_exactly(
    library: ModuleType, uninterrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the logs and states of an uninterrupted one; and it proves it."""
    (outcome,) = start_ranks(library.train_until_killed, 1, tmp_path, library.KILLED_AT).wait(300)
    assert outcome.was_killed
    with caplog.at_level(logging.INFO, "dalsegno"):
        verdict = resumed(library, tmp_path)
    assert_same(library, tmp_path, uninterrupted)
    assert verdict.proof.verdict == "exact"
    assert verdict.proof.line in caplog.messages
    assert verdict.proof.line.startswith(f"resumed exactly: steps {library.REPEATED} repeated bit for bit")
    assert "not resumed exactly" not in caplog.text


def test_an_older_checkpoint_rewinds_the_logs(library: ModuleType, uninterrupted: Path, tmp_path: Path) -> None:
    library.train(tmp_path, several())
    resumed(library, tmp_path, index=0)
    assert_same(library, tmp_path, uninterrupted)


def test_a_checkpoint_from_before_the_bridge_is_said(
    library: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done, trace = library.train_without(tmp_path), Trace()
    with caplog.at_level(logging.WARNING, "dalsegno"):
        ended = library.train(tmp_path, [trace], resume=checkpoint(library, tmp_path))
    assert "was saved without a Bridge" in caplog.text
    assert trace.steps == ended - done > 0


def test_damaged_states_are_refused(library: ModuleType, tmp_path: Path) -> None:
    library.train(tmp_path, several())
    library.damage(checkpoint(library, tmp_path, index=0))
    with pytest.raises(ds.DamagedCheckpoint, match=r"shared\.json: has checksum"):
        resumed(library, tmp_path, index=0)


# --- events and requests ----------------------------------------------------------------------------------------------


def test_what_a_handler_requests_is_done(library: ModuleType, tmp_path: Path) -> None:
    ends: list[tuple[str, int]] = []

    def request(ctx: Any) -> None:
        ctx.control.should_save = ctx.step == 3
        if ctx.step == 6:
            ctx.control.stop("enough")

    end = {"on_train_end": lambda ctx: ends.append((ctx.reason, ctx.state.global_step))}
    assert library.train(tmp_path, [Listener({"on_step_end": request, **end})]) == 6
    assert ends == [("stopped", 6)]
    assert library.checkpoints(tmp_path).keys() >= {3, 6}


def test_an_exception_ends_the_leg(library: ModuleType, tmp_path: Path) -> None:
    journal = Journal(without=tuple(event.handler for event in library.UNSUPPORTED_EVENTS))

    def fail(ctx: Any) -> None:
        if ctx.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        library.train(tmp_path, [journal, Listener({"on_step_end": fail})])
    assert journal.fired[-2:] == ["exception", "train_end"]
    trace = Trace()
    assert library.train(tmp_path, [trace]) == trace.steps > 3, "nothing of the leg before is in the way"


# --- samples, tokens, FLOPs -------------------------------------------------------------------------------------------


def test_counts_are_those_of_what_the_model_got(library: ModuleType, tmp_path: Path) -> None:
    """Over the ends of epochs, and a resume inside one."""
    for name, read in library.READS.items():
        first, second = Reader(), Reader()
        for model, steps in ((first, 4), (second, STEPS)):
            read(tmp_path / name, [JsonLogger(), SamplesStreamedInfo(), DefaultMetrics()], model, steps)
        of_steps = by_step([*first.given, *second.given], 6)
        assert len(of_steps) == STEPS and len(set(of_steps)) == 2, "not all steps are full"
        logged = training_records(tmp_path / name)
        assert [record["samples"] for record in logged] == sums([samples for samples, _ in of_steps])
        assert ("tokens" in logged[0]) == (name in library.COUNTS)
        if name in library.COUNTS:
            assert [record["tokens"] for record in logged] == sums([tokens for _, tokens in of_steps])
            assert min(record["tok_per_sec"] for record in logged) > 0


def read_on_a_rank(library: str, folder: Path) -> list[tuple[int, int]]:
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # by which Lightning knows that all ranks are started
    model = Reader()
    read = next(iter(importlib.import_module(library).READS.values()))
    read(folder, [JsonLogger(), SamplesStreamedInfo()], model, STEPS)
    return by_step(model.given, 3)


def test_counts_on_two_ranks(library: ModuleType, tmp_path: Path) -> None:
    """An epoch's last batch is filled, so that both ranks have one: its samples are trained on, too."""
    one, two = run_ranks(read_on_a_rank, 2, library.__name__, tmp_path)
    logged = training_records(tmp_path)
    assert [record["samples"] for record in logged] == sums([a[0] + b[0] for a, b in zip(one, two, strict=True)])
    if library.COUNTS:
        assert [record["tokens"] for record in logged] == sums([a[1] + b[1] for a, b in zip(one, two, strict=True)])


def test_flops_are_counted_or_refused(library: ModuleType, tmp_path: Path) -> None:
    """Those of products of matrices: six a weight and token, forward and backward."""
    for name, read in library.READS.items():
        model, measured = Reader(), [ComputeBudget(), FlopUtilization(), DefaultMetrics(peak_flops_per_device=1e9)]
        if name not in library.COUNTS:
            for each in measured:
                with pytest.raises(ds.EventNotFired, match=f"{each.key} needs on_microbatch_begin, which"):
                    read(tmp_path, [each], model, STEPS)
            continue
        read(tmp_path, [JsonLogger(), *measured], model, STEPS)
        tokens = sums([tokens for _, tokens in by_step(model.given, 6)])
        flops = 6 * sum(each.weight.numel() for each in [*model.blocks, model.head])
        logged = training_records(tmp_path)
        assert [record["total_petaflops"] * 1e15 for record in logged] == pytest.approx([flops * n for n in tokens])
        optimal = 20 * sum(each.numel() for each in model.parameters())
        assert [record["chinchilla_multiple"] for record in logged] == pytest.approx([n / optimal for n in tokens])
        assert min(record["mfu"] for record in logged) > 0


# --- refused ----------------------------------------------------------------------------------------------------------


def test_what_is_refused(library: ModuleType, tmp_path: Path) -> None:
    callback, message = library.REFUSED
    with pytest.raises(ds.EventNotFired, match=message):
        library.bridge([callback()], tmp_path)
    with pytest.raises(ds.DuplicateKey):
        library.bridge([Trace(), Trace()], tmp_path)
    with pytest.raises(ds.ConfigurationError, match=f"EarlyStopping needs evaluations: {library.EVALUATIONS}"):
        library.train(tmp_path, [EarlyStopping()], evaluates=False)


def test_two_bridges_in_one_training_are_refused(library: ModuleType, tmp_path: Path) -> None:
    if not hasattr(library, "train_with_two"):
        pytest.skip("a bridge is not a callback of this library")
    with pytest.raises(ds.ConfigurationError, match="two bridges take part"):
        library.train_with_two(tmp_path)


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(library: ModuleType, tmp_path: Path) -> None:
    class Holder(Trace):
        def state_dict(self) -> Any:
            return {"thing": object()}

    holder = Holder()
    with pytest.raises(ds.CannotSave, match=r"callbacks\.Holder"):
        library.train(tmp_path, [holder])
    assert holder.steps == 0


# --- docs/coming-from -------------------------------------------------------------------------------------------------


def test_the_examples_run(library: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples(library.PAGE)), {"__name__": "example"})
    folder, steps = library.EXAMPLE
    logged = [record["global_step"] for record in records(tmp_path / folder)["train.jsonl"] if "loss" in record]
    assert logged == list(steps)


def test_the_page_lists_what_is_refused(library: ModuleType, tmp_path: Path) -> None:
    rows = {
        "events that are never fired": [event.handler for event in library.UNSUPPORTED_EVENTS],
        "built-ins that are refused": refused_builtins(lambda given: library.bridge(given, tmp_path)),
    }
    assert_rows(library.PAGE, rows)
