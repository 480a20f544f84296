"""``bf16=True`` under FSDP: parameters are gathered in bfloat16, and stored, updated and saved in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

import dalsegno as ds
from dalsegno.callbacks import EMA, GradNormLogger, JsonLogger
from dalsegno.data import ResumableSampler
from dalsegno.logs import read_records
from dalsegno.testing import compare_runs, run_ranks, tiny_regression_data
from support.listeners import Listener
from support.resumed import stop_after
from support.small import small_trainer

STEPS, BF16 = 4, torch.bfloat16


class Model(nn.Module):
    """Blocks between layers of the root; notes the dtypes that it sees."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.norm = nn.BatchNorm1d(16) if normalized else nn.LayerNorm(16)
        self.out = nn.Linear(16, 1)
        self.seen: set[tuple[str, torch.dtype]] = set()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        self.seen |= {("y", y.dtype), *((name, each.dtype) for name, each in self.named_parameters(recurse=False))}
        self.seen |= {("weights", self.into.weight.dtype)}
        return nn.functional.mse_loss(self.out(self.norm(hidden)), y)


class Gathers(TorchDispatchMode):
    """Notes the dtypes of floating tensors that are gathered or reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for what in ("allgather", "reduce_scatter"):
            if what in function.name():
                tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
                self.seen |= {(what, each.dtype) for each in tensors}
        return function(*args, **(kwargs or {}))


def trainer(output_dir: Path, *callbacks: Any, normalized: bool = False, **settings: Any) -> ds.Trainer:
    torch.manual_seed(0)
    given = {"max_steps": STEPS, "save_steps": 100, "parallel": "fsdp", "bf16": True, **settings}
    return small_trainer(
        output_dir,
        *callbacks,
        model=Model(normalized),
        length=8,
        parts={"data_collator": in_order},
        weight_decay=0.1,
        **given,
    )


def in_order(samples: list[dict[str, Tensor]]) -> Any:
    return default_collate(sorted(samples, key=lambda sample: float(sample["x"][0])))


def whole(model: nn.Module) -> list[Any]:
    """Its parameters, and whether each is stored in float32."""
    stored = [each.to_local().dtype for each in model.parameters() if isinstance(each, DTensor)]
    assert {*stored} == {torch.float32}
    return [each.full_tensor().tolist() for each in model.parameters()]  # type: ignore[attr-defined]


def trained(output_dir: str) -> tuple[list[Any], set[Any], set[Any]]:
    """Weights, dtypes that the model saw, and dtypes that were communicated in forward and backward passes."""
    gathers = Gathers()

    def watch(ctx: ds.BeforeForwardContext) -> None:
        gathers.__enter__()

    def end(ctx: ds.AfterBackwardContext) -> None:
        gathers.__exit__(None, None, None)

    around = Listener({"on_before_forward": watch, "on_after_backward": end})
    last = trainer(Path(output_dir), around, max_grad_norm=0)
    last.train()
    assert {each.dtype for state in last._parts.optimizer.state.values() for each in state.values()} == {torch.float32}
    return whole(last.model), last.model.seen, gathers.seen  # type: ignore[return-value]


def by_hand() -> list[Any]:
    """A plain loop with FSDP2, each rank on its half of the eight samples."""
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block[0], mp_policy=policy)
        fully_shard(block[1], mp_policy=policy)
        fully_shard(block, mp_policy=policy)
    fully_shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    )
    groups = [
        {"params": [each for each in model.parameters() if each.ndim == 2], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=0.01)
    data, order = tiny_regression_data(8), order_of_samples()
    for step in range(STEPS):
        batch = in_order([data[index] for index in order[step][dist.get_rank()]])
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (STEPS - step) / STEPS
        with torch.autocast("cpu", dtype=BF16):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def order_of_samples() -> list[list[list[int]]]:
    """Of each epoch, which is one step, the samples of each rank."""
    samplers = [ResumableSampler(8, 4, rank, 2, seed=42) for rank in range(2)]
    epochs = []
    for epoch in range(STEPS):
        for sampler in samplers:
            sampler.seek(epoch, 0)
        epochs.append([next(iter(sampler)) for sampler in samplers])
    return epochs


def test_numbers_are_those_of_a_plain_loop_and_no_float32_is_gathered(tmp_path: Path) -> None:
    (weights, seen, communicated), other = run_ranks(trained, 2, str(tmp_path))
    assert weights == other[0] == run_ranks(by_hand, 2)[0]
    assert seen == {("y", torch.float32), ("weights", BF16)}
    assert communicated == {("allgather", BF16), ("reduce_scatter", torch.float32)}


SPREAD: list[list[Any]] = [
    [ds.Pipeline(["norm"], "gpipe"), ds.FSDP()],
    [ds.TensorParallel({"blocks.*.1": ColwiseParallel(output_layouts=Replicate())}, size=2), ds.FSDP()],
]


def communicated_under(output_dir: Path) -> list[set[Any]]:
    """The dtypes that FSDP communicated in a step, for each layout."""
    found = []
    for number, parallel in enumerate(SPREAD):
        gathers = Gathers()

        def watch(ctx: Any, gathers: Gathers = gathers) -> None:
            gathers.__enter__()

        def end(ctx: Any, gathers: Gathers = gathers) -> None:
            gathers.__exit__(None, None, None)

        around = Listener({"on_step_begin": watch, "on_gradients_ready": end})
        trainer(output_dir / str(number), around, parallel=parallel, max_steps=1).train()
        found.append(gathers.seen)
    return found


def test_no_float32_is_gathered_in_a_stage_or_a_split_layer(tmp_path: Path) -> None:
    for found in run_ranks(communicated_under, 4, tmp_path):
        assert found == [{("allgather", BF16), ("reduce_scatter", torch.float32)}] * len(SPREAD)


def leg(output_dir: str, stop: int | None) -> list[Any]:
    callbacks = [EMA(0.5), GradNormLogger(), JsonLogger()]
    if stop is not None:
        callbacks.append(stop_after(stop))
    last = trainer(Path(output_dir), *callbacks, logging_steps=1)
    last.train()
    return whole(last.model)


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    expected = run_ranks(leg, 2, str(tmp_path / "whole"), None)
    for stop in (1, 3, None):
        found = run_ranks(leg, 2, str(tmp_path / "parts"), stop)
    assert found == expected
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"
    losses = [record["loss"] for record in read_records(tmp_path / "whole/logs/train.jsonl") if "loss" in record]
    assert len(losses) == STEPS


def with_statistics(output_dir: str) -> set[Any]:
    last = trainer(Path(output_dir), normalized=True)
    last.train()
    return last.model.seen  # type: ignore[return-value]


def test_a_model_with_batch_normalization_is_gathered_as_it_is(tmp_path: Path) -> None:
    assert run_ranks(with_statistics, 2, str(tmp_path))[0] == {("y", torch.float32), ("weights", torch.float32)}
