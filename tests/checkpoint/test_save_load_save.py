"""Save, load, save: the second checkpoint has the same bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from checkpoint.parts import Notes
from checkpoint.test_codec import trees
from dalsegno.checkpoint import CheckpointManager, ModelState, OptimizerState
from dalsegno.checkpoint.tensor_files import DTYPES
from dalsegno.errors import CannotSave
from dalsegno.logs import RecordLog
from dalsegno.stateful.component import Component

FORMS = ["plain", "transposed", "every second", "expanded", "conjugated", "negative", "tied"]


@dataclass(frozen=True)
class Described:
    """A tensor of a model."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    form: str
    is_parameter: bool

    def made(self, seed: int) -> Tensor:
        shape = (*self.shape[:-1], 2 * self.shape[-1]) if self.form == "every second" and self.shape else self.shape
        if self.form == "expanded" and self.shape:
            shape = (*self.shape[:-1], 1)
        count = self.dtype.itemsize * torch.Size(shape).numel()
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        flat = raw & 1 if self.dtype == torch.bool else raw
        tensor = flat.view(self.dtype).reshape(shape)
        if self.form == "transposed":
            return tensor.reshape(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
        if self.form == "every second" and self.shape:
            return tensor[..., ::2]
        if self.form == "expanded" and self.shape:
            return tensor.expand(self.shape)
        if self.dtype in (torch.complex64, torch.complex128):
            return (
                tensor.conj()
                if self.form == "conjugated"
                else tensor.conj().imag
                if self.form == "negative"
                else tensor
            )
        return tensor


names = st.one_of(
    st.sampled_from(["weight", "a b", "é", "x/y", "$tuple", "my_extra_state", "\ud800"]), st.text(min_size=1)
)
described = st.builds(
    Described,
    names.filter(lambda name: "." not in name and not hasattr(nn.Module(), name) and name != "__metadata__"),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(FORMS),
    st.booleans(),
)


class Built(nn.Module):
    """Of described tensors, some under a submodule too, and with an extra state."""

    def __init__(self, parts: list[Described], extra: Any, seed: int) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.extra = extra
        for number, part in enumerate(parts):
            tensor, holder = part.made(seed + number), [self, self.inner][number % 2]
            can_be_trained = part.is_parameter and (tensor.is_floating_point() or tensor.is_complex())
            if part.is_parameter:
                holder.register_parameter(part.name, nn.Parameter(tensor, requires_grad=can_be_trained))
            else:
                holder.register_buffer(part.name, tensor)
            if part.form == "tied" and part.is_parameter:
                self.inner.register_parameter(f"{part.name} again", getattr(holder, part.name))

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def parts_of(model: Built, notes: Notes) -> tuple[list[Any], list[Component]]:
    plain = [each for each in model.parameters() if each.dtype == torch.float32 and each.is_contiguous()]
    optimizer = torch.optim.Adam([*plain, nn.Parameter(torch.zeros(2))], lr=0.1)
    return [ModelState(model), OptimizerState(model, optimizer)], [Component("callbacks.Notes", notes)]


def files_of(folder: Path) -> dict[str, bytes]:
    """All files except the manifest, which contains the time."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@settings(max_examples=30, deadline=None)
@given(st.lists(described, max_size=4, unique_by=lambda part: part.name), trees, trees)
@example([Described("mask", torch.float32, (3, 4), "expanded", False)], None, None)
@example([Described("mask", torch.float32, (3, 0), "expanded", True)], None, torch.Size([0, 3]))
def test_a_second_save_has_the_same_bytes(parts: list[Described], extra: Any, notes: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        saved = CheckpointManager(Path(name) / "first")
        sharded, components = parts_of(Built(parts, extra, seed=1), Notes(notes))
        optimizer = sharded[1].optimizer
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        first = saved.save(1, sharded, components)
        again = CheckpointManager(Path(name) / "second")
        fresh = parts_of(Built(parts, None, seed=50), Notes())
        checkpoint = saved.find()
        assert checkpoint is not None
        again.load(checkpoint, *fresh)
        second = again.save(1, *fresh)
        assert files_of(first) == files_of(second)


def test_an_expanded_buffer_stays_one() -> None:
    with tempfile.TemporaryDirectory() as name:
        mask = [Described("mask", torch.float32, (3, 4), "expanded", False)]
        manager, model, other = CheckpointManager(Path(name)), Built(mask, None, 1), Built(mask, None, 2)
        manager.save(1, [ModelState(model)], [])
        checkpoint = manager.find()
        assert checkpoint is not None
        manager.load(checkpoint, [ModelState(other)], [])
        assert other.get_buffer("mask").stride() == model.get_buffer("mask").stride()
        assert other.get_buffer("mask").tolist() == model.get_buffer("mask").tolist()


def test_what_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(1))
    with pytest.raises(CannotSave, match="cannot save a tensor named __metadata__"):
        CheckpointManager(tmp_path).save(1, [ModelState(model)], [])
    notes = Component("callbacks.Notes", Notes({"shape": torch.Size([-1, 3])}))
    with pytest.raises(CannotSave, match=r"^callbacks\.Notes\.shape: cannot save a torch\.Size of \[-1, 3\]"):
        CheckpointManager(tmp_path).save(1, [], [notes])


steps = st.one_of(st.integers(), st.booleans(), st.none(), st.floats(), st.text(max_size=3))


@settings(max_examples=30, deadline=None)
@given(st.lists(steps, max_size=3))
@example([-1])
@example([True])
def test_a_log_goes_on_whatever_step_its_records_name(values: list[Any]) -> None:
    """Of a callback that has put another ``global_step`` into ``ctx.logs``."""
    with tempfile.TemporaryDirectory() as name:
        log = RecordLog("train.jsonl", name)
        log.open()
        for value in values:
            log.append({"global_step": value})
        state = log.state()
        log.open(state)
        assert (log.records, log.state()) == (len(values), state)
        log.close()
