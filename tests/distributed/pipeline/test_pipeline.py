"""A model cut into pipeline stages trains, measures and saves as one process does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dalsegno as ds
from dalsegno.testing import run_ranks, start_ranks
from support import pipelined
from support.pipelined import SCHEDULES


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-3) -> None:
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("tensor_parallel", "data_ranks"), [(1, 1), (2, 1), (1, 2)], ids=["", "layers split", "stages sharded"]
)
def test_a_step_is_that_of_torch_alone(tmp_path: Path, tensor_parallel: int, data_ranks: int) -> None:
    """1F1B over two stages, clipped by the norm of both, beside a loop with torch's PipelineStage."""
    ranks = 2 * tensor_parallel * data_ranks
    (_, first), *_, (losses, second) = run_ranks(pipelined.by_hand, ranks, tensor_parallel, data_ranks)
    ours = run_ranks(pipelined.by_trainer, ranks, tmp_path, tensor_parallel, data_ranks)
    for seen, weights in ours:
        assert seen == pytest.approx(losses, rel=1e-6)
        assert_close({name: each for name, each in weights.items() if "weight" in name}, first | second, 1e-6)
    assert all(seen == ours[0][0] for seen, _ in ours)


def test_every_schedule_trains_as_one_process(tmp_path: Path) -> None:
    """Losses, total gradient norms and evaluations on every rank; weights where they are, tied ones on both ranks."""
    [(steps, evaluated, weights)] = run_ranks(pipelined.train, 1, tmp_path / "one", "none")
    first, second = run_ranks(pipelined.train_each, 2, tmp_path, SCHEDULES)
    for name in SCHEDULES:
        for seen, metrics, own in (first[name], second[name]):
            assert np.array(seen) == pytest.approx(np.array(steps), rel=1e-3), name
            assert metrics["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
            assert_close(own, weights)
        assert first[name][0] == second[name][0]
        assert first[name][2].keys() | second[name][2].keys() == weights.keys()
        assert first[name][2].keys() & second[name][2].keys() == {"tokens.weight"}
        assert np.array_equal(first[name][2]["tokens.weight"], second[name][2]["tokens.weight"])


def test_killed_and_resumed_bit_by_bit(tmp_path: Path) -> None:
    """With dropout, which draws other numbers on each stage."""
    parallel = ds.Pipeline(4, "interleaved", microbatches=2)
    whole = run_ranks(pipelined.resume_until_killed, 2, tmp_path / "whole", parallel, None, 0)
    for rank, step in ((1, 4), (0, 2)):
        killed = start_ranks(pipelined.resume_until_killed, 2, tmp_path / "killed", parallel, rank, step).wait()
        assert killed[rank].was_killed
    resumed = run_ranks(pipelined.resume_until_killed, 2, tmp_path / "killed", parallel, None, 0)
    for weights, expected in zip(resumed, whole, strict=True):
        assert weights.keys() == expected.keys()
        assert all(np.array_equal(weights[name], expected[name]) for name in weights)
    assert pipelined.records(tmp_path / "killed") == pipelined.records(tmp_path / "whole")


def test_one_checkpoint_fits_every_layout(tmp_path: Path) -> None:
    """Each leg under another one: weights and optimizer are restored bit by bit."""
    pipeline = ds.Pipeline(2, microbatches=2)
    legs: list[tuple[Any, int, dict[str, int]]] = [
        (pipeline, 2, {}),
        ("none", 1, {}),
        (ds.Pipeline(4, "looped_bfs"), 2, {}),
        ("fsdp", 2, {"per_device_train_batch_size": 1}),
        (pipeline, 2, {}),
        ("ddp", 2, {"per_device_train_batch_size": 1}),
    ]
    saved: dict[str, Any] = {}
    for number, (parallel, ranks, settings) in enumerate(legs, start=1):
        left: dict[str, Any] = {}
        for loaded, state in run_ranks(_resume, ranks, tmp_path, parallel, number, settings):
            assert all(np.array_equal(value, saved[name]) for name, value in loaded.items() if saved), parallel
            left |= state
        assert not saved or left.keys() == saved.keys()
        saved = left


def _resume(folder: Path, parallel: Any, steps: int, settings: dict[str, int]) -> Any:
    return pipelined.resume(folder, parallel, steps, **settings)


def test_built_ins_measure_the_whole_model(tmp_path: Path) -> None:
    """Norms, spectral norms, histograms, learning dynamics and an average of the weights, as in one process."""
    [expected] = run_ranks(pipelined.measure, 1, tmp_path / "one", "none")
    first, _ = run_ranks(pipelined.measure, 2, tmp_path / "two", ds.Pipeline(2, "gpipe"))
    assert first.keys() == expected.keys() > {"gradient_norms", "grad_histograms", "learning_dynamics"}
    for log, records in first.items():
        assert len(records) == len(expected[log]), log
        for record, one in zip(records, expected[log], strict=True):
            assert _flat(record) == pytest.approx(_flat(one), rel=1e-4, abs=1e-7), log


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            flat |= {f"{prefix}{key}.{number}": each for number, each in enumerate(value)}
        elif isinstance(value, int | float) and "effective" not in key:
            flat[f"{prefix}{key}"] = value
    return flat


def test_spectral_norms_of_stacked_matrices_are_those_of_all_stages(tmp_path: Path) -> None:
    [expected] = run_ranks(pipelined.spectral_norms, 1, tmp_path / "one", "none")
    found, _ = run_ranks(pipelined.spectral_norms, 2, tmp_path / "two", ds.Pipeline(2, "gpipe"))
    assert len(expected) == 6
    assert found == pytest.approx(expected, rel=1e-3)


def test_outputs_of_a_prediction_reach_every_rank(tmp_path: Path) -> None:
    [(metrics, logits)] = run_ranks(pipelined.predict, 1, tmp_path / "one", "none")
    for found, seen in run_ranks(pipelined.predict, 2, tmp_path / "two", ds.Pipeline(2, "gpipe")):
        assert found["test_loss"] == pytest.approx(metrics["test_loss"])
        assert len(seen) == len(logits) > 0
        for ours, theirs in zip(seen, logits, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_finding_the_shapes_leaves_no_trace(tmp_path: Path) -> None:
    """Torch runs each stage once more before the first step: statistics of buffers and hooks of callbacks miss it."""
    [(expected, calls, to_the_end)] = run_ranks(pipelined.normalize, 1, tmp_path / "one", "none")
    found = run_ranks(pipelined.normalize, 2, tmp_path / "two", ds.Pipeline(["blocks.2"]))
    buffers = found[0][0] | found[1][0]
    assert buffers.keys() == expected.keys()
    assert_close(buffers, expected, 1e-5)
    assert sum(count for _, count, _ in found) == calls == 3 * 2 * 3
    assert [ended for _, _, ended in found] == [0, to_the_end] == [0, 3 * 2]


def test_all_stages_skip_an_update_together(tmp_path: Path) -> None:
    for weights, skipped in run_ranks(pipelined.overflow, 2, tmp_path):
        assert skipped == [1]
        first, second, third = weights
        assert all(np.array_equal(first[name], second[name]) for name in first)
        assert not any(np.array_equal(second[name], third[name]) for name in first if "weight" in name)


def test_a_pipeline_over_shards(tmp_path: Path) -> None:
    """Two stages, each sharded over two ranks, and two on each rank: as one process, with a fused optimizer, too; it
    resumes a checkpoint of a pipeline alone, and its own fits that one."""
    both = [ds.Pipeline(2), ds.FSDP()]
    interleaved = [ds.Pipeline(4, "interleaved", size=2), ds.FSDP()]
    settings = {"per_device_train_batch_size": 1}
    fused = settings | {"optim": "adamw_fused"}
    [(steps, evaluated, weights)] = run_ranks(pipelined.train, 1, tmp_path / "one", "none")
    for each in run_ranks(_train, 4, tmp_path / "four", [(both, settings), (interleaved, fused)]):
        for seen, metrics, own in each:
            assert np.array(seen) == pytest.approx(np.array(steps), rel=1e-3)
            assert metrics["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
            assert_close(own, weights)
    alone = (ds.Pipeline(2), 2, {"optim": "adamw_fused"})
    saved: dict[str, Any] = {}
    for number, (parallel, ranks, its) in enumerate([alone, (both, 4, fused), alone]):
        left: dict[str, Any] = {}
        for loaded, state in run_ranks(_resume, ranks, tmp_path / "both", parallel, number + 1, its):
            assert all(np.array_equal(value, saved[name]) for name, value in loaded.items() if saved)
            left |= state
        saved = left


def _train(folder: Path, ways: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    return [pipelined.train(folder / str(number), each, **settings) for number, (each, settings) in enumerate(ways)]


@pytest.mark.parametrize(
    "stages",
    [["head"], [["enter", "layers"], ["head"]], pipelined.begin_at_the_last],
    ids=["by its entry", "listed", "by a function"],
)
def test_a_list_of_layers_is_in_one_stage(tmp_path: Path, stages: Any) -> None:
    """The model calls the layers, not the list; so a stage has them each by itself. The user's own batches need not
    divide into the micro-batches."""
    [(expected, _)] = run_ranks(pipelined.train_headed, 1, tmp_path / "one", "none")
    pipeline = ds.Pipeline(stages, "gpipe", microbatches=3)
    for found, names in run_ranks(pipelined.train_headed, 2, tmp_path / "two", pipeline):
        assert found == pytest.approx(expected)
        assert names


def test_transformers_train_as_in_one_process(tmp_path: Path) -> None:
    """A Llama with tied embeddings and a Mixtral, with their own loss and masks."""
    [expected] = run_ranks(pipelined.train_transformers, 1, tmp_path / "one", "none")
    for found in run_ranks(pipelined.train_transformers, 2, tmp_path / "two", ds.Pipeline(2)):
        for kind, (steps, logits) in found.items():
            assert np.array(steps) == pytest.approx(np.array(expected[kind][0]), rel=1e-4), kind
            assert len(logits) == len(expected[kind][1]) > 0
            for ours, theirs in zip(logits, expected[kind][1], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    expected = {
        "1f1b needs more micro-batches": "a step has 1 micro-batches .* 2, 3, 4, 5",
        "too many stages": "layers', has 6 blocks with parameters: from 2 to 6 stages fit",
        "an unknown module": "'layer.3'.* 'layers.3'",
        "a module in no stage": "'layers.2' has parameters and is in no stage",
        "a callback of the backward pass": "Backward needs on_before_backward, which a pipeline cannot fire",
        "a callback that hooks modules": "DumpActivations: does not work under a pipeline",
        "a compiled model": "torch_compile=True does not work with",
        "a batch that does not divide": "4 samples .* 3 micro-batches",
        "too many stages for the ranks": "3 does not divide the 2 ranks",
        "one stage on each rank": "use 4 stages",
        "a stage without parameters": r"stage 1 has no parameters \(1\); use fewer stages",
        "a split module in several stages": "the plan has 'layers', parts of which are in several stages",
        "a fused optimizer of split and whole layers": "cannot update the split layers of TensorParallel",
        "more stages than ranks by a function": "3 stages for 2 ranks, but this schedule has one stage on each rank",
    }
    for errors in run_ranks(pipelined.be_refused, 2, tmp_path):
        assert errors.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.search(pattern, errors[name], re.DOTALL), errors[name]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_its_stage_ends_all_ranks(tmp_path: Path, rank: int) -> None:
    """The cause is raised on that rank; what the other raises, unless it is killed, points to it."""
    outcomes = start_ranks(pipelined.fail_in_a_stage, 2, tmp_path, rank).wait()
    assert all(outcome.exit_code for outcome in outcomes)
    assert "ZeroDivisionError: this stage has failed" in (outcomes[rank].error or "")
    other = outcomes[1 - rank]
    assert other.was_killed or "if another rank failed, its output has the cause" in (other.error or "")


def test_stages_by_a_function_are_text_that_each_process_has() -> None:
    pipeline = ds.Pipeline(pipelined.begin_at_the_last, "gpipe")
    assert str(pipeline) == "Pipeline(stages=begin_at_the_last, schedule='gpipe')"
    with pytest.raises(ds.ConfigurationError, match="Pipeline needs size= here"):
        ds.TrainingArguments("run", parallel=[pipeline, ds.FSDP()])


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["blocks.2"], "stage 1 uses a value that an earlier stage computes"),
        ([["blocks.1"], ["blocks.0", "blocks.2"]], "stage 1 calls blocks.1, which is in stage 0"),
    ],
    ids=["a connection that skips a boundary", "modules in another order"],
)
def test_a_cut_that_the_forward_does_not_follow_ends_the_first_step(tmp_path: Path, stages: Any, text: str) -> None:
    outcomes = start_ranks(pipelined.train_skipping, 2, tmp_path, ds.Pipeline(stages, "gpipe")).wait()
    assert all(outcome.exit_code for outcome in outcomes)
    assert any(text in (outcome.error or "") for outcome in outcomes)
