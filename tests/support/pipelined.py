"""Runs of a small language model, whole or cut into pipeline stages, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dalsegno as ds
from dalsegno.callbacks import (
    EMA,
    DumpActivations,
    GradHistogram,
    GradNormLogger,
    JsonLogger,
    LearningDynamics,
    NaNChecker,
    ParameterNormLogger,
    WeightNormLogger,
)
from dalsegno.distributed.stage_places import is_on_other_stage
from dalsegno.logs import read_records
from dalsegno.testing import FaultPlan, TinyLanguageModel
from support.small import ByteLines, arguments

SCHEDULES: dict[str, Any] = {
    "gpipe": ds.Pipeline(stages=2, schedule="gpipe"),
    "1f1b, the batches split": ds.Pipeline(stages=["blocks.1"], microbatches=2),
    "interleaved": ds.Pipeline(stages=4, schedule="interleaved", microbatches=2),
    "looped_bfs": ds.Pipeline(stages=4, schedule="looped_bfs"),
    "interleaved_zero_bubble": ds.Pipeline(stages=4, schedule="interleaved_zero_bubble", microbatches=2),
}


def language_model(dropout: float = 0.0) -> TinyLanguageModel:
    torch.manual_seed(0)
    return TinyLanguageModel(width=16, depth=4, heads=2, context=16, dropout=dropout)


def build(folder: Path, *callbacks: Any, model: nn.Module | None = None, dropout: float = 0.0, **settings: Any) -> Any:
    """A trainer of a model of four blocks, with tied embeddings: four batches of two samples a step, and a short one
    at each epoch's end."""
    torch.manual_seed(0)
    model = language_model(dropout) if model is None else model
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5} | settings
    data = torch.utils.data.Subset(ByteLines(), range(19))  # type: ignore[arg-type]
    evaluated = torch.utils.data.Subset(ByteLines(), range(5))  # type: ignore[arg-type]
    trainer = ds.Trainer(
        model, arguments(folder, **given), train_dataset=data, eval_dataset=evaluated, callbacks=callbacks
    )
    trainer.remove_callback("ProgressCallback")
    trainer.remove_callback("InfoCallback")
    return trainer


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The tensors that this rank has, whole; collective if they are sharded."""
    found = {name: each.detach() for name, each in model.named_parameters() if not is_on_other_stage(each)}
    return {name: _whole(each) for name, each in found.items()}


def state_of(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer state that this rank has, whole."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    of_optimizer = {
        f"{names[id(parameter)]}.{kind}": _whole(value)
        for group in trainer._parts.optimizer.param_groups
        for parameter in group["params"]
        for kind, value in trainer._parts.optimizer.state.get(parameter, {}).items()
    }
    return weights_of(trainer.model) | of_optimizer


def _whole(tensor: Tensor) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()


class Steps(ds.Callback):
    """Loss and gradient norm of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_metrics(self, ctx: Any) -> None:
        self.seen.append((ctx.metrics["loss"], ctx.metrics["grad_norm"]))


def train(folder: Path, parallel: Any, **settings: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Six steps, over two epochs. Steps, metrics of an evaluation, and weights."""
    steps = Steps()
    trainer = build(folder, steps, parallel=parallel, max_steps=6, **settings)
    trainer.train()
    return steps.seen, trainer.evaluate(), weights_of(trainer.model)


def train_each(folder: Path, ways: dict[str, Any]) -> dict[str, Any]:
    return {name: train(folder / str(number), way) for number, (name, way) in enumerate(ways.items())}


class Recorded(ds.Callback):
    """State of the trainer as it was restored."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def on_load(self, ctx: Any) -> None:
        self.loaded = state_of(ctx.trainer)


def resume(folder: Path, parallel: Any, steps: int, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that was restored, and the state after ``steps`` steps, which is saved."""
    recorded = Recorded()
    average = EMA(decay=0.5)
    trainer = build(folder, recorded, average, parallel=parallel, max_steps=steps, save_steps=1, **settings)
    trainer.train(allow_changes=["dataset"])
    state = state_of(trainer)
    return recorded.loaded, state


def resume_until_killed(folder: Path, parallel: Any, rank: int | None, step: int) -> dict[str, Any]:
    """Train to step 6, saving every second one; ``rank`` is killed in ``step``."""
    if rank is not None and dist.get_rank() == rank:
        FaultPlan(event=ds.Event.OPTIMIZER_STEP, count=step).arm()
    log = JsonLogger()
    trainer = build(folder, log, EMA(), parallel=parallel, max_steps=6, save_steps=2, logging_steps=1, dropout=0.1)
    trainer.train()
    return weights_of(trainer.model)


def records(folder: Path) -> list[Any]:
    """Of a run that has ended, without what depends on clocks."""
    clock = ("timestamp", "runtime", "per_sec", "peak_mem", "mfu")
    return [
        {key: value for key, value in record.items() if not any(each in key for each in clock)}
        for record in read_records(folder / "logs/train.jsonl")
    ]


def measure(folder: Path, parallel: Any) -> dict[str, list[dict[str, Any]]]:
    """Records of the built-ins that measure weights and gradients."""
    callbacks = [
        GradNormLogger(), ParameterNormLogger(), GradHistogram(every=2), LearningDynamics(every=2),
        WeightNormLogger(), NaNChecker(), EMA(decay=0.5), JsonLogger(),
    ]  # fmt: skip
    settings = {"logging_steps": 2, "eval_steps": 2, "eval_strategy": "steps"}
    # In float64, since gradients that are zero but for rounding are counted in the bins of their rounding.
    build(folder, *callbacks, model=language_model().double(), parallel=parallel, max_steps=4, **settings).train()
    paths = sorted((folder / "logs").glob("*.jsonl"))
    clock = ("timestamp", "runtime", "per_sec", "peak_mem", "mfu")
    return {
        path.stem: [
            {key: value for key, value in record.items() if not any(each in key for each in clock)}
            for record in read_records(path)
        ]
        for path in paths
    }


class Predictions(ds.Callback):
    """The logits of each evaluation batch."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def on_prediction_step(self, ctx: Any) -> None:
        self.logits.append(ctx.outputs["logits"].numpy().copy())


class WithLogits(TinyLanguageModel):
    """Returns a mapping with logits."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = {}
        handle = self.head.register_forward_hook(lambda module, args, output: logits.update(logits=output))
        try:
            return {"loss": super().forward(input_ids, labels), **logits}
        finally:
            handle.remove()


def predict(folder: Path, parallel: Any) -> tuple[dict[str, Any], list[Any]]:
    torch.manual_seed(0)
    predictions = Predictions()
    model = WithLogits(width=16, depth=2, heads=2, context=16, dropout=0.1)
    trainer = build(folder, predictions, model=model, parallel=parallel)
    return trainer.predict(torch.utils.data.Subset(ByteLines(), range(3))), predictions.logits  # type: ignore[arg-type]


class Half(nn.Module):
    """A part of :class:`Straight`, as one writes it for torch's own pipelining."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Straight(nn.Module):
    """Six linear layers. Returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: (batch, 8)."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def straight_batches() -> list[dict[str, Tensor]]:
    """Three batches of eight samples."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 8, generator=generator)} for _ in range(3)
    ]


def split_in_pairs() -> dict[str, Any]:
    """The plan of the second to fifth layer: what is between the two of a pair is split."""
    return {"layers.[14]": ColwiseParallel(), "layers.[25]": RowwiseParallel()}


def by_hand(tensor_parallel: int, data_ranks: int) -> tuple[list[float], dict[str, Any]]:
    """Three steps of four micro-batches with torch alone: losses, on the last stage, and this rank's weights."""
    layers = Straight().layers
    mesh = init_device_mesh("cpu", (2, data_ranks, tensor_parallel), mesh_dim_names=("pp", "dp", "tp"))
    rank = mesh.get_local_rank("pp")
    half = Half(layers[3 * rank : 3 * rank + 3])
    if tensor_parallel > 1:
        parallelize_module(half, mesh["tp"], {"layers.1": ColwiseParallel(), "layers.2": RowwiseParallel()})
    if data_ranks > 1:
        fully_shard(half, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(half.parameters(), lr=0.01, weight_decay=0.0)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    pipeline = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    seen = []
    for batch in share_of(straight_batches(), mesh.get_local_rank("dp"), data_ranks):
        losses: list[Tensor] = []
        pipeline.step(*([batch["x"]] if rank == 0 else []), target=batch["y"], losses=losses)
        _clip(half, 0.1, mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(loss, group=mesh.get_group("dp"))
        seen.append(float(loss) / data_ranks)
    own = {f"layers.{3 * rank + number}.weight": each.weight for number, each in enumerate(half.layers)}
    return seen, {name: _whole(weight.detach()) for name, weight in own.items()}  # type: ignore[operator]


def share_of(batches: list[dict[str, Tensor]], rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Of each batch, the samples of one data rank."""
    return [{name: each.chunk(ranks)[rank] for name, each in batch.items()} for batch in batches]


def _clip(half: nn.Module, max_norm: float, stages: Any) -> None:
    """By the norm of both halves."""
    gradients = [each.grad for each in half.parameters() if each.grad is not None]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    square = torch.stack([each.norm() for each in whole]).square().sum()
    dist.all_reduce(square, group=stages)
    for each in gradients:
        each.mul_(min(1.0, max_norm / (float(square.sqrt()) + 1e-6)))


def by_trainer(folder: Path, tensor_parallel: int, data_ranks: int) -> tuple[list[float], dict[str, Any]]:
    steps = Steps()
    settings = {"max_steps": 3, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.1}
    parallel: Any = [ds.Pipeline(2, "1f1b", microbatches=4)]
    if tensor_parallel > 1:
        parallel.append(ds.TensorParallel(split_in_pairs(), size=tensor_parallel))
    if data_ranks > 1:
        parallel.append(ds.FSDP())
    trainer = ds.Trainer(
        Straight(),
        arguments(folder, parallel=parallel, **settings),
        train_dataloader=share_of(straight_batches(), ds.Layout.of(parallel).data_rank, data_ranks),
        callbacks=[steps],
    )
    trainer.train()
    return [loss for loss, _ in steps.seen], weights_of(trainer.model)


class Normalized(nn.Module):
    """Three blocks with batch normalization, which counts the batches that it sees, as the model itself does."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("seen", torch.zeros(()))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: (batch, 8)."""
        self.seen = self.seen + 1
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(x, y)


class Calls(ds.Callback):
    """Counts calls of the model's blocks, and of the model to its end, by hooks of its own."""

    def __init__(self) -> None:
        self.count = self.of_model = 0

    def on_train_begin(self, ctx: Any) -> None:
        for block in ctx.model.blocks:
            block.register_forward_hook(self._count)
        ctx.model.register_forward_hook(self._count_model)

    def _count(self, *given: Any) -> None:
        self.count += 1

    def _count_model(self, *given: Any) -> None:
        self.of_model += 1


def normalize(folder: Path, parallel: Any) -> tuple[dict[str, Any], int, int]:
    calls = Calls()
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2}
    trainer = ds.Trainer(
        Normalized(),
        arguments(folder, parallel=parallel, save_steps=3, **settings),
        train_dataloader=[*straight_batches(), *straight_batches()],
        callbacks=[calls],
    )
    trainer.train()
    buffers = {name: each.numpy().copy() for name, each in trainer.model.named_buffers() if not is_on_other_stage(each)}
    return buffers, calls.count, calls.of_model


class Overflow(ds.Callback):
    """Puts infinity into a gradient of the last stage in step 2; notes the weights after each step, and skips."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Any]] = []
        self.skipped: list[int] = []

    def on_microbatch_end(self, ctx: Any) -> None:
        if ctx.state.global_step == 1 and ctx.is_last:
            weight = ctx.model.layers[5].weight
            if weight.grad is not None:
                weight.grad[0, 0] = torch.inf

    def on_step_skipped(self, ctx: Any) -> None:
        self.skipped.append(ctx.state.global_step)

    def on_step_end(self, ctx: Any) -> None:
        self.weights.append(weights_of(ctx.model))


def overflow(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
    callback = Overflow()
    args = arguments(folder, parallel=ds.Pipeline(2, microbatches=2), fp16=True, max_steps=3)
    ds.Trainer(Straight(), args, train_dataloader=straight_batches(), callbacks=[callback]).train()
    return callback.weights, callback.skipped


def transformer(kind: str) -> nn.Module:
    """A tiny model of transformers with random weights."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    sizes |= {"vocab_size": 40, "num_key_value_heads": 1, "max_position_embeddings": 32}
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)  # type: ignore[arg-type]
        return transformers.LlamaForCausalLM(config)
    config = transformers.MixtralConfig(**sizes, num_local_experts=2)  # type: ignore[arg-type]
    return transformers.MixtralForCausalLM(config)


def train_transformers(folder: Path, parallel: Any) -> dict[str, tuple[list[Any], list[Any]]]:
    """Of each model the losses and norms, and the logits of a prediction."""
    found = {}
    for kind in ("llama", "mixtral"):
        steps, predictions = Steps(), Predictions()
        settings = {
            "parallel": parallel,
            "max_steps": 2,
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "constant",
        }
        args = arguments(folder / kind, per_device_train_batch_size=2, **settings)
        data: Any = ByteLines()
        trainer = ds.Trainer(transformer(kind), args, train_dataset=data, callbacks=[steps, predictions])
        trainer.train()
        trainer.predict(torch.utils.data.Subset(data, range(2)))
        found[kind] = steps.seen, predictions.logits
    return found


class Skipping(nn.Module):
    """Adds the first block's output after the last block: a connection that no boundary lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: (batch, 8)."""
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return nn.functional.mse_loss(x + first, y)


class Headed(nn.Module):
    """A list of two layers between a first one and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: (batch, 8)."""
        x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.head(x), y)


def begin_at_the_last(model: nn.Module) -> list[str]:
    """The name at which the second and last stage begins."""
    *_, (name, _) = model.named_children()
    return [name]


def train_headed(folder: Path, parallel: Any) -> tuple[list[float], list[str]]:
    """Losses, and the names of this rank's weights."""
    steps = Steps()
    args = arguments(folder, parallel=parallel, max_steps=2)
    trainer = ds.Trainer(Headed(), args, train_dataloader=straight_batches(), callbacks=[steps])
    trainer.train()
    return [loss for loss, _ in steps.seen], [*weights_of(trainer.model)]


class Backward(ds.Callback):
    def on_before_backward(self, ctx: Any) -> None: ...


class Stacked(nn.Module):
    """Two layers, each a stack of three matrices, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: (batch, 8)."""
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


class Experts(nn.Module):
    """The sum of three matrices' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 8)."""
        return torch.einsum("bi,eij->bj", x, self.weight)


def spectral_norms(folder: Path, parallel: Any) -> dict[str, float]:
    """Of a model of stacked matrices, after a step."""
    args = arguments(folder, parallel=parallel, max_steps=1, eval_steps=1)
    batches = straight_batches()
    logger = ParameterNormLogger()
    ds.Trainer(
        Stacked(), args, train_dataloader=batches, eval_dataloader=batches, callbacks=[logger, JsonLogger()]
    ).train()
    if dist.is_initialized() and dist.get_rank():
        return {}
    *_, record = read_records(folder / "logs/parameter_norms.jsonl")
    return record["spectral_norms"]  # type: ignore[no-any-return]


def _three(model: nn.Module) -> int:
    return 3


def _silent() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "1f1b needs more micro-batches": (Straight, ds.Pipeline(2), {}, ()),
    "too many stages": (Straight, ds.Pipeline(8, "looped_bfs"), {}, ()),
    "an unknown module": (Straight, ds.Pipeline(["layer.3"], "gpipe"), {}, ()),
    "a module in no stage": (Straight, ds.Pipeline([["layers.0"], ["layers.1"]], "gpipe"), {}, ()),
    "a callback of the backward pass": (Straight, ds.Pipeline(2, "gpipe"), {}, (Backward,)),
    "a callback that hooks modules": (Straight, ds.Pipeline(2, "gpipe"), {}, (DumpActivations,)),
    "a compiled model": (Straight, ds.Pipeline(2, "gpipe"), {"torch_compile": True}, ()),
    "a batch that does not divide": (Straight, ds.Pipeline(2, microbatches=3), {}, ()),
    "too many stages for the ranks": (Straight, ds.Pipeline(3, "gpipe"), {}, ()),
    "one stage on each rank": (Straight, ds.Pipeline(2, "interleaved"), {}, ()),
    "a stage without parameters": (_silent, ds.Pipeline([["0", "2"], ["1"]], "gpipe"), {}, ()),
    "a split module in several stages": (
        Straight,
        [ds.Pipeline(2, "gpipe"), ds.TensorParallel({"layers": SequenceParallel()}, size=1)],
        {},
        (),
    ),
    "a fused optimizer of split and whole layers": (  # in the first stage only
        Straight,
        [ds.Pipeline(2, "gpipe"), ds.TensorParallel({"layers.1": ColwiseParallel(), "layers.2": RowwiseParallel()}, 1)],
        {"optim": "adamw_fused"},
        (),
    ),
    "more stages than ranks by a function": (Straight, ds.Pipeline(_three, "gpipe"), {}, ()),
}


def be_refused(folder: Path) -> dict[str, str]:
    """The error of each."""
    errors = {}
    for number, (name, (model, parallel, settings, callbacks)) in enumerate(REFUSED.items()):
        try:
            args = arguments(folder / str(number), parallel=parallel, max_steps=1, **settings)
            given: dict[str, Any] = {"train_dataset": _Rows()}
            ds.Trainer(model(), args, callbacks=[each() for each in callbacks], **given).train()
        except ds.DalsegnoError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


class Failing(ds.Callback):
    """On one rank, a module of its stage raises in the second step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_step_begin(self, ctx: Any) -> None:
        if ctx.state.global_step == 1 and dist.get_rank() == self._rank:
            own = next(layer for layer in ctx.model.layers if not is_on_other_stage(layer.weight))
            own.register_forward_hook(self._fail)

    def _fail(self, *given: Any) -> None:
        raise ZeroDivisionError("this stage has failed")


def fail_in_a_stage(folder: Path, rank: int) -> None:
    args = arguments(folder, parallel=ds.Pipeline(2, microbatches=4), max_steps=3)
    ds.Trainer(Straight(), args, train_dataloader=straight_batches(), callbacks=[Failing(rank)]).train()


class _Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = straight_batches()[0]
        return {name: each[index] for name, each in batch.items()}


def train_skipping(folder: Path, parallel: Any) -> None:
    args = arguments(folder, parallel=parallel, max_steps=1)
    ds.Trainer(Skipping(), args, train_dataset=_Rows()).train()  # type: ignore[arg-type]
