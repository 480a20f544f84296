"""``optim="muon"``: Muon for the matrices in a model's blocks, AdamW for the rest, as torch's own two compute it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from torch.utils.data import default_collate

import dalsegno as ds
from dalsegno.testing import TinyLanguageModel, compare_runs, run_ranks
from dalsegno.training.muon import MuonWithAdamW
from support.resumed import assert_resumes, stop_after
from support.small import ByteLines, same, small_trainer, weights

STEPS = 5


def language_model() -> TinyLanguageModel:
    torch.manual_seed(0)
    return TinyLanguageModel(width=16, depth=2, heads=2, context=16, vocabulary=31, dropout=0.0)


def trainer(output_dir: Path, *callbacks: Any, model: nn.Module | None = None, **settings: Any) -> ds.Trainer:
    return small_trainer(
        output_dir,
        *callbacks,
        model=language_model() if model is None else model,
        parts={"train_dataset": ByteLines()},
        **{"optim": "muon", "max_steps": STEPS, "save_steps": 100, "weight_decay": 0.1, **settings},
    )


def by_hand(adjust: str) -> dict[str, Tensor]:
    """A plain loop with torch's two optimizers, over the whole data at once."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon to compare with")
    model = language_model()
    hidden = [each for name, each in model.named_parameters() if name.startswith("blocks.") and each.ndim == 2]
    others = {id(each) for each in hidden}
    matrices = [each for each in model.parameters() if each.ndim == 2 and id(each) not in others]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    optimizers = [
        muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust),
        AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.01),
    ]
    batch = default_collate([ByteLines()[index] for index in range(24)])
    for _ in range(STEPS):
        model(**batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def by_first_byte(samples: list[dict[str, Tensor]]) -> Any:
    """A batch that does not depend on the order of its samples."""
    return default_collate(sorted(samples, key=lambda sample: int(sample["input_ids"][0])))


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_a_step_is_that_of_the_two_optimizers_of_torch(tmp_path: Path, adjust: str) -> None:
    last = small_trainer(
        tmp_path,
        model=language_model(),
        parts={"train_dataset": ByteLines(), "data_collator": by_first_byte},
        optim="muon",
        optim_args={"adjust_lr_fn": adjust},
        weight_decay=0.1,
        max_steps=STEPS,
        per_device_train_batch_size=24,
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    last.train()
    expected = by_hand(adjust)
    assert same(weights(last), expected)


def test_a_resumed_run_is_exact(tmp_path: Path) -> None:
    assert_resumes(trainer, tmp_path, 2, 3)


def leg(output_dir: str, parallel: str, stop: int | None) -> list[Any]:
    last = trainer(
        Path(output_dir),
        *([] if stop is None else [stop_after(stop)]),
        parallel=parallel,
        per_device_train_batch_size=2,
    )
    last.train()
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in last.model.parameters()]
    return [each.tolist() for each in whole]


def test_on_two_ranks(tmp_path: Path) -> None:
    """Two legs of FSDP are bitwise one leg; FSDP, DDP and a single process agree."""
    whole = run_ranks(leg, 2, str(tmp_path / "whole"), "fsdp", None)
    run_ranks(leg, 2, str(tmp_path / "parts"), "fsdp", 2)
    parts = run_ranks(leg, 2, str(tmp_path / "parts"), "fsdp", None)
    assert whole[0] == whole[1] == parts[0]
    comparison = compare_runs(tmp_path / "whole", tmp_path / "parts")
    assert comparison.identical, f"\n{comparison.table()}"
    copies = run_ranks(leg, 2, str(tmp_path / "ddp"), "ddp", None)
    alone = trainer(tmp_path / "alone", max_steps=STEPS)
    alone.train()
    for sharded, copied, own in zip(whole[0], copies[0], alone.model.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(copied), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.tensor(sharded), own.detach(), rtol=1e-2, atol=1e-3)


def split(ranks: int) -> list[Any]:
    """Weights after a step on given gradients; on several ranks of layers that are split and sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 6, bias=False))
    gradients = [torch.randn_like(each) for each in model.parameters()]
    if ranks > 1:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
        parallelize_module(model, mesh["layers"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        if isinstance(each, DTensor):
            copies = DTensor.from_local(gradient, each.device_mesh, [Replicate(), Replicate()], run_check=False)
            gradient = copies.redistribute(placements=each.placements)
        each.grad = gradient
    MuonWithAdamW(model.parameters(), lr=0.1, weight_decay=0.1, use_muon=True).step()
    return [(each.full_tensor() if isinstance(each, DTensor) else each).tolist() for each in model.parameters()]


def test_matrices_that_are_split_and_sharded() -> None:
    assert run_ranks(split, 4, 4) == run_ranks(split, 1, 1) * 4


def test_fused_with_the_backward_pass(tmp_path: Path) -> None:
    settings = {"max_grad_norm": 0}
    plain = trainer(tmp_path / "plain", **settings)
    fused = trainer(tmp_path / "fused", fuse_optim_with_backward=True, **settings)
    plain.train()
    fused.train()
    assert same(weights(plain), weights(fused))


def names_of_muon(last: ds.Trainer) -> list[str]:
    chosen = {id(each) for group in optimizer_of(last).param_groups if group["use_muon"] for each in group["params"]}
    return [name for name, each in last.model.named_parameters() if id(each) in chosen]


def optimizer_of(last: ds.Trainer) -> Any:
    return last._parts.optimizer


class Classifier(nn.Module):
    """A body of blocks, between an embedding and a head that is a Sequential too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.convolution = nn.Conv1d(8, 8, 1)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 31))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.body:
            x = x + block(x)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_muon_updates_the_matrices_in_blocks_or_those_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    built = trainer(tmp_path / "a", model=Classifier())
    assert names_of_muon(built) == ["body.0.0.weight", "body.1.0.weight"]
    assert "Muon updates 2 matrices, AdamW all vectors and embedding.weight, head.0.weight" in caplog.text
    assert [group["weight_decay"] for group in optimizer_of(built).param_groups] == [0.1, 0.1, 0.0]
    named = trainer(tmp_path / "b", model=Classifier(), optim_args={"matrices": ["body.1.*", "head.0.*"]})
    assert names_of_muon(named) == ["body.1.0.weight", "head.0.weight"]
    assert trainer(tmp_path / "c", model=Classifier(), optim_args={"momentum": 0.5}).train().global_step == STEPS


def test_output_layers_of_hugging_face_are_not_matrices_of_muon(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    built = trainer(tmp_path, model=transformers.LlamaForCausalLM(config))
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names_of_muon(built) == [f"model.layers.{number}.{name}.weight" for number in range(2) for name in layers]


def test_changed_settings_take_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, max_steps=2).train()
    caplog.set_level("INFO")
    last = trainer(tmp_path, max_steps=4, adam_beta1=0.5, optim_args={"momentum": 0.5}, lr_scheduler_type="linear")
    last.train()
    assert {(group["momentum"], group["betas"]) for group in optimizer_of(last).param_groups} == {(0.5, (0.5, 0.999))}
    assert "adam_beta1: saved 0.9, now 0.5" in caplog.text


def test_it_can_be_copied_and_pickled() -> None:
    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "use_muon": True}, {"params": [model.bias]}]
    optimizer = MuonWithAdamW(groups, betas=(0.8, 0.9))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group in other.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        other.step()
        assert other.param_groups[1]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, r"there is no matrix in a block.*optim_args=\{'matrices': .*layers.0.weight, layers.3.weight"),
        ({"optim_args": {"matrices": ["layer.*"]}}, r"'layer\.\*' in optim_args\['matrices'\] matches no matrix"),
        ({"optim_args": {"matrices": []}}, "an empty list in optim_args"),
        ({"optim_args": {"matrices": "layers.*", "momentum": 1.0}}, "momentum=1.0; needs 0 or more, and less than 1"),
        ({"optim_args": {"matrices": "layers.*", "adjust_lr_fn": "none"}}, "adjust_lr_fn='none'; allowed are"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ds.ConfigurationError, match=error):
        small_trainer(tmp_path, max_steps=2, optim="muon", **settings)
