"""Conversion of an optimizer's state to the form in checkpoints, and back."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.checkpoint.codec import decode, encode
from dalsegno.checkpoint.optimizer_state import OptimizerRows

NAMES = st.sampled_from([f"layer.{number}" for number in range(6)])
KINDS = st.sampled_from(["step", "exp_avg", "mu_product", "history"])
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bfloat16])
SCALARS = st.builds(lambda value, dtype: torch.tensor(value, dtype=dtype), st.integers(0, 99), DTYPES)
VALUES = SCALARS | st.integers() | st.just([1, "two"]) | st.builds(torch.arange, st.integers(0, 3))


@given(
    plain=st.dictionaries(NAMES, st.dictionaries(KINDS, VALUES)),
    sharded=st.dictionaries(NAMES, st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True)),
    on_cpu=st.sets(st.tuples(NAMES, KINDS)),
)
def test_what_was_saved_comes_back(
    plain: dict[str, dict[str, object]], sharded: dict[str, list[str]], on_cpu: set[tuple[str, str]]
) -> None:
    plain = {name: {} for name in sharded} | plain
    there: dict[str, list[str]] = {}
    for name, kind in sorted(on_cpu):
        if isinstance(plain.get(name, {}).get(kind), torch.Tensor):
            there.setdefault(name, []).append(kind)
    json, arrays = encode(OptimizerRows(plain, sharded, there).by_kind(), "optimizer")
    saved = decode(json, lambda name, dtype, shape: arrays[name], "optimizer")
    rows = OptimizerRows.of(saved)
    assert {name: {kind: _told(value) for kind, value in its.items()} for name, its in rows.plain.items()} == {
        name: {kind: _told(value) for kind, value in its.items()} for name, its in plain.items()
    }
    assert {name: sorted(kinds) for name, kinds in rows.sharded.items()} == {
        name: sorted(kinds) for name, kinds in sharded.items()
    }
    assert {name: sorted(kinds) for name, kinds in rows.on_cpu.items()} == there


def test_a_counter_of_every_parameter_is_one_tensor() -> None:
    plain = {f"layer.{number}": {"step": torch.tensor(float(number))} for number in range(1000)}
    _, arrays = encode(OptimizerRows(plain).by_kind(), "optimizer")
    assert [list(tensor.shape) for tensor in arrays.values()] == [[1000]]


def test_counters_that_come_back_are_their_own() -> None:
    """An optimizer adds to them in place."""
    rows = OptimizerRows.of(OptimizerRows({name: {"step": torch.tensor(1.0)} for name in "ab"}).by_kind())
    rows.plain["a"]["step"] += 1
    assert rows.plain["b"]["step"] == 1


def _told(value: object) -> object:
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
