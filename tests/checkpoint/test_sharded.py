"""State of models and optimizers of all kinds is restored bit by bit; mismatches are reported name by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpoint.parts import small_model, train
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, ShardedState
from dalsegno.errors import CannotSave, StateMismatch


def carry_over(directory: Path, source: Sequence[ShardedState], target: Sequence[ShardedState]) -> None:
    """Save ``source`` and load it into ``target``, as two processes would."""
    CheckpointManager(directory).save(1, source, [])
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, target, [])


def two_groups(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    weights = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=0.1, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
    "groups": two_groups,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    straight = small_model()
    optimizer = OPTIMIZERS[name](straight)
    train(straight, optimizer, 3)
    cut = small_model(seed=7)
    other = OPTIMIZERS[name](cut)
    carry_over(
        tmp_path,
        [ModelState(straight), OptimizerState(straight, optimizer)],
        [ModelState(cut), OptimizerState(cut, other)],
    )
    assert_same(sorted_keys(optimizer.state_dict()), sorted_keys(other.state_dict()))
    train(straight, optimizer, 2)
    train(cut, other, 2)
    assert_same(dict(straight.state_dict()), dict(cut.state_dict()))
    assert_same(sorted_keys(optimizer.state_dict()), sorted_keys(other.state_dict()))


def sorted_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: sorted_keys(tree[key]) for key in sorted(tree, key=str)}
    return [sorted_keys(each) for each in tree] if isinstance(tree, list) else tree


def test_an_optimizer_without_state_yet(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    saved = torch.optim.AdamW(model.parameters(), lr=0.25)
    carry_over(tmp_path, [OptimizerState(model, saved)], [OptimizerState(other, optimizer)])
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.25


def test_state_of_another_type_than_its_parameter(tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` would cast it."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2).bfloat16()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    (model, optimizer), (other_model, other) = made(), made()
    wanted = {"master": torch.randn(2, 3), "scale": torch.tensor(1 / 3), "mode": "fast", "history": [torch.ones(1) / 3]}
    optimizer.state[model.weight].update(wanted)
    carry_over(tmp_path, [OptimizerState(model, optimizer)], [OptimizerState(other_model, other)])
    assert_same(sorted_keys(dict(other.state[other_model.weight])), sorted_keys(wanted))


def test_groups_may_list_their_parameters_in_another_order(tmp_path: Path) -> None:
    model, other = small_model(), small_model(1)
    optimizer = torch.optim.Adam(list(model.parameters()))
    reordered = torch.optim.Adam(list(other.parameters())[::-1])
    train(model, optimizer)
    carry_over(tmp_path, [OptimizerState(model, optimizer)], [OptimizerState(other, reordered)])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(sorted_keys(optimizer.state[one]), sorted_keys(reordered.state[two]))


def test_parameters_of_nobody(tmp_path: Path) -> None:
    """An optimizer may update more than the model, a learned temperature say."""

    def made() -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, more = small_model(), nn.Parameter(torch.ones(2))
        return model, more, torch.optim.Adam([*model.parameters(), more])

    (model, more, optimizer), (other_model, other_more, other) = made(), made()
    more.grad = torch.ones(2)
    optimizer.step()
    carry_over(tmp_path, [OptimizerState(model, optimizer)], [OptimizerState(other_model, other)])
    assert_same(sorted_keys(other.state[other_more]), sorted_keys(optimizer.state[more]))


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    carry_over(tmp_path, [ModelState(model)], [ModelState(other)])
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)
    shard = tmp_path / "checkpoints/step-00000001/model/shard-00000.safetensors"
    assert shard.stat().st_size == 4096 + 6 * 4 * 4


def test_tied_weights_of_a_model_that_no_longer_ties_them(tmp_path: Path) -> None:
    model, other = Tied(), Tied(tie=False)
    carry_over(tmp_path, [ModelState(model)], [ModelState(other)])
    assert torch.equal(other.head.weight, model.embed.weight) and torch.equal(other.embed.weight, model.embed.weight)


def test_two_tensors_for_what_is_one_now(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match=r"head\.weight: tied to embed\.weight here, but saved as two"):
        carry_over(tmp_path, [ModelState(Tied(tie=False))], [ModelState(Tied())])


class WithExtraState(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_state_and_buffers(tmp_path: Path) -> None:
    model, other = WithExtraState({"scale": (1.5, torch.ones(2))}), WithExtraState(None)
    model.mean.fill_(3.0)
    carry_over(tmp_path, [ModelState(model)], [ModelState(other)])
    assert_same(other.value, model.value)
    assert torch.equal(other.mean, model.mean)


def test_extra_state_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CannotSave, match=r"^model\.extra\._extra_state: cannot save a object"):
        CheckpointManager(tmp_path).save(1, [ModelState(WithExtraState(object()))], [])


def test_names_are_the_models_own(tmp_path: Path) -> None:
    """Not those of torch.compile or activation checkpointing, which one may switch on and off between legs."""
    plain = small_model()
    wrapped = torch.compile(nn.Sequential(*(checkpoint_wrapper(each) for each in small_model(1))))
    optimizer, other = (torch.optim.AdamW(model.parameters()) for model in (plain, wrapped))
    train(plain, optimizer)
    carry_over(
        tmp_path,
        [ModelState(plain), OptimizerState(plain, optimizer)],
        [ModelState(wrapped), OptimizerState(wrapped, other)],
    )
    for one, two in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(one, two)
        assert_same(sorted_keys(optimizer.state[one]), sorted_keys(other.state[two]))


def test_channels_last_and_half_precision(tmp_path: Path) -> None:
    model, other = (nn.Conv2d(3, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last) for _ in range(2))
    carry_over(tmp_path, [ModelState(model)], [ModelState(other)])
    assert torch.equal(model.weight, other.weight) and other.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_that_does_not_fit_hears_all_of_it(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "d": nn.Linear(1, 1, bias=False)})
    other = nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(2, 2), "d": nn.Linear(1, 1, bias=False).double()})
    before = other["a"].weight.clone()
    with pytest.raises(StateMismatch) as raised:
        carry_over(tmp_path, [ModelState(model)], [ModelState(other)])
    assert str(raised.value).splitlines() == [
        f"{tmp_path}/checkpoints/step-00000001: the saved state does not fit this run; nothing was loaded:",
        "  model: the checkpoint does not fit this torch.nn.modules.container.ModuleDict",
        "    a.bias: saved as [3] float32, here [4] float32",
        "    a.weight: saved as [3, 2] float32, here [4, 2] float32",
        "    d.weight: saved as [1, 1] float32, here [1, 1] float64",
        "    missing in the checkpoint: c.bias [2] float32",
        "    missing in the checkpoint: c.weight [2, 2] float32",
        "    unexpected in the checkpoint: b.bias [2] float32",
        "    unexpected in the checkpoint: b.weight [2, 2] float32",
        'to load it all the same, set allow_changes=("model",):',
        "  model: tensors that fit are loaded, cast if needed, with their optimizer state; all others stay as built",
    ]
    assert torch.equal(before, other["a"].weight)


def test_an_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(StateMismatch, match=r"(?s)1 parameter groups in the checkpoint, 2 here.*unexpected.*: 0\.bias"):
        carry_over(
            tmp_path,
            [OptimizerState(model, torch.optim.AdamW(model.parameters()))],
            [OptimizerState(model, two_groups(model))],
        )


def test_a_parameter_that_is_no_plain_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(2).to_mkldnn())
    with pytest.raises(CannotSave, match=r"model\.graph: cannot save a Tensor with torch\._mkldnn"):
        CheckpointManager(tmp_path).save(1, [ModelState(model)], [])
