"""GradNormLogger: whole norms, however the model is spread, and only where they are written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dalsegno as ds
from callbacks import grad_norm_ranks
from callbacks.stage import Stage
from dalsegno.callbacks import GradNormLogger, ParameterNormLogger
from dalsegno.distributed import gradients
from dalsegno.errors import ConfigurationError
from dalsegno.logs import read_records
from dalsegno.stateful.component import Component
from dalsegno.testing import run_ranks, tiny_regression_data
from support.small import small_trainer


def written(output_dir: Path) -> list[dict[str, Any]]:
    return list(read_records(output_dir / "logs/gradient_norms.jsonl"))


def one_by_one(model: nn.Module) -> dict[str, float]:
    return {
        name: parameter.grad.double().norm().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_one_record_for_each_step_that_evaluates(tmp_path: Path) -> None:
    model = grad_norm_ranks.model()
    model(grad_norm_ranks.tokens()).backward()
    stage = Stage(tmp_path, GradNormLogger(), model=model)
    stage.begin()
    stage.evaluate()  # before any step
    for step in range(1, 5):
        stage.update(step, evaluates=step % 2 == 0)
        if step % 2 == 0:
            model.zero_grad()
            stage.evaluate("valid")
            stage.evaluate("test")
            model(grad_norm_ranks.tokens()).backward()
    stage.end()
    records = written(tmp_path)
    assert [record["global_step"] for record in records] == [2, 4]
    assert set(records[0]) == {"timestamp", "global_step", "epoch", "norms"}
    assert records[0]["norms"] == pytest.approx(one_by_one(model), rel=1e-6)
    assert set(records[0]["norms"]) == {
        "embed.weight",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
        "scale",
    }


def test_only_of_parameters_whose_names_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grad_norm_ranks.model()
    model(grad_norm_ranks.tokens()).backward()
    measured: list[int] = []
    real = gradients.squared_norms
    monkeypatch.setattr(gradients, "squared_norms", lambda given: measured.append(len(given)) or real(given))
    stage = Stage(tmp_path, GradNormLogger(pattern=r"^blocks\.\d+\.weight"), model=model)
    stage.begin()
    stage.update(1, evaluates=True)
    stage.evaluate()
    stage.end()
    expected = {
        name: norm for name, norm in one_by_one(model).items() if name in ("blocks.0.weight", "blocks.1.weight")
    }
    assert written(tmp_path)[0]["norms"] == pytest.approx(expected, rel=1e-6) and len(expected) == 2
    assert measured == [2]


def test_two_of_one_class_write_arrays_that_a_heatmap_reads(tmp_path: Path) -> None:
    """Of gradients and of weights; a resume cuts them back as it does lines."""
    own: dict[str, Callable[..., ds.Callback]] = {"norms": GradNormLogger, "weights": ParameterNormLogger}
    for steps in (4, 6):
        loggers = [
            build(path=f"logs/{name}{ending}", name=f"{name}{ending}")
            for name, build in own.items()
            for ending in (".json", "-2.jsonl")
        ]
        parts = {"eval_dataset": tiny_regression_data(4, seed=1)}
        small_trainer(tmp_path, *loggers, parts=parts, max_steps=steps, eval_steps=2, save_steps=4).train()
    for name, metric in (("norms", "grad_norm"), ("weights", "spectral_norm")):
        array = json.loads((tmp_path / f"logs/{name}.json").read_text())
        assert [record["global_step"] for record in array] == [2, 4, 6]
        for file in (f"logs/{name}.json", f"logs/{name}-2.jsonl"):
            series = ds.open_log(tmp_path / file).parameters(metric)
            assert series.steps.tolist() == [2, 4, 6] and len(series.parameters) == 4
    assert not (tmp_path / "logs/gradient_norms.jsonl").exists()


def test_a_pattern_that_is_found_in_no_name(tmp_path: Path) -> None:
    stage = Stage(tmp_path, GradNormLogger(pattern="attention"), model=nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match="names of the 2 trainable parameters matches; the first is 'weight'"):
        stage.begin()
    with pytest.raises(ConfigurationError, match="is not a regular expression"):
        GradNormLogger(pattern="(")


def test_norms_of_an_evaluation_that_did_not_come_are_not_those_of_a_later_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(2)).backward()
    stage = Stage(tmp_path, GradNormLogger(), model=model)
    stage.begin()
    stage.update(1, evaluates=True)
    stage.update(2, evaluates=False)
    stage.evaluate()
    stage.end()
    assert written(tmp_path) == []


def sparse() -> Tensor:
    return torch.sparse_coo_tensor([[0, 0, 1]], torch.tensor([[3.0], [1.0], [3.0]]), (5, 1), check_invariants=True)


@pytest.mark.parametrize(
    ("gradient", "norm"),
    [
        (torch.full((100_000,), 0.1, dtype=torch.bfloat16), 0.10009765625 * 100_000**0.5),
        (torch.tensor([3.0, 4.0], dtype=torch.float64), 5.0),
        (torch.tensor([3 + 4j]), 5.0),
        (sparse(), 5.0),
        (torch.zeros(0, 3), 0.0),
        (torch.tensor(-2.0), 2.0),
        (torch.tensor([float("nan")]), float("nan")),
    ],
)
def test_gradients_of_every_kind_beside_an_ordinary_one(tmp_path: Path, gradient: Tensor, norm: float) -> None:
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)))
    model.register_parameter("b", nn.Parameter(torch.zeros(2)))
    model.a.grad = gradient
    model.b.grad = torch.tensor([6.0, 8.0])
    stage = Stage(tmp_path, GradNormLogger(), model=model)
    stage.begin()
    stage.update(1, evaluates=True)
    stage.evaluate()
    stage.end()
    assert written(tmp_path)[0]["norms"] == pytest.approx({"a": norm, "b": 10.0}, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("way", grad_norm_ranks.WAYS)
def test_two_ranks_write_what_one_would(tmp_path: Path, way: str) -> None:
    run_ranks(grad_norm_ranks.one_step, 2, way, tmp_path)
    alone = grad_norm_ranks.model()
    alone(grad_norm_ranks.tokens()).backward()
    assert written(tmp_path)[0]["norms"] == pytest.approx(one_by_one(alone), rel=1e-5)


def test_its_state_is_not_compared_between_ranks() -> None:
    component = Component("callbacks.GradNormLogger", GradNormLogger())
    assert (component.scope, component.compared) == ("replicated", False)


def test_no_value_is_read_before_the_evaluation_is_done(tmp_path: Path) -> None:
    """On the meta device there are no values: whoever waits for one gets an error."""
    with torch.device("meta"):
        model = grad_norm_ranks.Uneven()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage = Stage(tmp_path, GradNormLogger(), model=model)
    stage.begin()
    stage.update(1, evaluates=True)
    with pytest.raises(NotImplementedError, match="meta"):
        stage.evaluate()
    stage.end()


def test_all_values_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = grad_norm_ranks.model()
    model(grad_norm_ranks.tokens()).backward()
    stage = Stage(tmp_path, GradNormLogger(), model=model)
    stage.begin()
    stage.update(1, evaluates=True)
    reads: list[int] = []
    real = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor.numel()) or real(tensor))
    monkeypatch.setattr(Tensor, "item", None)
    stage.evaluate()
    assert reads == [5]
    stage.end()
