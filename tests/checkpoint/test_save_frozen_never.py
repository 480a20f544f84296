"""``save_frozen="never"``: checkpoints without the base, which a resumed run must have built with the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dalsegno as ds
from checkpoint.sameness import assert_same
from dalsegno.checkpoint import Checkpoint, frozen_checksums, read_tensors
from dalsegno.cli import main
from dalsegno.testing import TinyRegression, compare_runs, run_ranks
from support.listeners import Listener
from support.small import small_trainer, weights

BASE = ("layers.0.weight", "layers.0.bias")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = TinyRegression()
    model.layers[0].requires_grad_(False)
    return model


def trainer(folder: Path, steps: int, *callbacks: Any, seed: int = 0, **settings: Any) -> ds.Trainer:
    chosen = {"save_frozen": "never", "lr_scheduler_type": "constant", "save_steps": 2, "max_steps": steps, **settings}
    return small_trainer(folder, *callbacks, model=model_of(seed), **chosen)


def newest(folder: Path) -> Checkpoint:
    return Checkpoint.open(max((folder / "checkpoints").iterdir()))


def saved(folder: Path) -> set[str]:
    """Names of the model's saved tensors."""
    return set(read_tensors(newest(folder))["model"])


def test_it_resumes_bit_by_bit_without_the_base(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 8, save_frozen="once")
    whole.train()
    trainer(tmp_path / "run", 4).train()
    assert saved(tmp_path / "run") == {"layers.3.weight", "layers.3.bias"}
    resumed = trainer(tmp_path / "run", 8)
    resumed.train()
    assert_same(weights(resumed), weights(whole))
    assert saved(tmp_path / "run") == {"layers.3.weight", "layers.3.bias"}
    assert newest(tmp_path / "run").manifest.files.keys() >= {"model/frozen-00000.json"}


def test_another_base_is_refused_and_its_first_tensor_named(tmp_path: Path) -> None:
    trainer(tmp_path, 4).train()
    other = trainer(tmp_path, 8, seed=1)
    before = weights(other)
    with pytest.raises(ds.StateMismatch, match=r"nothing was loaded:\n.*\n +layers\.0\.bias: has other values"):
        other.train()
    assert_same(weights(other), before)
    allowed = trainer(tmp_path, 6, seed=1)
    allowed.train(allow_changes=("model",))
    assert_same({name: weights(allowed)[name] for name in BASE}, {name: before[name] for name in BASE})


def test_each_save_looks_for_changes_and_hashes_again_only_if_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    at_steps: dict[int, int] = {}
    checksum_of = frozen_checksums.checksum_of

    def counted(tensor: torch.Tensor) -> str:
        hashed.append(1)
        return checksum_of(tensor)

    def change(ctx: ds.StepEndContext) -> None:
        at_steps[ctx.step] = len(hashed)
        if ctx.step == 5:
            ctx.model.layers[0].weight.data[2, 1] += 1  # which no version counter shows

    monkeypatch.setattr(frozen_checksums, "checksum_of", counted)
    trainer(tmp_path, 8, Listener({"on_step_end": change}), save_steps=1).train()
    assert at_steps[2] == at_steps[5] < at_steps[7] == at_steps[8]
    assert saved(tmp_path) == {"layers.0.weight", "layers.3.weight", "layers.3.bias"}


def test_what_was_frozen_later_is_saved(tmp_path: Path) -> None:
    """Its values are not those that the model is built with."""

    class Freeze(ds.Callback):
        def on_step_end(self, ctx: ds.StepEndContext) -> None:
            if ctx.step == 3:
                ctx.model.layers[3].bias.requires_grad_(False)

    trainer(tmp_path / "run", 4, Freeze()).train()
    assert saved(tmp_path / "run") == {"layers.3.weight", "layers.3.bias"}
    for folder, steps in (("run", 8), ("whole", 8)):
        last = trainer(tmp_path / folder, steps, Freeze())
        last.model.layers[3].bias.requires_grad_(folder == "whole")
        last.train()
    assert saved(tmp_path / "run") == {"layers.3.weight", "layers.3.bias"}


@pytest.mark.parametrize("former", ["once", "never"])
def test_the_setting_may_change_between_legs(tmp_path: Path, former: str) -> None:
    whole = trainer(tmp_path / "whole", 8)
    whole.train()
    trainer(tmp_path / "run", 4, save_frozen=former).train()
    changed = trainer(tmp_path / "run", 8, save_frozen="never" if former == "once" else "once")
    changed.train()
    assert_same(weights(changed), weights(whole))
    assert (set(BASE) <= saved(tmp_path / "run")) is (former == "never")
    resumed = trainer(tmp_path / "run", 10)
    resumed.train()


def test_the_best_weights_are_loaded(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        6,
        eval_steps=2,
        load_best_model_at_end=True,
        parts={"eval_dataset": ds.testing.tiny_regression_data(8, seed=1)},
    )
    base = {name: weights(run)[name] for name in BASE}
    run.train()
    assert_same({name: weights(run)[name] for name in BASE}, base)


def test_readers_name_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path / "run", 4).train()
    capsys.readouterr()
    for arguments in ([], ["--program", "torch"]):
        assert main(["checkpoints", "export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), *arguments]) == 2
        error = capsys.readouterr().err
        assert "no values of 2 frozen parameters (layers.0.bias, …)" in error and "save_frozen" in error
    assert main(["checkpoints", "show", str(tmp_path / "run"), "--component", "model"]) == 0
    assert "not saved" in capsys.readouterr().out
    assert main(["checkpoints", "list", str(tmp_path / "run"), "--verify", "--json"]) == 0
    assert {row["condition"] for row in json.loads(capsys.readouterr().out)} == {"verified"}


def test_the_base_is_compared_by_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("one", 0), ("other", 1)):
        trainer(tmp_path / name, 4, seed=seed).train()
    capsys.readouterr()
    assert main(["checkpoints", "diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert all(f"model.{name}" in capsys.readouterr().out for name in BASE[:1])
    first, second = sorted((tmp_path / "one" / "checkpoints").iterdir())
    main(["checkpoints", "diff", str(first), str(second), "--tensors"])
    assert "layers.0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.update(shape=[1, 8]),
        lambda entry: entry.update(offsets=[99, 0]),
        lambda entry: entry.update(xxh3=3),
        lambda entry: entry.update(offsets=[0, 0, 0]),
    ],
)
def test_a_forged_fingerprint_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], None]) -> None:
    from dalsegno.checkpoint.frozen_checksums import read_fingerprints
    from dalsegno.checkpoint.index import Index

    trainer(tmp_path, 2).train()
    checkpoint = newest(tmp_path)
    path = checkpoint.file("model/frozen-00000.json")
    content = json.loads(path.read_text())
    damage(content["tensors"]["layers.0.weight"])
    path.write_text(json.dumps(content))
    with pytest.raises(ds.DamagedCheckpoint):
        read_fingerprints(checkpoint, Index.of_checkpoint(checkpoint))


def train_on_ranks(folder: Path, steps: int, parallel: str, seed: int) -> None:
    trainer(folder, steps, parallel=parallel, per_device_train_batch_size=2, seed=seed).train()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_compare_their_parts(tmp_path: Path, parallel: str) -> None:
    run_ranks(train_on_ranks, 2, tmp_path / "run", 4, parallel, 0)
    assert saved(tmp_path / "run") == {"layers.3.weight", "layers.3.bias"}
    with pytest.raises(ds.RankFailed, match=r"layers\.0\.bias: has other values than the ones"):
        run_ranks(train_on_ranks, 2, tmp_path / "run", 8, parallel, 1)
    run_ranks(train_on_ranks, 2, tmp_path / "run", 6, parallel, 0)
    run_ranks(train_on_ranks, 2, tmp_path / "whole", 6, parallel, 0)
    assert compare_runs(tmp_path / "whole", tmp_path / "run").identical
    alone = trainer(tmp_path / "run", 8)  # another layout
    alone.train()
    with pytest.raises(ds.StateMismatch, match="has other values"):
        trainer(tmp_path / "run", 10, seed=1).train()
