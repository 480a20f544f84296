"""A resume under Lightning's Trainer says whether it is exact, and if not, what Lightning does not restore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dalsegno.callbacks import JsonLogger
from dalsegno.testing import tiny_regression_data
from support.threads import one_thread

pytest.importorskip("pytorch_lightning")
from dalsegno.interop.lightning import Bridge
from interop.bridges import Left, Verdict, leave
from interop.lightning.bridged import At, Module, data, newest, pl, trainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def saver(every: int) -> Any:
    return pl.callbacks.ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)


def leave_after(output_dir: Path, step: int, loader: Any, module: Any = None, **settings: Any) -> None:
    one = trainer(output_dir, Bridge([JsonLogger()]), At(step, leave), **settings)
    with pytest.raises(Left):
        one.fit(module or Module(), loader)


def resume(output_dir: Path, loader: Any, module: Any = None, *, on_resume: Any = "warn", **settings: Any) -> Verdict:
    verdict = Verdict()
    one = trainer(output_dir, Bridge([JsonLogger(), verdict], on_resume=on_resume), **settings)
    one.fit(module or Module(), loader, ckpt_path=newest(output_dir))
    return verdict


def in_order() -> Any:
    return data()[0]


def shuffled() -> Any:
    return DataLoader(tiny_regression_data(20), batch_size=4, shuffle=True)


def test_a_loader_that_keeps_its_place(tmp_path: Path) -> None:
    """Inside an epoch, shuffled; Lightning restores the loader's state, and no random numbers."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return loaders.StatefulDataLoader(tiny_regression_data(20), batch_size=4, shuffle=True)

    leave_after(tmp_path, 7, loader(), saver=saver(4))
    module = Module()
    torch.rand(7)
    proof = resume(tmp_path, loader(), module, saver=saver(4)).proof
    assert proof.line == (
        "resumed exactly: steps 5 to 7 repeated bit for bit; without an effect on them, torch's generator was in "
        "another state"
    )


@pytest.mark.parametrize(("loader", "every", "left", "at"), [(in_order, 4, 7, 5), (shuffled, 5, 8, 6)])
def test_data_that_lightning_does_not_find_again_are_said(
    tmp_path: Path, loader: Any, every: int, left: int, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Inside an epoch, which Lightning begins again; and an order that comes from random numbers."""
    leave_after(tmp_path, left, loader(), saver=saver(every))
    assert resume(tmp_path, loader(), saver=saver(every)).found == ("differs", "data", at)
    assert f"not resumed exactly: data of step {at} differ: Lightning finds the place in an epoch" in caplog.text


def test_dropout_is_said(tmp_path: Path) -> None:
    class Dropout(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(1, torch.nn.Dropout())

    leave_after(tmp_path, 8, in_order(), Dropout(), saver=saver(5))
    verdict = resume(tmp_path, in_order(), Dropout(), saver=saver(5))
    assert verdict.found == ("differs", "random numbers", 6)
    assert verdict.proof.why == "from torch's generator; Lightning does not restore them"


def test_all_batches_of_a_step_are_seen(tmp_path: Path) -> None:
    """Of two in a step, the second one differs."""

    def loader(last: float) -> Any:
        samples = [tiny_regression_data(20)[index] for index in range(20)]
        samples[-1]["x"] = samples[-1]["x"] + last
        return DataLoader(samples, batch_size=5)

    leave_after(tmp_path, 4, loader(0.0), saver=saver(3), accumulate_grad_batches=2)
    verdict = resume(tmp_path, loader(0.5), saver=saver(3), accumulate_grad_batches=2)
    assert verdict.found == ("differs", "data", 4)


def test_a_stop_that_was_asked_for(tmp_path: Path) -> None:
    leave_after(tmp_path, 7, in_order(), saver=saver(4), log_every_n_steps=100)
    verdict = resume(tmp_path, in_order(), on_resume="stop", saver=saver(100), log_every_n_steps=100)
    assert (verdict.found, verdict.reason, verdict.ended_at) == (("differs", "data", 5), "aborted", 5)
