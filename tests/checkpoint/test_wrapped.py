"""Quantized and wrapped tensors are saved as the plain tensors inside them, and loaded into the live ones in place."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from checkpoint.sameness import bits
from dalsegno.callbacks import WeightNormLogger
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState, load_parts, read_tensors
from dalsegno.checkpoint.contract import local_part
from dalsegno.checkpoint.wrapped import describe_mismatch, parts_of
from dalsegno.cli import main
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import are_finite
from dalsegno.errors import CannotSave, StateMismatch
from dalsegno.testing import run_ranks
from support.small import small_trainer

ALL_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
BY_VALUE = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
"""torch's own quantized tensors, which it will remove."""


class Rounding(enum.Enum):
    NEAREST = 1
    DOWN = 2


class Numbers(NamedTuple):
    dtype: torch.dtype
    device: torch.device


class Scaled(torch.Tensor):
    """An int8 tensor with a scale for each row, as torchao's and others' are written."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, rounding: Rounding = Rounding.NEAREST) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, rounding: Rounding = Rounding.NEAREST) -> None:
        self.data_, self.scale, self.rounding = data, scale, rounding

    @classmethod
    def of(cls, tensor: torch.Tensor, rounding: Rounding = Rounding.NEAREST) -> Scaled:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale, rounding)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        numbers = Numbers(self.scale.dtype, self.data_.device)
        return ["data_", "scale"], {"rounding": self.rounding, "numbers": numbers, "blocks": [1, (2, None)]}

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale, args[0].rounding)
        plain = pytree.tree_map_only(Scaled, lambda each: each.data_ * each.scale, args)
        return function(*plain, **(kwargs or {}))


class Adapted(nn.Module):
    """A frozen quantized base with a trained adapter."""

    def __init__(self, seed: int = 0, rounding: Rounding = Rounding.NEAREST, *, is_wrapped: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(8, 1, bias=False)
        weight = torch.randn(1, 8)
        self.base.weight = nn.Parameter(Scaled.of(weight, rounding) if is_wrapped else weight, requires_grad=False)
        self.adapter = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.base(x) + self.adapter(x), y)


def plain(model: nn.Module) -> dict[str, bytes]:
    """Bits of every plain tensor of a model, by its name in a checkpoint."""
    return {name: bits(each) for name, each in ModelState(model).capture().tensors.items()}


def carry_over(directory: Path, source: nn.Module, target: nn.Module) -> None:
    CheckpointManager(directory).save(1, [ModelState(source)], [])
    manager = CheckpointManager(directory)
    checkpoint = manager.find()
    assert checkpoint is not None
    manager.load(checkpoint, [ModelState(target)], [])


def holder(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(1, 1)
    model.register_buffer("held", tensor)
    return model


@pytest.mark.parametrize("save_frozen", ["once", "never"])
def test_a_run_over_a_quantized_base_resumes_bit_by_bit(
    tmp_path: Path, save_frozen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(folder: str, steps: int, seed: int) -> nn.Module:
        settings = {"save_frozen": save_frozen, "lr_scheduler_type": "constant", "save_steps": 2}
        trainer = small_trainer(tmp_path / folder, model=Adapted(seed), max_steps=steps, **settings)
        trainer.train()
        return trainer.model

    base = 0 if save_frozen == "never" else 7  # "once" restores it into a model of other values
    whole = train("whole", 8, 0)
    train("run", 4, 0)
    resumed = train("run", 8, base)
    assert plain(resumed) == plain(whole)
    assert type(resumed.base.weight) is Scaled
    directory = tmp_path / "run/checkpoints/step-00000008/model"
    kept = {"once": "frozen-00000.safetensors", "never": "frozen-00000.json"}
    assert {each.name for each in directory.iterdir()} == {"shard-00000.safetensors", kept[save_frozen]}
    if save_frozen == "never":
        with pytest.raises(StateMismatch, match=r"base\.weight\.\w+: has other values than the ones"):
            train("run", 10, 7)
    export = ["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "run.pt"), "--program", "torch"]
    assert main(export) == 2
    assert "contains 1 quantized or wrapped weights (base.weight)" in capsys.readouterr().err


def test_it_is_loaded_into_the_live_tensor(tmp_path: Path) -> None:
    source, target = Adapted(0), Adapted(1)
    weight, scale = target.base.weight, target.base.weight.scale
    carry_over(tmp_path, source, target)
    assert target.base.weight is weight
    assert weight.scale is scale
    assert plain(target) == plain(source)


def test_a_tied_one_is_saved_once(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        model = nn.ModuleList([Adapted(seed), Adapted(seed)])
        model[1].base.weight = model[0].base.weight
        return model

    source, target = tied(0), tied(1)
    assert "1.base.weight.scale" not in plain(source)
    carry_over(tmp_path, source, target)
    assert plain(target) == plain(source)


def test_wrappers_in_wrappers(tmp_path: Path) -> None:
    def nested(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(3, 2, generator=generator) for _ in range(3)]
        return holder(TwoTensor(TwoTensor(values[0], values[1]), values[2]))

    source, target = nested(0), nested(1)
    assert {"held.a.a", "held.a.b", "held.b"} <= plain(source).keys()
    carry_over(tmp_path, source, target)
    assert plain(target) == plain(source)


def test_a_jagged_nested_tensor(tmp_path: Path) -> None:
    def jagged(start: float) -> nn.Module:
        rows = [torch.arange(start, start + 2), torch.arange(start, start + 3)]
        return holder(torch.nested.nested_tensor(rows, layout=torch.jagged))

    source, target = jagged(0.0), jagged(5.0)
    carry_over(tmp_path, source, target)
    assert [each.tolist() for each in target.held.unbind()] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("dtype", [each for each in ALL_DTYPES if each not in BY_VALUE], ids=str)
def test_every_dtype_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    def of(bytes_: torch.Tensor) -> nn.Module:
        return holder(bytes_.view(dtype).reshape(2, -1))

    source = of(torch.ones(64, dtype=torch.uint8))
    target = of(torch.zeros(64, dtype=torch.uint8))
    carry_over(tmp_path, source, target)
    assert target.held.dtype == dtype
    assert bits(target.held.view(torch.uint8)) == b"\1" * 64
    if dtype.itemsize == 1:  # strides of another dtype cannot be viewed as bytes
        carry_over(tmp_path / "strided", holder(source.held.T), into := holder(target.held.T))
        assert into.held.stride() == target.held.T.stride()


@pytest.mark.parametrize(
    ("saved", "here", "difference"),
    [
        (Adapted(), Adapted(rounding=Rounding.DOWN), r"base\.weight: \S+Scaled saved with context.rounding \S+NEAREST"),
        (Adapted(), Adapted(is_wrapped=False), r"base\.weight: saved as \S+Scaled, here a plain tensor"),
        (Adapted(is_wrapped=False), Adapted(), r"base\.weight: saved as a plain tensor, here \S+Scaled"),
        (
            holder(TwoTensor(torch.ones(2), torch.ones(2))),
            holder(Scaled.of(torch.ones(2, 1))),
            r"held: saved as \S+TwoTensor, here \S+Scaled",
        ),
    ],
)
def test_another_class_or_context_is_refused(
    tmp_path: Path, saved: nn.Module, here: nn.Module, difference: str
) -> None:
    before = plain(here)
    with pytest.raises(StateMismatch, match=difference) as refused:
        carry_over(tmp_path, saved, here)
    assert "missing in the checkpoint" not in str(refused.value)
    assert plain(here) == before


def test_what_does_not_fit_stays_where_a_change_is_allowed(tmp_path: Path) -> None:
    source, target = Adapted(0), Adapted(1, Rounding.DOWN)
    kept = plain(target)["base.weight.scale"]
    CheckpointManager(tmp_path).save(1, [ModelState(source)], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    CheckpointManager(tmp_path).load(checkpoint, [ModelState(target)], [], allowed={"model"})
    assert plain(target)["base.weight.scale"] == kept
    assert plain(target)["adapter.weight"] == plain(source)["adapter.weight"]


def test_a_device_is_not_part_of_the_form() -> None:
    on_cpu = parts_of(Scaled.of(torch.ones(2, 2)), "w").spec
    on_meta = parts_of(Scaled(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1)), "w").spec
    assert on_cpu is not None
    assert "cpu" not in json.dumps(on_cpu)
    assert describe_mismatch(json.loads(json.dumps(on_cpu)), on_meta) == ""


@pytest.mark.parametrize("form", [1, {}, {"class": "os.system", "parts": {}}, {"parts": {"": None}}])
def test_a_forged_form_is_refused_before_anything_changes(tmp_path: Path, form: object) -> None:
    class Forged(ModelState):
        def capture(self) -> Any:
            captured = super().capture()
            return captured._replace(rest={**captured.rest, "wrapped": {"base.weight": form}})

    target = Adapted(1)
    before = plain(target)
    CheckpointManager(tmp_path).save(1, [Forged(Adapted(0), key="model")], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    with pytest.raises(StateMismatch):
        CheckpointManager(tmp_path).load(checkpoint, [ModelState(target)], [])
    assert plain(target) == before


class Opaque:
    __slots__ = ()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"kernel": Opaque()}, r"model\.held: the context of its .*Odd contains a \S+Opaque"),
        ([torch.ones(1)], r"model\.held: the context of its .*Odd contains a torch.Tensor"),
    ],
)
def test_a_context_that_cannot_be_compared_is_refused(tmp_path: Path, context: Any, message: str) -> None:
    class Odd(Scaled):
        def __tensor_flatten__(self) -> tuple[list[str], object]:
            return ["data_"], context

    with pytest.raises(CannotSave, match=message):
        CheckpointManager(tmp_path).save(1, [ModelState(holder(Odd.of(torch.ones(2, 2))))], [])


class Hidden(torch.Tensor):
    """A wrapper that says nothing of its parts."""

    __torch_dispatch__ = Scaled.__torch_dispatch__

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Hidden:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data


class Tagged(nn.Parameter):
    """A subclass that wraps nothing."""


@pytest.mark.filterwarnings("ignore:.*(quantize|Sparse|prototype).*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        lambda: Hidden(torch.ones(3)),
        lambda: Tagged(torch.ones(3)),
        lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
    ],
    ids=["sparse", "compressed", "quantized by torch", "hidden", "tagged", "masked"],
)
def test_what_is_neither_dense_nor_flattened_is_refused_when_the_trainer_is_built(
    tmp_path: Path, make: Callable[[], torch.Tensor]
) -> None:
    model = nn.Linear(8, 1)
    model.register_buffer("held", make())
    with pytest.raises(
        CannotSave, match=r"model\.held: cannot save a .*__tensor_flatten__\. Convert it \(\.to_dense\(\)"
    ):
        small_trainer(tmp_path, model=model, max_steps=2, save_steps=2)
    small_trainer(tmp_path, model=model, max_steps=2, save_steps=0)
    model.register_buffer("held", model.held, persistent=False)
    small_trainer(tmp_path, model=model, max_steps=2, save_steps=2)


def test_a_module_that_cannot_be_saved(tmp_path: Path) -> None:
    class Unsaved(nn.Linear):
        def _save_to_state_dict(self, *_: Any) -> None:
            raise NotImplementedError("Saving Unsaved is not implemented")

    with pytest.raises(CannotSave, match=r"model: its state_dict\(\) raises NotImplementedError: Saving Unsaved"):
        CheckpointManager(tmp_path).save(1, [ModelState(Unsaved(1, 1))], [])


def test_the_commands_show_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        CheckpointManager(tmp_path).save(number, [ModelState(Adapted(number))], [])
    one, two = (str(tmp_path / f"checkpoints/step-0000000{number}") for number in (1, 2))
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    main(["checkpoints", "diff", one, two])
    assert "base.weight.scale" in capsys.readouterr().out


def test_a_quantized_weight_has_no_norm_but_is_checked_for_nan(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, WeightNormLogger(), model=Adapted(), max_steps=2, save_steps=2)
    trainer.train()
    manifest = json.loads((tmp_path / "checkpoints/step-00000002/manifest.json").read_text())
    assert manifest.get("finite", True)
    trainer.model.base.weight.scale.fill_(torch.nan)
    assert not are_finite(trainer.model)


def test_torchao_and_its_neighbours(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 1))
        for number, config in enumerate((Int8WeightOnlyConfig(), Float8WeightOnlyConfig(), IntxWeightOnlyConfig())):
            quantize_(layers[number], config)
        layers[3].weight = nn.Parameter(to_nf4(layers[3].weight.data, 32, 32), requires_grad=False)
        return layers

    source, target = model(0), model(1)
    optimizers = [torch.optim.AdamW(each[4].parameters()) for each in (source, target)]
    before = plain(source)
    assert {"0.weight.qdata", "1.weight.scale", "2.weight.zero_point", "3.weight.quantized_scalers"} <= before.keys()
    CheckpointManager(tmp_path).save(1, [ModelState(source), OptimizerState(source, optimizers[0])], [])
    checkpoint = CheckpointManager(tmp_path).find()
    assert checkpoint is not None
    CheckpointManager(tmp_path).load(checkpoint, [ModelState(target), OptimizerState(target, optimizers[1])], [])
    assert plain(target) == before
    inputs = torch.linspace(-1, 1, 128).reshape(2, 64)
    assert torch.equal(source[:3](inputs), target[:3](inputs))


def whole_beside_shards(directory: str) -> tuple[bool, bool]:
    """Whether two models, sharded but for a torchao weight, have different outputs before one is loaded, and after."""
    from torch.distributed.fsdp import fully_shard
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    models, inputs = [], torch.linspace(-1, 1, 128).reshape(2, 64)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1))
        quantize_(model[0], Int8WeightOnlyConfig())
        fully_shard(model, ignored_params={model[0].weight})
        models.append(model)
    source, target = models
    differed = not torch.equal(source(inputs), target(inputs))
    carry_over(Path(directory), source, target)
    return differed, not torch.equal(source(inputs), target(inputs))


def test_torchao_tensors_stay_whole_beside_shards(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    assert run_ranks(whole_beside_shards, 2, str(tmp_path)) == [(True, False)] * 2


class Wide(nn.Module):
    """Its first weight has 4096 elements, from which on torchao quantizes an optimizer's states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(8, 512), nn.Linear(512, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.narrow(self.wide(x)), y)


def test_low_bit_optimizer_states_resume_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torchao_optim: Any = pytest.importorskip("torchao.optim")

    def train(folder: str, steps: int, kind: str = "AdamW8bit", **options: Any) -> dict[str, bytes]:
        model = Wide()
        optimizer = getattr(torchao_optim, kind)(model.parameters(), lr=0.01, **options)
        settings = {"lr_scheduler_type": "constant", "save_steps": 2, "max_steps": steps}
        small_trainer(tmp_path / folder, model=model, parts={"optimizer": optimizer}, **settings).train()
        states = OptimizerState(model, optimizer).capture().tensors
        return {name: bits(each) for name, each in states.items()} | plain(model)

    with torch.compiler.set_stance("force_eager"):
        whole = train("whole", 4)
        assert {"wide.weight.exp_avg.codes", "wide.weight.exp_avg_sq.scale", "narrow.weight.exp_avg"} <= whole.keys()
        train("run", 2)
        with pytest.raises(StateMismatch, match=r"wide\.weight\.exp_avg"):
            train("run", 4, block_size=512)
        assert train("run", 4) == whole
        whole_of_4_bits = train("whole of 4 bits", 4, "AdamW4bit")
        train("run of 4 bits", 2, "AdamW4bit")
        assert train("run of 4 bits", 4, "AdamW4bit") == whole_of_4_bits
    export = ["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "run.pt"), "--program", "torch"]
    assert main(export) == 2
    assert "contains 1 quantized or wrapped states of parameters (wide.weight)" in capsys.readouterr().err


def test_a_state_that_no_resume_could_create_is_refused_when_it_is_saved() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["mean"] = Scaled.of(torch.ones(2, 4))
    with pytest.raises(CannotSave, match=r"optimizer\.weight\.mean: no resume could create this state, a .*Scaled"):
        OptimizerState(model, optimizer).capture()


def sharded(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with two quantized weights, under FSDP2 if there are several ranks, and an optimizer of 8 bits."""
    from torch.distributed.fsdp import fully_shard
    from torchao.optim import AdamW8bit
    from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 1))
    for layer in model[:2]:
        if kind == "nf4":
            layer.weight = nn.Parameter(to_nf4(layer.weight.data, 32, 8), requires_grad=False)
        else:
            layer.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(layer.weight.data))
    if collectives.world_size() > 1:
        for module in (*model[:2], model):
            fully_shard(module)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, AdamW8bit(trained, lr=0.01, block_size=128)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(1)  # of stochastic rounding
    model(torch.linspace(-1, 1, 256).view(4, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(model(torch.ones(1, 64)).sum())


def resume_shards(directory: str) -> list[tuple[bool, bool]]:
    """Per kind, whether models and optimizers are the same after one was loaded from the other, and a step later."""
    outcomes = []
    for kind in ("nf4", "int8"):
        with torch.compiler.set_stance("force_eager"):
            source, target = sharded(kind, 0), sharded(kind, 1)
            step(*source)
            folder = Path(directory) / kind
            CheckpointManager(folder).save(1, [ModelState(source[0]), OptimizerState(*source)], [])
            checkpoint = CheckpointManager(folder).find()
            assert checkpoint is not None
            CheckpointManager(folder).load(checkpoint, [ModelState(target[0]), OptimizerState(*target)], [])
            states = [
                [bits(local_part(part)) for each in (ModelState(model), OptimizerState(model, optimizer))
                 for part in each.capture().tensors.values()]
                for model, optimizer in (source, target)
            ]  # fmt: skip
            outcomes.append((states[0] == states[1], step(*source) == step(*target)))
    return outcomes


def test_torchao_tensors_under_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    assert run_ranks(resume_shards, 2, str(tmp_path)) == [[(True, True)] * 2] * 2
    checkpoint = CheckpointManager(tmp_path / "int8").find()
    assert checkpoint is not None
    with torch.compiler.set_stance("force_eager"):
        model, optimizer = sharded("int8", 1)
        load_parts(checkpoint, [ModelState(model)])  # rows, each with its scale, fit any number of ranks
        stored = read_tensors(checkpoint)["model"]
        assert plain(model) == {name: bits(each) for name, each in stored.items()}
        with pytest.raises(StateMismatch, match=r"0\.weight\.exp_avg: saved as sharded .* as many ranks as saved it"):
            load_parts(checkpoint, [OptimizerState(model, optimizer)])


def uneven_shards() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torchao.optim.subclass_8bit import OptimState8bit

    shard = OptimState8bit.zeros((6 - 3 * collectives.rank(), 64), block_size=192)  # a block has three rows
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=torch.Size((9, 64)), stride=(64, 1))
    try:
        parts_of(whole, "optimizer.w.exp_avg")
    except CannotSave as error:
        return str(error)
    return ""


def test_uneven_shards_of_blocks_are_refused_on_all_ranks() -> None:
    pytest.importorskip("torchao")
    for refusal in run_ranks(uneven_shards, 2):
        assert "optimizer.w.exp_avg: cannot save a OptimState8bit whose 9 rows are sharded over 2 ranks" in refusal
