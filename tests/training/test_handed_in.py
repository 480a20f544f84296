"""Whatever has a state and is handed to a Trainer is saved; what cannot be saved is refused when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, default_collate
from torchdata.stateful_dataloader.sampler import RandomSampler

import dalsegno as ds
from dalsegno.testing import tiny_regression_data
from support.models import Line
from support.own_loops import OwnLoop
from support.resumed import assert_resumes, stop_after
from support.small import small_trainer

DATA = tiny_regression_data(20)


class Counter:
    """Changes what it does with each call."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def factor(self) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Loss(Counter):
    def __call__(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output * self.factor, batch["y"])


class Weight(Counter):
    def __call__(self, batch: Any) -> float:
        return self.factor


class Collate(Counter):
    def __call__(self, samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return {**batch, "x": batch["x"] * self.factor}


class Passes(Counter):
    """Samples in an order that depends on the number of passes before."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(int(10 * self.factor))
        return iter(torch.randperm(20, generator=generator).tolist())

    def __len__(self) -> int:
        return 20


class Placed:
    """Samples in another order in each pass; what is loaded is the place where its next iterator continues."""

    def __init__(self) -> None:
        self.passes, self.place, self.begin = 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        self.passes += not begin
        generator = torch.Generator().manual_seed(self.passes)
        for self.place, index in enumerate(torch.randperm(20, generator=generator).tolist(), start=1):
            if self.place > begin:
                yield index

    def __len__(self) -> int:
        return 20

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.place, self.begin = state["passes"], state["place"], state["place"]


class Lookahead(torch.optim.SGD):
    """Adds its slow weights to its state_dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.slow, self.steps = [each.detach().clone() for each in self.param_groups[0]["params"]], 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                parameter.data.copy_(slow.lerp_(parameter.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
        self.slow, self.steps = [each.clone() for each in state["slow"]], state["steps"]


class Outputs(Line):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x)


def with_loader(**settings: Any) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda _: {
        "train_dataset": None,
        "train_dataloader": DataLoader(DATA, **{name: each() for name, each in settings.items()}),
    }


PARTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "loss_fn": lambda _: {"loss_fn": Loss()},
    "method": lambda _: {"loss_fn": Loss().__call__},
    "loss_weight": lambda _: {"loss_weight": Weight()},
    "data_collator": lambda _: {"data_collator": Collate()},
    "sampler": with_loader(batch_size=lambda: 4, sampler=Passes),
    "batch_sampler": with_loader(batch_sampler=lambda: BatchSampler(Passes(), 4, drop_last=False)),
    "with a place": with_loader(batch_size=lambda: 4, sampler=Placed),
    "torchdata": with_loader(batch_size=lambda: 4, sampler=lambda: RandomSampler(DATA)),
    "collate_fn": with_loader(batch_size=lambda: 4, shuffle=lambda: True, collate_fn=Collate),
    "optimizer": lambda model: {"optimizer": Lookahead(model.parameters())},
}


@pytest.mark.parametrize("what", PARTS)
def test_it_continues_as_if_it_had_never_been_interrupted(tmp_path: Path, what: str) -> None:
    def build(output_dir: Path, *callbacks: ds.Callback) -> ds.Trainer:
        torch.manual_seed(0)
        model = Outputs() if what in ("loss_fn", "method") else Line()
        settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "optim": "sgd", "save_steps": 100}
        return small_trainer(output_dir, *callbacks, model=model, parts=PARTS[what](model), max_steps=11, **settings)

    assert_resumes(build, tmp_path, 2, 3, 7, 9)  # an epoch has three steps: inside, at its end, and inside again


def test_a_checkpoint_without_their_states_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> ds.Trainer:
        parts = {"loss_fn": Loss(), "loss_weight": Weight(), "data_collator": Collate()}
        return small_trainer(tmp_path, stop_after(2), model=Outputs(), parts=parts, max_steps=4)

    with monkeypatch.context() as former:
        former.setattr("dalsegno.training.trainer.stateful_behind", lambda _: None)
        former.setattr("dalsegno.data.generators.stateful_behind", lambda _: None)
        build().train()
    assert build().train().global_step == 4


def test_what_a_collate_function_keeps_in_worker_processes_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = small_trainer(
        tmp_path, parts={"data_collator": Collate()}, max_steps=1, save_steps=1, dataloader_num_workers=1
    )
    trainer.train()
    assert "the collate function has a state_dict" in caplog.text


class Schedule:
    def step(self) -> None: ...


class Wrapper:
    """An optimizer inside of another object."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.step, self.zero_grad = optimizer.param_groups, optimizer.step, optimizer.zero_grad


class ByName(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"weights": []}


def test_what_has_no_state_is_refused(tmp_path: Path) -> None:
    model = Line()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ds.ConfigurationError, match="lr_scheduler: a Schedule has no state_dict"):
        small_trainer(tmp_path, model=model, parts={"optimizer": optimizer, "lr_scheduler": Schedule()})
    with pytest.raises(ds.ConfigurationError, match=r"a Wrapper is not a torch\.optim\.Optimizer"):
        small_trainer(tmp_path, model=model, parts={"optimizer": Wrapper(optimizer)})
    loop = OwnLoop(tmp_path)
    loop.scheduler = Schedule()  # type: ignore[assignment]
    with pytest.raises(ds.ConfigurationError, match="lr_scheduler: a Schedule has no state_dict"):
        loop.run()
    loop = OwnLoop(tmp_path)
    loop.optimizer = Wrapper(loop.optimizer)  # type: ignore[assignment]
    with pytest.raises(ds.ConfigurationError, match="a Wrapper is not"):
        loop.run()
    optimizer = ByName(model.parameters(), lr=0.1)
    with pytest.raises(ds.CannotSave, match=r"state_dict of .*ByName has weights, and needs state and param_groups"):
        small_trainer(tmp_path, model=model, parts={"optimizer": optimizer}, max_steps=1, save_steps=1).train()
