"""The parallel setting: what it accepts, how it is recorded, and what an error says fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

import dalsegno as ds
from dalsegno.distributed.modes import mesh_dimensions, modes_of
from dalsegno.testing import run_ranks, tiny_regression_data
from support import layouts
from support.small import arguments, small_trainer

AUTO = ds.TensorParallel("auto", size=2)


@pytest.mark.parametrize(
    "text, mode",
    [
        ("HSDP(replicate=2)", ds.HSDP(2)),
        ("FSDP(reshard_after_forward=True, units='layers.*')", ds.FSDP(reshard_after_forward=True, units="layers.*")),
        (["TensorParallel(auto, size=2)", "fsdp"], (AUTO, ds.FSDP())),
        ([AUTO, ds.HSDP(2)], (AUTO, ds.HSDP(2))),
        (["Pipeline(4, microbatches=8)", AUTO, "ddp"], (ds.Pipeline(4, microbatches=8), AUTO, ds.DDP())),
    ],
)
def test_text_and_objects_are_the_same_setting(tmp_path: Path, text: Any, mode: Any) -> None:
    """What is recorded of one is JSON, and text again."""
    args = arguments(tmp_path, parallel=text)
    assert args.parallel == mode
    recorded = json.loads(json.dumps(args.to_dict()["parallel"]))
    assert arguments(tmp_path, parallel=recorded).parallel in (mode, str(mode))
    assert modes_of(args.parallel) == (mode if isinstance(mode, tuple) else (mode,))


@pytest.mark.parametrize(
    "parallel, message",
    [
        ("fspd", "parallel='fspd'; allowed are 'auto', 'none', 'ddp', 'fsdp', FSDP"),
        ("HSPD(replicate=2)", "did you mean 'HSDP'"),
        ("HSDP(replicates=2)", "did you mean 'replicate'"),
        ("HSDP()", "needs replicate"),
        (3, "parallel=3; allowed are"),
        ([], "cannot be composed"),
        ([ds.FSDP(), ds.HSDP(2)], "these cannot be composed; TensorParallel"),
        ([ds.TensorParallel(), ds.FSDP()], "TensorParallel needs size= here"),
    ],
)
def test_what_is_not_a_mode_is_refused(tmp_path: Path, parallel: Any, message: str) -> None:
    with pytest.raises(
        ds.ConfigurationError if "did you" not in message else ds.UnknownName, match=message_of(message)
    ):
        arguments(tmp_path, parallel=parallel)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ds.HSDP(0), "HSDP: replicate=0; needs a number of at least 1"),
        (lambda: ds.TensorParallel(size=1.5), "TensorParallel: size=1.5; needs a number"),
        (lambda: ds.TensorParallel("layers"), "plan='layers'; needs a style for each module"),
        (lambda: ds.FSDP(units=[]), "needs names of modules"),
        (lambda: ds.FSDP(reshard_after_forward=0.5), "needs True, False, or a number of ranks"),
    ],
)
def test_a_mode_checks_its_arguments(build: Any, message: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=message_of(message)):
        build()


@pytest.mark.parametrize(
    "modes, ranks, expected",
    [
        ([ds.FSDP()], 4, {"dp_shard": 4}),
        ([ds.HSDP(2)], 8, {"dp_replicate": 2, "dp_shard": 4}),
        ([ds.TensorParallel()], 4, {"tp": 4}),
        ([ds.FSDP(), AUTO], 4, {"dp_shard": 2, "tp": 2}),
        ([ds.HSDP(2), AUTO], 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ([ds.HSDP(3)], 4, "3 does not divide the 4 ranks of this job; start a multiple of 3 ranks"),
        ([ds.HSDP(2), AUTO], 2, "2 · 2 does not divide the 2 ranks"),
        ([AUTO], 4, "leaves 2 groups of ranks with different data"),
        ([ds.Pipeline(2), AUTO], 4, {"pp": 2, "tp": 2}),
        ([ds.Pipeline(4, "interleaved"), AUTO], 4, {"pp": 2, "tp": 2}),
        ([AUTO, ds.Pipeline(2), ds.HSDP(2)], 16, {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ([ds.Pipeline(2), ds.DDP()], 6, {"pp": 2, "dp_replicate": 3, "dp_shard": 1}),
        ([ds.Pipeline(2), AUTO], 6, "2 · 2 does not divide the 6 ranks of this job; start a multiple of 4 ranks"),
        ([ds.Pipeline(2), AUTO], 8, "leaves 2 groups of ranks with different data"),
    ],
)
def test_sizes_fit_the_number_of_ranks_or_the_error_says_what_does(modes: Any, ranks: int, expected: Any) -> None:
    if isinstance(expected, dict):
        assert mesh_dimensions(modes, ranks) == expected
        return
    with pytest.raises(ds.ConfigurationError, match=message_of(expected)):
        mesh_dimensions(modes, ranks)


def message_of(text: str) -> str:
    import re

    return re.escape(text)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight


def sharded() -> nn.Module:
    model = layouts.Residual()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def refused(output_dir: Path) -> list[str]:
    """The messages of errors that only several ranks see."""
    plain, split = layouts.Residual, ds.TensorParallel
    own = DataLoader(tiny_regression_data(16), sampler=DistributedSampler(tiny_regression_data(16), shuffle=False))  # type: ignore[arg-type,var-annotated]
    tries: list[tuple[Any, nn.Module, dict[str, Any]]] = [
        (split({"layer.*.up": ColwiseParallel()}), plain(), {}),
        (split({"layers.*.up": "colwise"}), plain(), {}),  # type: ignore[dict-item]
        (split("auto"), plain(), {}),
        (split({"tokens": ColwiseParallel(), "head": ColwiseParallel()}), Tied(), {}),
        (ds.FSDP(units="blocks.*"), plain(), {}),
        (ds.Parallelized(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))), plain(), {}),
        (ds.Parallelized(init_device_mesh("cpu", (2,))), plain(), {}),
        (ds.Parallelized(DeviceMesh("cpu", [0], mesh_dim_names=("dp",))), plain(), {}),
        (split(layouts.plan()), plain(), {"optim": "adamw_fused"}),
        (split(layouts.plan()), plain(), {"optim": "adafactor"}),
        (ds.FSDP(), plain(), {"optim": "adafactor"}),
        (split(layouts.plan()), plain(), {"parts": {"train_dataset": None, "train_dataloader": own}}),
        ("auto", sharded(), {}),
        (ds.Pipeline(2), sharded(), {}),
        ("fsdp", parallelize_module(plain(), init_device_mesh("cpu", (2,)), layouts.plan()), {}),
    ]
    messages = []
    for parallel, model, others in tries:
        with pytest.raises((ds.ConfigurationError, ds.UnknownName)) as caught:
            small_trainer(output_dir, model=model, parallel=parallel, max_steps=1, **others).train()
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit_the_model_or_the_data_is_refused_on_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(refused, 2, tmp_path)
    assert ranks[0] == ranks[1]
    for message, part in zip(
        ranks[0],
        [
            "module in the plan of TensorParallel: 'layer.*.up'",
            "the plan has 'colwise' for 'layers.*.up'; needs a style of torch.distributed.tensor.parallel",
            "Residual has no plan of its own",
            "tokens.weight and head.weight are one tied weight, and the plan splits them differently",
            "module in FSDP(units=…): 'blocks.*'",
            "data dimension of Parallelized(mesh, data=…): 'dp'",
            "its dimensions have no names; build it with mesh_dim_names=",
            "the mesh has 1 ranks, this job has 2; pass the mesh of all ranks",
            "a fused AdamW cannot update the split layers of TensorParallel together with whole ones",
            "torch's Adafactor cannot update sharded parameters",
            "torch's Adafactor cannot update sharded parameters",
            "ranks [0, 1] hold parts of one copy of the model, so they must read the same data",
            "parallel='auto': the model is sharded already, over DeviceMesh(",
            "pass parallel='none' if each rank reads its own data, as under fully_shard",
            "else Parallelized(mesh, data=…), which names the dimensions over which the data are split",
        ],
        strict=True,
    ):
        assert part in message


def spread_by_the_user(output_dir: Path) -> tuple[dict[str, Any], list[int]]:
    """torchtitan's way: the model is spread before it is passed, and the loader is split by the data rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = ds.Parallelized(mesh)
    model = layouts.Residual()
    parallelize_module(model, mesh["tp"], layouts.plan())
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh["dp"])
    data, layout = tiny_regression_data(layouts.SAMPLES), ds.Layout.of(parallel)
    sampler: Any = DistributedSampler(data, layout.data_size, layout.data_rank, shuffle=False)  # type: ignore[arg-type]
    parts = {"train_dataset": None, "train_dataloader": DataLoader(data, batch_size=4, sampler=sampler)}
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    small_trainer(output_dir, model=model, parts=parts, parallel=parallel, max_grad_norm=0.5, **settings).train()
    return layouts.as_lists(layouts.weights(model)), [*layout.data_ranks]


def test_a_model_that_the_user_has_spread_is_trained_over_the_data_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(spread_by_the_user, 4, tmp_path / "spread")
    weights, data_ranks = ranks[0]
    assert data_ranks == [0, 0, 1, 1]
    [alone] = run_ranks(train_alone, 1, tmp_path / "one")
    for name, expected in alone.items():
        torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def sharded_by_the_user(output_dir: Path) -> dict[str, Any]:
    model = sharded()
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    parts = {"train_dataset": tiny_regression_data(layouts.SAMPLES)}
    small_trainer(output_dir, model=model, parts=parts, parallel="none", max_grad_norm=0.5, **settings).train()
    return layouts.as_lists(layouts.weights(model))


def test_a_model_that_the_user_has_sharded_is_left_as_it_is(tmp_path: Path) -> None:
    first, second = run_ranks(sharded_by_the_user, 2, tmp_path)
    assert first == second


def train_alone(output_dir: Path) -> dict[str, Any]:
    run = layouts.trainer(output_dir, "one")
    run.train()
    return layouts.as_lists(layouts.weights(run.model))
