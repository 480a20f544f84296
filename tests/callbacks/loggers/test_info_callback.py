"""InfoCallback: what is trained, where from, and how it ended."""

import re
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from callbacks.scripted import trainer
from dalsegno.callbacks import InfoCallback, JsonLogger, ProgressCallback
from dalsegno.checkpoint import memory_dir
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import StepEndContext


class End(ds.Callback):
    """Ends the training at a step in one of the ways that there are."""

    def __init__(self, way: str, at: int = 2) -> None:
        self._way = way
        self._at = at

    def on_step_end(self, ctx: StepEndContext) -> None:
        if ctx.step == self._at:
            if self._way == "crash":
                raise RuntimeError("no more")
            ctx.control.stop("enough", save=self._way == "stop")


def quiet() -> ProgressCallback:
    return ProgressCallback(step_columns=[], final_metrics=[])


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_before_and_after_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0] * 3, quiet(), gradient_accumulation_steps=2).train()
    assert printed(capsys) == [
        "model      Scripted, 5 parameters, 2 of them trained",
        "device     cpu",
        "batch      4 x 2 micro-batches = 8 samples a step",
        "steps      1 to 3",
        f"output     {tmp_path}",
        "finished   at step 3; newest checkpoint checkpoints/step-00000003",
    ]


def test_the_size_of_memory_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first step, and only in a leg that saves in memory."""
    trainer(tmp_path, [1.0] * 2, quiet(), save_steps=2, save_in_memory="Every(steps=1)").train()
    output, size, finished = printed(capsys)[4:]
    assert output.startswith("output ") and finished.startswith("finished ")
    place = re.escape(str(memory_dir.root()))
    kept = r"[\d.]+ kB of frozen parameters, and two slots of [\d.]+ kB"
    assert re.fullmatch(rf"memory     {kept} in {place}/\w+, where [\d.]+ \wB are free", size), size
    trainer(tmp_path, [1.0] * 3, quiet()).train()
    assert not [line for line in printed(capsys) if line.startswith("memory")]


def test_what_a_checkpoint_gave_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0] * 2, quiet(), JsonLogger(name="old")).train()
    capsys.readouterr()
    trainer(tmp_path, [1.0] * 4, quiet(), JsonLogger(name="new", path="logs/new.jsonl")).train()
    restored, new, carried, *rest = printed(capsys)
    assert restored.startswith("restored   ")
    assert restored.endswith(" components from checkpoints/step-00000002")
    assert new == "new        callbacks.new"
    assert carried == "carried    callbacks.old"
    assert "steps      3 to 4 (resumed from checkpoints/step-00000002)" in rest
    assert rest[-1] == "finished   at step 4; newest checkpoint checkpoints/step-00000004"


def test_what_a_new_run_begins_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path / "base", [1.0] * 2, quiet()).train()
    capsys.readouterr()
    begun = trainer(tmp_path / "new", [1.0] * 2, quiet())
    begun.train(tmp_path / "base/checkpoints/step-00000002", load_components=("model",))
    restored = printed(capsys)[0]
    assert re.fullmatch(r"restored   1 component from \S*base/checkpoints/step-00000002", restored)


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("stop", "stopped    at step 2 by End: enough; newest checkpoint checkpoints/step-00000002"),
        ("abort", "aborted    at step 2 by End: enough; newest checkpoint checkpoints/step-00000001"),
        ("crash", "exception  at step 2 by RuntimeError: no more; newest checkpoint checkpoints/step-00000001"),
    ],
)
def test_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str, line: str) -> None:
    run = trainer(tmp_path, [1.0] * 3, quiet(), End(way), save_steps=1)
    if way == "crash":
        with pytest.raises(RuntimeError):
            run.train()
    else:
        run.train()
    assert printed(capsys)[-1] == line


def test_the_newest_checkpoint_may_be_the_one_resumed_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0] * 2, quiet()).train()
    trainer(tmp_path, [1.0] * 4, quiet(), End("abort", at=3)).train()
    assert printed(capsys)[-1] == "aborted    at step 3 by End: enough; newest checkpoint checkpoints/step-00000002"


def test_a_run_without_checkpoints_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0], quiet(), save_steps=0).train()
    assert printed(capsys)[-1] == "finished   at step 1; no checkpoint"


def loader_of(size: int | None, count: int) -> Any:
    class Loader(list[dict[str, Any]]):
        pass

    import torch

    loader = Loader([{"x": torch.zeros(size or 1, 1)}] * count)
    if size:
        loader.batch_size = size  # type: ignore[attr-defined]
    return loader


@pytest.mark.parametrize(
    ("size", "line"), [(6, "batch      6 samples a step"), (None, "batch      as the loader gives it")]
)
def test_a_loader_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int | None, line: str) -> None:
    model = trainer(tmp_path / "other", [1.0]).model
    args = ds.TrainingArguments(tmp_path, num_train_epochs=1, use_cpu=True)
    ds.Trainer(model, args, train_dataloader=loader_of(size, 2), callbacks=[quiet()]).train()
    assert line in printed(capsys)


def test_verbose_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, [1.0], quiet()).train()
    capsys.readouterr()
    trainer(tmp_path, [1.0] * 2, quiet(), InfoCallback(verbose=True)).train()
    lines = printed(capsys)
    assert "           restored         optimizer" in lines
    assert "           max_steps = 2" in lines
    assert "modules    Scripted()" in lines


def test_verbose_is_yes_or_no() -> None:
    with pytest.raises(ConfigurationError, match="verbose=2; allowed are True and False"):
        InfoCallback(verbose=2)  # type: ignore[arg-type]
