"""Fragments, and outer steps against computations of their own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.diloco.server.outer import DelayedNesterov, GlobalModel, MakeOptimizer, ReadBlock, nesterov, outer_step
from dalsegno.diloco.wire.signature import Specs, TensorSpec, fragments_of
from dalsegno.errors import ConfigurationError

SPECS = (TensorSpec("a.weight", torch.float32, (3, 4)), TensorSpec("a.bias", torch.float32, (4,)))


def rounds(specs: Specs, workers: int, count: int) -> list[list[dict[str, torch.Tensor]]]:
    """Pseudo-gradients by round, worker and name."""
    generator = torch.Generator().manual_seed(0)
    return [
        [{spec.name: torch.randn(spec.shape, generator=generator) for spec in specs} for _ in range(workers)]
        for _ in range(count)
    ]


def reader(submissions: list[dict[str, torch.Tensor]]) -> ReadBlock:
    return lambda number, spec, begin, count: submissions[number][spec.name].view(-1)[begin : begin + count]


@pytest.mark.parametrize(
    "make",
    [nesterov(), lambda parameters: torch.optim.Adam(parameters, lr=0.1), nesterov(0.5, 0.8, is_nesterov=False)],
    ids=["nesterov", "adam", "momentum"],
)
def test_rounds_equal_a_plain_computation_bitwise(make: MakeOptimizer) -> None:
    weights = [3, 5, 1]
    model = GlobalModel(SPECS)
    optimizer = make(model.by_name.values())
    plain = [torch.zeros(spec.shape, requires_grad=True) for spec in SPECS]
    reference = make(plain)  # type: ignore[arg-type]
    for submissions in rounds(SPECS, workers=3, count=4):
        outer_step(model, optimizer, SPECS, weights, lambda of=submissions: reader(of))
        for parameter, spec in zip(plain, SPECS, strict=True):
            shares = [
                torch.tensor(weight / 9) * each[spec.name] for weight, each in zip(weights, submissions, strict=True)
            ]
            parameter.grad = shares[0] + shares[1] + shares[2]
        reference.step()
    for parameter, spec in zip(plain, SPECS, strict=True):
        assert torch.equal(model.by_name[spec.name], parameter)


@pytest.mark.parametrize("size", [1, 3])
def test_delayed_nesterov_is_that_of_the_paper(size: int) -> None:
    """Algorithm 3 of arXiv:2401.09135 with c = 0, in float64."""
    lr, decay = 0.7, 0.9
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = DelayedNesterov([parameter], lr, decay, size)
    theta, momentum, total = (torch.zeros(5, dtype=torch.float64) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    for t in range(10):
        gradient = torch.randn(5, dtype=torch.float64, generator=generator)
        total = total + gradient
        if (t + 1) % size == 0:
            momentum = decay * momentum + total / size
            theta = theta - lr * (decay * momentum + gradient / size)
            total = torch.zeros_like(total)
        else:
            theta = theta - lr * gradient / size
        parameter.grad = gradient
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), theta, rtol=1e-12, atol=1e-12)


def test_delayed_nesterov_without_delay_is_torchs_own() -> None:
    own, theirs = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    optimizers = [DelayedNesterov([own], 0.7, 0.9, 1), torch.optim.SGD([theirs], 0.7, 0.9, nesterov=True)]
    for gradient in torch.randn(5, 7, generator=torch.Generator().manual_seed(2)):
        own.grad = theirs.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(own, theirs)


def test_a_fragment_changes_its_parameters_only() -> None:
    model = GlobalModel(SPECS)
    optimizer = nesterov()(model.by_name.values())
    outer_step(model, optimizer, SPECS[1:], [1], lambda: lambda _number, _spec, _begin, count: torch.ones(count))
    assert not model.by_name["a.weight"].any()
    assert (model.by_name["a.bias"] != 0).all()
    assert list(optimizer.state) == [model.by_name["a.bias"]]


def test_narrow_parameters_are_kept_in_float32() -> None:
    spec = TensorSpec("w", torch.bfloat16, (2,))
    model = GlobalModel((spec,))
    assert model.by_name["w"].dtype == torch.float32
    model.by_name["w"].data.copy_(torch.tensor([1.5, -2.0]))
    (piece,) = model.bytes_as_trained((spec,))
    assert bytes(piece) == torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["", "a..b", "training", "a.weight.", ".a"])
def test_names_that_no_module_has_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="no module has a parameter of this name"):
        GlobalModel((TensorSpec(name, torch.float32, (1,)),))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 12))
@settings(deadline=None)
def test_fragments_are_balanced_by_bytes(sizes: list[int], count: int) -> None:
    specs = tuple(TensorSpec(str(number), torch.float32, (size,)) for number, size in enumerate(sizes))
    if count > len(specs):
        with pytest.raises(ConfigurationError, match="num_fragments"):
            fragments_of(specs, count)
        return
    parts = fragments_of(specs, count)
    assert len(parts) == count
    assert all(parts)
    assert tuple(spec for part in parts for spec in part) == specs
    assert max(sum(spec.shape[0] for spec in part) for part in parts) == _smallest_largest(sizes, count)


def _smallest_largest(sizes: list[int], count: int) -> int:
    """By trying every way to cut."""
    best = {0: {0: 0}}
    for pieces in range(1, count + 1):
        best[pieces] = {
            end: min(max(best[pieces - 1][begin], sum(sizes[begin:end])) for begin in best[pieces - 1] if begin < end)
            for end in range(pieces, len(sizes) + 1)
            if any(begin < end for begin in best[pieces - 1])
        }
    return best[count][len(sizes)]
