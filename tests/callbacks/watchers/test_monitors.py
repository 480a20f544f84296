"""Spikes, memory and lines of code that grow: against a plain reading, and in a run that is killed and resumed."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import statistics
import subprocess
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dalsegno as ds
from callbacks.scripted import Kept, trainer
from dalsegno.callbacks import GPUMonitor, MemoryMonitor, ProfilerCallback, StabilityMonitor, TraceMalloc
from dalsegno.callbacks.profiling import memory
from dalsegno.callbacks.watchers.stability_monitor import FEWEST, SpikeScore
from dalsegno.distributed import collectives
from dalsegno.errors import StateMismatch
from dalsegno.testing import run_ranks
from support.listeners import Listener


def spikes_as_defined(values: list[float], window: int, deviations: float) -> list[float]:
    """The score after each value, with the whole past at hand."""
    finite: list[float] = []
    judged = spikes = 0
    scores = []
    for value in values:
        recent = finite[-window:]
        if len(recent) >= FEWEST:
            judged += 1
            far = abs(value - statistics.fmean(recent)) > deviations * statistics.pstdev(recent)
            spikes += not math.isfinite(value) or far
        if math.isfinite(value):
            finite.append(value)
        scores.append(spikes / judged if judged else 0.0)
    return scores


@given(
    st.lists(st.floats(-9, 9).map(lambda x: round(x, 3)) | st.sampled_from([50.0, math.nan, math.inf]), max_size=90),
    st.integers(FEWEST, 60),
    st.integers(0, 90),
)
def test_the_score_is_its_definition_however_often_it_is_resumed(values: list[float], window: int, cut: int) -> None:
    one, two = SpikeScore(window, 2.5), SpikeScore(window, 2.5)
    scores = []
    for value in values[:cut]:
        one.observe(value)
        scores.append(one.value)
    two.load_state_dict(one.state_dict())
    for value in values[cut:]:
        two.observe(value)
        scores.append(two.value)
    assert scores == pytest.approx(spikes_as_defined(values, window, 2.5))


def test_a_constant_never_spikes() -> None:
    score = SpikeScore(64, 6.0)
    for _ in range(200):
        score.observe(0.1)
    assert score.value == 0.0


def test_a_spike_counts_over_a_resume(tmp_path: Path) -> None:
    losses = [2.0 + 0.01 * (step % 3) for step in range(60)]
    losses[50] = 9.0
    kept = Kept()
    trainer(tmp_path / "whole", losses, StabilityMonitor("loss"), kept, save_steps=45).train()
    by_step = {step: logs["spike_score/loss"] for step, logs in kept.of("train").items()}
    assert (by_step[50], by_step[51], by_step[60]) == (0.0, 1 / (51 - FEWEST), 1 / (60 - FEWEST))

    def stop(ctx: ds.StepEndContext) -> None:
        if ctx.state.global_step == 47:
            raise KeyboardInterrupt

    killed = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        leaver = Listener({"on_step_end": stop}, name="leaver")
        trainer(killed, losses, StabilityMonitor("loss"), leaver, save_steps=45).train()
    again = Kept()
    trainer(killed, losses, StabilityMonitor("loss"), again, save_steps=45).train()
    resumed = {step: logs["spike_score/loss"] for step, logs in again.of("train").items()}
    assert resumed == {step: score for step, score in by_step.items() if step > 45}


def test_a_shorter_window_than_the_saved_one_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    losses = [2.0 + 0.01 * (step % 3) for step in range(60)]
    trainer(tmp_path, losses[:50], StabilityMonitor("loss", window=100)).train()
    again = trainer(tmp_path, losses, StabilityMonitor("loss", window=40))
    with pytest.raises(StateMismatch, match="window=40; the checkpoint has 50 values"):
        again.train()
    assert again.state.global_step == 0


def test_values_whose_squares_are_no_floats_are_judged() -> None:
    score = SpikeScore(64, 6.0)
    for step in range(40):
        score.observe(1e308 if step % 2 else -1e308)
    assert score.value == 0.0
    score.observe(0.0)
    assert score.value == 0.0


def memory_of_a_rank(output_dir: Path) -> list[dict[str, int]]:
    kept = Kept()
    trainer(output_dir, [1.0] * 3, MemoryMonitor(), kept).train()
    return [{name: value for name, value in logs.items() if "memory" in name} for logs in kept.of("train").values()]


def test_memory_is_that_of_the_process_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(memory_of_a_rank, 2, tmp_path)
    assert one == other
    assert len(one) == 3
    for record in one:
        assert record.keys() == {"memory/resident", "memory/resident_peak"}
        assert 10 << 20 < record["memory/resident"] <= record["memory/resident_peak"]


DRIVER = """
typedef struct { unsigned int gpu, memory; } Rates;
static unsigned int number(void *gpu) { return (unsigned int)(unsigned long)gpu; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **gpu) { *gpu = (void *)(index + 1ul); return 0; }
int nvmlDeviceGetUtilizationRates(void *gpu, Rates *rates) { rates->gpu = 10 * number(gpu); return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned int *milliwatts) { *milliwatts = 250500 * number(gpu); return POWER; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned int *celsius) { *celsius = 90 - number(gpu); return 0; }
"""
"""Stands for NVIDIA's, which no machine has without a GPU. POWER is an error, such as 3 for "not supported"."""


def load_of_a_rank(output_dir: Path, driver: Path | None) -> tuple[list[dict[str, float]], list[str]]:
    """As if the model, which is on the CPU, were on the rank's GPU; the numbers, and the warnings."""
    said: list[str] = []
    watching = logging.Handler(logging.WARNING)
    watching.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dalsegno").addHandler(watching)
    if driver is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "2,0"  # of which the driver knows nothing
        ctypes.CDLL(str(driver))  # under the name by which the library then finds it
        memory.device_of = lambda model: torch.device("cuda", collectives.rank())
    kept = Kept()
    trainer(output_dir, [1.0] * 2, GPUMonitor(), kept).train()
    load = [{name: value for name, value in logs.items() if "gpu" in name} for logs in kept.of("train").values()]
    return load, [text for text in said if "GPUMonitor" in text]


@pytest.mark.parametrize("power", [0, 3], ids=["all", "without power"])
def test_what_the_driver_measures_is_logged_over_all_ranks(tmp_path: Path, power: int) -> None:
    pytest.importorskip("pynvml")
    (tmp_path / "driver.c").write_text(DRIVER)
    name, options = "libnvidia-ml.so.1", ["-shared", "-fPIC", f"-DPOWER={power}"]
    command = ["cc", *options, f"-Wl,-soname,{name}", "-o", tmp_path / name, tmp_path / "driver.c"]
    subprocess.run(command, check=True)
    (load, said), other = run_ranks(load_of_a_rank, 2, tmp_path / "run", tmp_path / name)
    assert load == other[0]
    known = {} if power else {"gpu/power": (3 * 250.5 + 250.5) / 2}
    assert load == [{"gpu/utilization": 20.0, "gpu/temperature": 89.0, **known}] * 2
    missing = ["GPUMonitor: the driver of cuda:0 does not report gpu/power"]
    assert said == (missing if power else [])


def test_without_a_gpu_its_load_is_not_logged(tmp_path: Path) -> None:
    [(load, said)] = run_ranks(load_of_a_rank, 1, tmp_path, None)
    assert load == [{}, {}]
    assert said == ["GPUMonitor: logs nothing, since the model is on cpu, not on an NVIDIA GPU"]


def test_the_line_that_keeps_memory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[bytearray] = []

    def leak(ctx: ds.StepEndContext) -> None:
        kept.append(bytearray(100_000))

    trainer(tmp_path, [1.0] * 5, Listener({"on_step_end": leak}, name="leak"), TraceMalloc(every=5, lines=1)).train()
    printed = capsys.readouterr().out.splitlines()
    table = printed[next(i for i, line in enumerate(printed) if line.startswith("memory of Python at step 5:")) :]
    assert f"test_monitors.py:{leak.__code__.co_firstlineno + 1}" in table[1]
    grown = float(table[1].split()[0])
    assert 4 * 100_000 / 1024 <= grown < 4 * 100_000 / 1024 + 2  # KiB, since the end of the first of five steps
    assert not tracemalloc.is_tracing()


def profile_while_tracing(output_dir: Path, rank: int, order: int) -> tuple[str, list[int]]:
    """What the run is refused with, and the steps that it has made."""
    kept = Kept()
    own = [ProfilerCallback(start_step=1, num_steps=1, rank=rank), TraceMalloc(every=5)][::order]
    try:
        trainer(output_dir, [1.0] * 3, *own, kept).train()
    except ds.ConfigurationError as error:
        return str(error), [*kept.of("train")]
    return "", [*kept.of("train")]


@pytest.mark.parametrize("order", [1, -1])
def test_no_profile_while_memory_of_python_is_traced(tmp_path: Path, order: int) -> None:
    """All ranks refuse what takes minutes on one; another rank may profile."""
    for message, steps in run_ranks(profile_while_tracing, 2, tmp_path / "same", 0, order):
        assert "ProfilerCallback: TraceMalloc, or" in message and "use only one" in message and not steps
    for message, steps in run_ranks(profile_while_tracing, 2, tmp_path / "other", 1, order):
        assert not message and steps == [1, 2, 3]
