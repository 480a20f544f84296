"""Norms of weights and gradients: of whole tensors, the same on every layout, held against another reckoning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks.grad_norm_ranks import Uneven
from callbacks.layouts import assert_same_values, layout_trainer, on_every_layout
from dalsegno.callbacks import EMA, ComputeNorm, GradNormLogger, ParameterNormLogger, WeightNormLogger
from dalsegno.callbacks.norms.parameter_norms import SpectralNorms
from dalsegno.logs import read_records
from dalsegno.testing import run_ranks, tiny_regression_data
from support.listeners import Listener
from support.small import small_trainer

WALL_CLOCK = ("timestamp", "peak_mem", "_runtime", "_per_second")
NAMES = {"embed.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "scale", "frozen"}


def all_of_them() -> Sequence[ds.Callback]:
    return [ComputeNorm(per_layer=True), GradNormLogger(), WeightNormLogger(), ParameterNormLogger()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return on_every_layout(tmp_path_factory.mktemp("norms"), all_of_them)


@pytest.mark.parametrize("log", ["train.jsonl", "gradient_norms.jsonl", "parameter_norms.jsonl"])
def test_the_same_on_every_layout(runs: dict[str, Path], log: str) -> None:
    assert_same_values(runs, f"logs/{log}", WALL_CLOCK)


def records(run: Path, log: str, kind: str | None = None) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "logs" / log) if record.get("kind") == kind]


def test_what_the_logs_hold(runs: dict[str, Path]) -> None:
    norms = records(runs["none"], "parameter_norms.jsonl")
    assert [record["global_step"] for record in norms] == [4, 8]
    assert set(norms[0]["norms"]) == set(norms[0]["spectral_norms"]) == NAMES
    train = records(runs["none"], "train.jsonl")[0]
    assert {key for key in train if "/" in key} == {
        *(f"param_norm/{layer}" for layer in ("embed", "blocks.0", "blocks.1")),
        *(f"grad_norm_unclipped/{layer}" for layer in ("embed", "blocks.0", "blocks.1")),
    }
    assert all("weight_norm" in record for record in records(runs["none"], "train.jsonl", "eval"))


def test_against_torch_itself(tmp_path: Path) -> None:
    """Reckoned in float64, one tensor after the other, at the moments that the callbacks speak of."""
    seen: dict[str, Any] = {"gradients": {}, "weights": {}}

    def on_gradients_ready(ctx: Any) -> None:
        seen["gradients"][ctx.state.global_step + 1] = total(p.grad for p in ctx.model.parameters())

    def on_step_end(ctx: Any) -> None:
        seen["weights"][ctx.step] = {name: p.detach().clone().double() for name, p in ctx.model.named_parameters()}

    listener = Listener({"on_gradients_ready": on_gradients_ready, "on_step_end": on_step_end}, name="witness")
    layout_trainer(tmp_path, "none", [*all_of_them(), listener]).train()
    for record in records(tmp_path, "train.jsonl"):
        step = record["global_step"]
        assert record["grad_norm_unclipped"] == pytest.approx(seen["gradients"][step], rel=1e-5)
        assert record["param_norm"] == pytest.approx(total(seen["weights"][step].values()), rel=1e-6)
    for record in records(tmp_path, "train.jsonl", "eval"):
        assert record["weight_norm"] == pytest.approx(total(seen["weights"][record["global_step"]].values()), rel=1e-6)
    for record in records(tmp_path, "parameter_norms.jsonl"):
        weights = seen["weights"][record["global_step"]]
        assert record["norms"] == pytest.approx({name: float(w.norm()) for name, w in weights.items()}, rel=1e-6)
        assert record["spectral_norms"] == pytest.approx({n: spectral(w) for n, w in weights.items()}, rel=1e-5)


@pytest.mark.parametrize("parallel", ["none", "fsdp"])
@pytest.mark.parametrize("ema_is_first", [True, False])
def test_of_evaluated_averages(tmp_path: Path, parallel: str, ema_is_first: bool) -> None:
    for seen, logged in run_ranks(evaluate_averages, 1 if parallel == "none" else 2, tmp_path, parallel, ema_is_first):
        assert len(logged) == 3 and logged == pytest.approx(seen, rel=1e-6)
        assert len(set(seen)) == 3


def evaluate_averages(output_dir: Path, parallel: str, ema_is_first: bool) -> tuple[list[float], list[float]]:
    """Norms of the weights that the model has in an evaluation, and those that its records have."""
    seen: list[float] = []
    logged: list[float] = []

    def on_prediction_step(ctx: Any) -> None:
        if ctx.index == 0:
            seen.append(total(getattr(p, "full_tensor", lambda p=p: p)() for p in ctx.model.parameters()))

    def on_log(ctx: Any) -> None:
        if ctx.kind == "eval":
            assert ctx.evaluated_weights == "EMA"
            logged.append(ctx.logs["weight_norm"])

    own = [EMA(0.9), WeightNormLogger()][:: 1 if ema_is_first else -1]
    listener = Listener({"on_prediction_step": on_prediction_step, "on_log": on_log})
    small_trainer(
        output_dir,
        *own,
        listener,
        parts={"eval_dataset": tiny_regression_data(8)},
        max_steps=6,
        eval_steps=2,
        learning_rate=0.3,
        parallel=parallel,
    ).train()
    return seen, logged


def total(tensors: Any) -> float:
    return float(torch.cat([each.double().reshape(-1) for each in tensors if each is not None]).norm())


def spectral(weight: Tensor) -> float:
    if weight.dim() < 2:
        return float(weight.abs().max())
    return float(torch.linalg.svdvals(weight.flatten(1))[0])


@pytest.mark.parametrize("shape", [(6, 4), (64, 64), (300, 300), (256, 700)])
def test_spectral_norms_are_right_at_any_size(shape: tuple[int, int]) -> None:
    """The largest singular values of matrices of random numbers lie close together: power iteration takes for ever."""
    torch.manual_seed(0)
    model = nn.Linear(*shape, bias=False)
    exact = float(torch.linalg.matrix_norm(model.weight.detach().double(), ord=2))
    assert SpectralNorms(200).measure(model).read()["weight"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("size", [1e-37, 1e-20, 1e-13, 1e10, 1e20, 1e35])
def test_spectral_norms_are_right_at_any_magnitude(size: float) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 24) * size)
            self.stack = nn.Parameter(torch.randn(2, 16, 8) * torch.tensor([size, size * 1e-15]).view(2, 1, 1))

    torch.manual_seed(0)
    model = Model()
    exact = {"weight": spectral(model.weight.detach().double())}
    exact |= {f"stack.{number}": spectral(each) for number, each in enumerate(model.stack.detach().double())}
    spectra = SpectralNorms(200)
    assert spectra.measure(model).read() == pytest.approx(exact, rel=1e-5, abs=0.0) and not spectra.unfinished


def test_stacked_matrices_are_measured_each() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 16, 8))
            self.mixed = nn.Conv1d(4, 8, 3, bias=False)

    model = Experts()
    measured = SpectralNorms(200).measure(model).read()
    exact = [float(each) for each in torch.linalg.matrix_norm(model.up.detach(), ord=2)]
    expected = {f"up.{number}": value for number, value in enumerate(exact)}
    assert measured == pytest.approx({**expected, "mixed.weight": spectral(model.mixed.weight.detach())}, rel=1e-5)


def test_what_is_not_found_in_time_is_said_and_goes_on_the_next_time() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300, bias=False)
    exact, spectra = spectral(model.weight.detach().double()), SpectralNorms(4)
    errors = []
    for _ in range(30):
        errors.append(abs(spectra.measure(model).read()["weight"] / exact - 1))
        assert spectra.unfinished or errors[-1] < 1e-3
    assert errors[-1] < 1e-3 < errors[0] < 0.2


def test_a_matrix_of_zeros_is_measured_once_it_is_something() -> None:
    """A LoRA adapter's second matrix begins so."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    spectra = SpectralNorms(10)
    assert spectra.measure(model).read() == {"weight": 0.0}
    nn.init.eye_(model.weight)
    assert spectra.measure(model).read()["weight"] == pytest.approx(1.0)
    model.weight.data[0, 0] = float("nan")
    assert spectra.measure(model).read()["weight"] != spectra.measure(model).read()["weight"]
    nn.init.eye_(model.weight)
    assert spectra.measure(model).read()["weight"] == pytest.approx(1.0)


def test_the_random_numbers_of_training_are_left_alone() -> None:
    model = Uneven()
    before = torch.get_rng_state()
    SpectralNorms(3).measure(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ParameterNormLogger(power_iter_steps=0), "power_iter_steps=0; needs an integer of at least 1"),
        (lambda: ParameterNormLogger(log_norms="yes"), "log_norms='yes'; allowed are True and False"),  # type: ignore[arg-type]
        (lambda: ParameterNormLogger(False, False), "writes nothing"),
        (lambda: ComputeNorm(per_layer=1), "per_layer=1; allowed are True and False"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(build: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message):
        build()
