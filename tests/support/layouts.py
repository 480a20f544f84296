"""A small residual network under every layout, by the trainer and by hand with torch alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.checkpoint import Checkpoint, read_tensors
from dalsegno.distributed import collectives
from dalsegno.distributed.rng import preserved_generators
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.logs import read_records
from dalsegno.testing import tiny_regression_data
from support import exchanges
from support.listeners import Listener
from support.small import small_trainer

WIDTH, SAMPLES = 8, 16


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return mixed


class Residual(nn.Module):
    """Returns the mean squared error."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, 8), y: (batch, 1)."""
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.leave(x), y)


def plan() -> dict[str, Any]:
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


LAYOUTS: dict[str, tuple[int, int]] = {
    "one": (1, 1),
    "ddp": (2, 2),
    "fsdp": (2, 2),
    "tp": (2, 1),
    "fsdp 4": (4, 4),
    "hsdp": (4, 4),
    "tp x fsdp": (4, 2),
    "pp": (2, 1),
    "pp x fsdp": (4, 2),
    "pp x ddp": (4, 2),
    "pp x tp": (4, 1),
    "tp x ddp": (4, 2),
}
"""Number of ranks, and of those with different data, by layout."""
WHOLLY_SHARDED = ("hsdp", "tp x fsdp", "pp x fsdp")
"""Layouts of four ranks whose parameters a fused optimizer can update. torch plans each operation on shards once in
each process, for each mesh and shape, which is half of such a run: a fused update is one operation, not nine."""
MOMENTUM = {"optim": "sgd", "optim_args": {"momentum": 0.9}}
"""For runs that resume: a state of every parameter, with few operations."""
BY_HAND = ("fsdp", "tp", "hsdp", "tp x fsdp")
"""Layouts that :func:`by_hand` trains, too."""


def mode(layout: str) -> Any:
    modes: dict[str, Any] = {
        "one": "none",
        "hsdp": ds.HSDP(replicate=2),
        "tp": ds.TensorParallel(plan()),
        "tp x fsdp": [ds.TensorParallel(plan(), size=2), ds.FSDP(units="layers.*")],
        "pp": ds.Pipeline(2, "gpipe"),
        "pp x fsdp": [ds.Pipeline(2, "gpipe"), ds.FSDP(units="layers.*")],
        "pp x ddp": [ds.Pipeline(2, "gpipe"), ds.DDP()],
        "pp x tp": [ds.Pipeline(2, "gpipe"), ds.TensorParallel(plan(), size=2)],
        "tp x ddp": [ds.TensorParallel(plan(), size=2), ds.DDP()],
    }
    return modes.get(layout, layout.split()[0])


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def own_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those that this rank has: under a pipeline, its stage's."""
    return {name: each for name, each in model.named_parameters() if not is_on_other_stage(each)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(each) for name, each in own_parameters(model).items()}


def trainer(output_dir: Path, layout: str, *called: Any, dropout: float = 0.0, **settings: Any) -> ds.Trainer:
    """Each step takes all samples, so that their order does not matter."""
    settings = {"max_steps": 3, "lr_scheduler_type": "constant", "max_grad_norm": 0.5, **settings}
    settings |= {"parallel": mode(layout), "per_device_train_batch_size": SAMPLES // LAYOUTS[layout][1]}
    settings |= {"per_device_eval_batch_size": 4, "num_train_epochs": 10}
    model = Residual(dropout)
    parts = {"eval_dataset": tiny_regression_data(10, seed=1)} if settings.get("eval_steps") else {}
    return small_trainer(output_dir, *called, model=model, length=SAMPLES, parts=parts, **settings)


def by_hand(layout: str, steps: int, max_norm: float) -> tuple[dict[str, Tensor], list[float]]:
    """The same with torch alone: the weights, and each step's total norm before clipping."""
    model, data = Residual(), tiny_regression_data(SAMPLES)
    if layout == "tp":
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan())
        share = 0, 1
    else:
        shape = (2,) if layout == "fsdp" else (2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "other")[: len(shape)])
        if layout != "tp x fsdp":
            sharded, share = mesh, (torch.distributed.get_rank(), mesh.size())
        else:
            parallelize_module(model, mesh["other"], plan())
            sharded, share = mesh["data"], (mesh.get_local_rank("data"), 2)
        for layer in model.layers:
            fully_shard(layer, mesh=sharded)
        fully_shard(model, mesh=sharded)
    fused = layout in WHOLLY_SHARDED
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=fused)
    number, of = share
    mine = [data[index] for index in range(number * SAMPLES // of, (number + 1) * SAMPLES // of)]
    batch = {key: torch.stack([each[key] for each in mine]) for key in ("x", "y")}
    norms = []
    for _ in range(steps):
        model(**batch).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = torch.stack([whole(each).norm() for each in gradients]).norm()
        for each in gradients:
            each.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(norm))
    return weights(model), norms


def measured(output_dir: Path, layout: str) -> dict[str, Any]:
    """Train with every built-in that measures the model; the weights, the records, what each built-in has exchanged in
    the last step, and the run by hand."""
    every = [
        callbacks.JsonLogger(),
        callbacks.GradNormLogger(),
        callbacks.ParameterNormLogger(),
        callbacks.GradHistogram(every=1),
        callbacks.LearningDynamics(every=3),  # at first a gradient has no noise
        callbacks.ComputeNorm(per_layer=True),
        callbacks.NaNChecker(),
        callbacks.EMA(decay=0.5),
        callbacks.ComputeBudget(),
        callbacks.LogInputSummaries(),
        callbacks.WeightNormLogger(),
        callbacks.FlopUtilization(peak_flops_in_total=1e12),
        callbacks.StabilityMonitor(),
        callbacks.SamplesStreamedInfo(),
        callbacks.RateProfiler(),
        callbacks.LogOptimizerParamGroup(["lr"]),
        callbacks.MemoryMonitor(),
        callbacks.ModelMerge(window=2),
        callbacks.ExpertLoadBalance(every=1, router=r"norm$"),
    ]
    with pytest.MonkeyPatch.context() as patched:
        counted = exchanges.of_callbacks(patched, step=3)
        optim = "adamw_fused" if layout in WHOLLY_SHARDED else "adamw"
        run = trainer(output_dir, layout, *every, logging_steps=1, eval_steps=1, optim=optim)
        run.train()
    logs = {path.stem: [*read_records(path)] for path in sorted((output_dir / "logs").glob("*.jsonl"))}
    values = {"weights": as_lists(weights(run.model)), "logs": logs, "exchanges": dict(counted)}
    if layout not in BY_HAND:
        return values
    of_hand, norms = by_hand(layout, 3, 0.5)
    return values | {"by hand": as_lists(of_hand), "norms": norms}


def as_lists(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: each.tolist() for name, each in tensors.items()}


def chain(output_dir: Path, layouts: list[str], first_step: int) -> None:
    """Resume under each layout in turn for one step, until the last rank alone asks for a stop; what is restored is
    what was saved, bit by bit."""
    states: list[dict[str, Tensor]] = []

    def note(ctx: Any) -> None:
        states.append(state(ctx))
        assert_own_numbers(ctx)

    def stop(ctx: Any) -> None:
        if collectives.rank() == collectives.world_size() - 1:
            ctx.control.stop("one step")

    for step, layout in enumerate(layouts, start=first_step):
        listener = Listener({"on_train_begin": note, "on_step_end": stop, "on_train_end": note})
        averages = callbacks.EMA(decay=0.5), callbacks.ModelMerge(window=3)
        trainer(output_dir, layout, listener, *averages, max_steps=100, save_steps=1, **MOMENTUM).train()
        *_, before, after = states
        is_cut = layout.startswith("pp")
        if step > 1:
            assert_same(before, trained(output_dir, step - 1), layout, is_cut)
        assert_same(after, trained(output_dir, step), layout, is_cut)


def assert_own_numbers(ctx: Any) -> None:
    """Ranks that read the same data in the same stage will draw the same random numbers, and others will not."""
    place = ctx.layout.data_rank, *own_parameters(ctx.model)
    with preserved_generators():
        drawn = tuple(torch.rand(4).tolist())
    pairs = {*collectives.gather((place, drawn), "random numbers")}
    places, all_drawn = map(set, zip(*pairs, strict=True))
    assert len(places) == len(all_drawn) == len(pairs)


def state(ctx: Any) -> dict[str, Tensor]:
    """Weights and optimizer state, under the names that checkpoints have."""
    found = {f"model.{name}": each for name, each in weights(ctx.model).items()}
    for name, parameter in ctx.model.named_parameters():
        for kind, value in ctx.optimizer.state.get(parameter, {}).items():
            if value.dim():
                found[f"optimizer.{name}.{kind}"] = whole(value)
    return found


def stored(output_dir: Path, step: int) -> dict[str, Tensor]:
    """What the checkpoint of that step contains."""
    tensors = read_tensors(Checkpoint.open(output_dir / "checkpoints" / f"step-{step:08d}"))
    return {f"{part}.{name}": each for part in tensors for name, each in tensors[part].items()}


def trained(output_dir: Path, step: int) -> dict[str, Tensor]:
    """The weights and the optimizer state in the checkpoint of that step."""
    own = ("model.", "optimizer.")
    return {name: each for name, each in stored(output_dir, step).items() if name.startswith(own)}


def assert_same(here: dict[str, Tensor], there: dict[str, Tensor], layout: str, is_cut: bool) -> None:
    """``is_cut``: this rank has a part of them."""
    assert here.keys() <= there.keys() if is_cut else here.keys() == there.keys()
    for name, each in here.items():
        assert torch.equal(each, there[name]), (layout, name)


def overflow_on_the_last_rank(output_dir: Path, layout: str) -> tuple[list[int], dict[str, Any], list[Any]]:
    """In fp16, a split gradient becomes infinite on one rank in the third step; the skipped steps, the weights, which
    differ if ranks that read the same data drop out different activations, and what the first dropout has kept in the
    first step."""
    skipped: list[int] = []
    kept: list[Any] = []

    def overflow(ctx: Any) -> None:
        gradient = ctx.model.layers[0].up.weight.grad
        if ctx.state.global_step == 2 and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            gradient.to_local().fill_(torch.inf)

    def note(ctx: Any) -> None:
        skipped.append(ctx.state.global_step)

    listener = Listener({"on_step_skipped": note})
    run = trainer(output_dir, layout, listener, fp16=True, max_steps=4, dropout=0.3, **MOMENTUM)
    scaler = run._train_step._scaler
    assert scaler is not None
    scaler._init_scale = 16.0  # small enough that no other step overflows
    unscale = scaler.unscale_

    def overflow_first(optimizer: Any) -> None:
        overflow(SimpleNamespace(model=run.model, state=run.state))
        unscale(optimizer)

    scaler.unscale_ = overflow_first  # type: ignore[method-assign]
    run.model.layers[0].dropout.register_forward_hook(lambda _, args, output: kept.append((output != 0).tolist()))
    run.train()
    return skipped, as_lists(weights(run.model)), kept[0]
