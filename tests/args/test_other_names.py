"""An unknown argument that another trainer has is answered with its name here, or with advice."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import dalsegno as ds
from dalsegno import callbacks
from dalsegno.args import other_names
from dalsegno.args.other_names import ACCELERATE, HUGGING_FACE, LIGHTNING
from dalsegno.testing import TinyRegression

SETTINGS = {field.name for field in dataclasses.fields(ds.TrainingArguments)}
TRAINER = set(list(inspect.signature(ds.Trainer.__init__).parameters)[1:])


def parameters(constructor: object) -> set[str]:
    return set(list(inspect.signature(constructor).parameters)[1:])  # type: ignore[arg-type]


def message(**settings: object) -> str:
    with pytest.raises(ds.UnknownName) as caught:
        ds.TrainingArguments("runs/a", **settings)  # type: ignore[arg-type]
    return str(caught.value)


def test_every_argument_of_hugging_faces_is_answered() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    theirs |= parameters(transformers.Trainer.__init__)
    assert theirs - SETTINGS - TRAINER - HUGGING_FACE.keys() == set()


def test_every_argument_of_lightnings_trainer_is_answered() -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    assert parameters(lightning.Trainer.__init__) - SETTINGS - TRAINER - LIGHTNING.keys() == set()


def test_every_argument_of_accelerates_is_answered() -> None:
    accelerate = pytest.importorskip("accelerate")
    assert parameters(accelerate.Accelerator.__init__) - SETTINGS - TRAINER - ACCELERATE.keys() == set()


LIBRARIES = {name: answers for name, answers in vars(other_names).items() if name.isupper() and name[0] != "_"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_answers_name_what_exists(library: str) -> None:
    for name, answer in LIBRARIES[library].items():
        assert answer in SETTINGS | TRAINER or not answer.isidentifier(), name
        for callback in re.findall(r"([A-Z]\w+)\(", answer.partition("callbacks=[")[2]):
            assert hasattr(callbacks, callback) or "another library's" in answer, answer


def test_an_answer_is_a_name_here_or_advice() -> None:
    assert (
        message(max_epochs=3) == "unknown argument of TrainingArguments 'max_epochs'; did you mean 'num_train_epochs'?"
    )
    assert message(gradient_clip_val=1).endswith("'gradient_clip_val'; did you mean 'max_grad_norm'?")
    assert message(fsdp="full_shard").endswith("'fsdp'; parallel='fsdp', under torchrun")
    assert message(optim_target_modules="all").endswith("build the optimizer and pass it: Trainer(optimizer=…)")
    assert message(on_checkpoint=print).endswith("'on_checkpoint'; callbacks=[dalsegno.functions(on_save=…)]")
    assert message(on_validation_loss=print).endswith(
        "'on_validation_loss'; callbacks=[dalsegno.functions(on_evaluate=…)]"
    )


def test_an_argument_in_the_wrong_place_is_sent_to_the_right_one() -> None:
    assert message(callbacks=[]).endswith("'callbacks'; use Trainer(callbacks=…)")
    assert message(tokenizer=None).endswith("'tokenizer'; use Trainer(processing_class=…)")
    with pytest.raises(ds.UnknownName, match=r"'lr'; use TrainingArguments\(learning_rate=…\)"):
        ds.Trainer(TinyRegression(), ds.TrainingArguments("runs/a"), lr=1e-3)  # type: ignore[call-arg]
    with pytest.raises(ds.UnknownName, match=r"'fp16'; use TrainingArguments\(fp16=…\)"):
        ds.Trainer(TinyRegression(), ds.TrainingArguments("runs/a"), fp16=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["zzz", "fdsp", "foo_bar", "sede_x", "foo_steps", "weight_clip", "device_count"])
def test_nothing_far_fetched_is_suggested(name: str) -> None:
    assert "did you mean" not in message(**{name: 1})
