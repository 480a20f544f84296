"""Every state is decoded bit by bit; a value that cannot be saved is refused with its path; so is hostile input."""

from __future__ import annotations

import collections
import enum
import json
import struct
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as numpy_strategies
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoint.sameness import assert_same
from dalsegno.checkpoint import codec
from dalsegno.checkpoint.codec import DEEPEST, decode, encode
from dalsegno.checkpoint.tensor_files import DTYPES
from dalsegno.errors import CannotSave, DamagedCheckpoint


def through_json(tree: Any) -> Any:
    """The tree, encoded, written as JSON, and decoded from copies of its arrays."""
    encoded, arrays = encode(tree, "callbacks.MyCb")
    copies = {name: tensor.clone().contiguous() for name, tensor in arrays.items()}

    def read_array(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        return copies[name].reshape(-1).view(torch.uint8).view(dtype).reshape(shape)

    return decode(json.loads(json.dumps(encoded, allow_nan=False)), read_array, "callbacks.MyCb")


any_float = st.one_of(
    st.floats(), st.integers(0, 2**64 - 1).map(lambda b: struct.unpack("<d", struct.pack("<Q", b))[0])
)
any_text = st.text(st.characters(exclude_categories=()))
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(shapes)
    count = dtype.itemsize
    for size in shape:
        count *= size
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


numpy_dtypes = st.one_of(
    numpy_strategies.boolean_dtypes(),
    numpy_strategies.integer_dtypes(endianness="?"),
    numpy_strategies.unsigned_integer_dtypes(endianness="?"),
    numpy_strategies.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    numpy_strategies.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    numpy_strategies.datetime64_dtypes(),
)
arrays = numpy_dtypes.flatmap(lambda dtype: numpy_strategies.arrays(dtype, numpy_strategies.array_shapes(min_dims=0)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**70, max_value=2**80),
    any_float,
    any_text,
    st.binary(),
    tensors(),
    arrays,
    arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    shapes.map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1)]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(any_text, st.integers(), st.sampled_from(["$tuple", "a.b"])), inner, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(leaves)
def test_a_leaf_comes_back(leaf: Any) -> None:
    assert_same(through_json(leaf), leaf)


SIGNALING_NAN = struct.unpack(">d", bytes.fromhex("7ff0000000000001"))[0]


@settings(max_examples=60)
@given(trees)
@example([float("nan"), -float("nan"), SIGNALING_NAN, float("inf"), -float("inf"), -0.0, 5e-324, 1e22])
@example([np.float32("nan"), np.float64(-0.0), np.array([SIGNALING_NAN]), np.longdouble(1) / 3, np.bool_(True)])
@example(["\ud800", "\ud83d\ude00", "😀", "\0", "$tuple"])
@example([2**63, -(2**63) - 1, 2**64, 10**5000, True, 1, 1.0])
@example({"$tuple": [1], "a": {1: "int", "1": "str", "$": None}, "": {}})
def test_what_goes_in_comes_out(tree: Any) -> None:
    assert_same(through_json(tree), tree)


def test_tensors_that_are_views() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[:1].expand(3, 4),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "shared": [base, base],
        "parameter": torch.nn.Parameter(base).detach(),
    }
    assert_same(through_json(tree), tree)


def test_what_requires_a_gradient_comes_back_as_a_leaf_of_its_class() -> None:
    weight, tensor = torch.nn.Parameter(torch.randn(3)), torch.ones(2, requires_grad=True)
    tree = [weight, torch.nn.Parameter(torch.arange(3), requires_grad=False), tensor, tensor * 2]
    found = through_json(tree)
    assert [type(each) for each in found] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor, torch.Tensor]
    assert [each.requires_grad for each in found] == [True, False, True, False]  # a result is no leaf of a graph again
    assert all(each.is_leaf for each in found)
    assert_same([each.detach() for each in found], [each.detach() for each in tree])


LAYOUTS = {
    "column-major": torch.randn(5, 3).t(),
    "expanded": torch.randn(1, 3, 1).expand(4, 3, 2),
    "every other": torch.randn(4, 6)[:, ::2],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "windows": torch.randn(6).unfold(0, 3, 1),
    "a column": torch.empty_strided((3, 1), (1, 3)).fill_(2),
    "Fortran": np.asfortranarray(np.random.default_rng(0).normal(size=(4, 3))),
    "backwards": np.arange(8.0).reshape(2, 4)[::-1, ::-2],
    "broadcast": np.broadcast_to(np.arange(3, dtype=">f4"), (2, 3)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_come_back(name: str) -> None:
    value = LAYOUTS[name]
    found = through_json([value])[0]
    assert_same(found, value)
    strides = [each.stride() if isinstance(each, torch.Tensor) else each.strides for each in (found, value)]
    assert strides[0] == strides[1]


def test_the_usual_strides_are_not_recorded() -> None:
    encoded, _ = encode([torch.zeros(2, 3), torch.zeros(()), torch.zeros(3, 0), np.zeros((2, 3))], "a")
    assert not any("strides" in each for each in encoded)


def test_values_that_share_memory_do_so_again() -> None:
    base, array, halves = torch.arange(12.0).reshape(3, 4), np.arange(6), torch.zeros(3, dtype=torch.complex64)
    leaf = torch.nn.Parameter(torch.ones(2))
    tree = {
        "one": base,
        "other": base,
        "transposed": base.t(),
        "row": base[1],
        "array": array,
        "numbers": {"every other": array[::2], "as a tensor": torch.from_numpy(array)},
        "complex": halves,
        "real": torch.view_as_real(halves),
        "leaf": [leaf, leaf, leaf.detach()],
        "alone": torch.zeros(4),
    }
    found = through_json(tree)
    assert_same(found, tree)
    for state in (tree, found):
        state["other"].add_(1)
        state["row"].mul_(10)
        state["numbers"]["every other"][1] = 77
        state["real"][1, 1] = 5
        state["leaf"][2].add_(3)
    assert_same(found, tree)
    assert found["one"] is found["other"] and found["leaf"][0] is found["leaf"][1]
    assert found["leaf"][0].requires_grad and not found["leaf"][2].requires_grad
    assert found["transposed"].stride() == (1, 4)


def test_memory_that_is_shared_is_stored_once() -> None:
    table = torch.randn(1000)
    _, arrays = encode({"a": table, "b": [table, table[:10]], "c": table[500:]}, "x")
    assert {name: each.nbytes for name, each in arrays.items()} == {"a": 4000}


def test_columns_of_a_wide_table_do_not_store_the_table() -> None:
    table = torch.randn(10, 1000)
    tree = {"first": table[:, 0], "third": table[:, 2]}
    _, arrays = encode(tree, "x")
    assert sum(each.nbytes for each in arrays.values()) == 80
    assert_same(through_json(tree), tree)


def test_a_conjugate_and_its_base_are_stored_by_their_values() -> None:
    base = torch.tensor([1 + 2j, 3j])
    tree = {"base": base, "conjugate": base.conj()}
    assert_same(through_json(tree), tree)


def test_an_ordered_dict_and_a_deque_come_back_as_such() -> None:
    assert_same(through_json(collections.OrderedDict(b=1, a=2)), collections.OrderedDict(b=1, a=2))
    recent = through_json(collections.deque([1, (2, 3)], maxlen=2))
    assert recent == collections.deque([1, (2, 3)]) and recent.maxlen == 2


def test_a_json_that_people_can_read() -> None:
    encoded, arrays = encode({"seen": 3, "loss": 1.5, "pair": (1, "x"), "history": [None, torch.zeros(2)]}, "a")
    assert encoded == {
        "seen": 3,
        "loss": 1.5,
        "pair": {"$tuple": [1, "x"]},
        "history": [None, {"$tensor": "history[1]", "dtype": "float32", "shape": [2]}],
    }
    assert list(arrays) == ["history[1]"]


class Foo:
    pass


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 2


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"history": [1, 2, 3, Foo()]}, r"callbacks\.MyCb\.history\[3\]: cannot save a Foo; a state may contain"),
        ({"a b": {7: {1}}}, r"callbacks\.MyCb\['a b'\]\[7\]: cannot save a set; save sorted\(it\)"),
        ([Color.RED], r"callbacks\.MyCb\[0\]: cannot save a Color; save its \.name or \.value"),
        ([Level.HIGH], r"callbacks\.MyCb\[0\]: cannot save a Level"),
        ([collections.defaultdict(int)], r"cannot save a defaultdict; .*dict\(it\)"),
        ([np.random.default_rng(0)], r"cannot save a Generator; save its state, .*bit_generator\.state"),
        ([Pair(1, 2)], r"cannot save a Pair; .*tuple\(it\)"),
        ([len], r"callbacks\.MyCb\[0\]: cannot save a builtin_function_or_method; code is never saved"),
        ({(1, 2): 3}, r"callbacks\.MyCb: cannot save a dict with the key \(1, 2\), a tuple"),
        ({True: 3}, r"key True, a bool"),
        ([np.array([Foo()])], r"cannot save a numpy array of object"),
        ([np.array(["text"])], r"cannot save a numpy array of <U4"),
        ([torch.zeros(2, 2).to_mkldnn()], r"torch\._mkldnn"),
        ([torch.zeros(2, device="meta")], r"on meta"),
        ([1j], r"cannot save a complex"),
        ([Path("x")], r"cannot save a PosixPath"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(tree: Any, message: str) -> None:
    with pytest.raises(CannotSave, match=message):
        encode(tree, "callbacks.MyCb")


def test_a_state_that_contains_itself() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CannotSave, match="contains itself"):
        encode(tree, "callbacks.MyCb")


def test_the_deepest_state_comes_back() -> None:
    tree: Any = 1
    for _ in range(DEEPEST):
        tree = (tree,)
    assert_same(through_json(tree), tree)


@pytest.mark.parametrize("inner", [[1], (0.5,), ["name"], {"a": 1}, {1: "name"}], ids=repr)
def test_a_deeper_state_is_refused_when_it_is_saved_whatever_it_contains(inner: Any) -> None:
    """Not when it is loaded."""
    tree = inner
    for _ in range(DEEPEST):
        tree = [tree]
    with pytest.raises(CannotSave, match="nested deeper"):
        encode(tree, "callbacks.MyCb")
    assert_same(through_json(tree[0]), tree[0])


@pytest.mark.parametrize("keys", [str, int])
@pytest.mark.parametrize("values", [int, float, str])
def test_names_and_numbers_under_thousands_of_keys_are_looked_at_as_one(
    keys: type, values: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"all": collections.OrderedDict({keys(number): values(number) for number in range(3000)})}
    looked_at: list[object] = []
    inside = codec.inside
    monkeypatch.setattr(codec, "inside", lambda where, key: looked_at.append(key) or inside(where, key))
    encoded, _ = encode(tree, "callbacks.MyCb")
    assert looked_at == ["all"]
    assert_same(decode(json.loads(json.dumps(encoded)), lambda *_: torch.empty(0), "callbacks.MyCb"), tree)


@pytest.mark.parametrize(
    "hostile",
    [
        {"$pickle": "gASVHg=="},
        {"$tuple": 3},
        {"$tuple": {"a": 1}},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1]]},
        {"$dict": 1},
        {"$int": "os.system"},
        {"$int": 3},
        {"$float": "00"},
        {"$bytes": "%%%"},
        {"$str": "/w=="},
        {"$size": [-1]},
        {"$size": ["1"]},
        {"$dtype": "load"},
        {"$dtype": "_C"},
        {"$device": "no such device"},
        {"$scalar": "O", "hex": "00"},
        {"$scalar": "<f4", "hex": "00"},
        {"$scalar": "<f4"},
        {"$array": "x", "dtype": "O", "shape": [1]},
        {"$array": "x", "dtype": "i4,i4", "shape": [1]},
        {"$array": "x", "dtype": "<f4", "shape": [1 << 62]},
        {"$array": "x", "dtype": "<f4", "shape": [1 << 40, 1 << 40]},
        {"$tensor": "x", "dtype": "float32", "shape": [1 << 40, 0]},
        {"$tensor": "absent", "dtype": "float32", "shape": [1]},
        {"$tensor": "x", "dtype": "qint8", "shape": [1]},
        {"$tensor": ["x"], "dtype": "float32", "shape": [1]},
        {"$tensor": "x", "dtype": "float32", "shape": [True]},
        {"$tensor": "x", "dtype": "uint8", "shape": [4], "strides": [1 << 47]},
        {"$tensor": "x", "dtype": "uint8", "shape": [2, 2], "strides": [1 << 62, 1]},
        {"$tensor": "x", "dtype": "uint8", "shape": [2, 2], "strides": [-2, 1]},
        {"$tensor": "x", "dtype": "uint8", "shape": [4], "strides": [1, 1]},
        {"$tensor": "x", "dtype": "uint8", "shape": [4], "strides": 1},
        {"$tensor": "x", "dtype": "uint8", "shape": [4], "requires_grad": True},
        {"$tensor": "x", "dtype": "uint8", "shape": [4], "requires_grad": True, "parameter": True},
        {"$array": "x", "dtype": "|u1", "shape": [4], "strides": [-(1 << 47)]},
        {"$array": "x", "dtype": "|u1", "shape": [4], "strides": ["1"]},
        *(
            {"$view": {tag: "x", "dtype": dtype, "shape": [2], "strides": strides}, "offset": offset, "bytes": 4}
            for tag, dtype in (("$tensor", "uint8"), ("$array", "|u1"))
            for strides, offset in (([1], 3), ([1], -1), ([4], 0), ([-1], 0), ([1], "0"), ([1], 1 << 62), (None, 0))
        ),
        {"$view": {"$tensor": "x", "dtype": "float64", "shape": [1], "strides": [1]}, "offset": 0, "bytes": 4},
        {"$view": {"$tensor": "x", "dtype": "uint8", "shape": [1], "strides": [1]}, "offset": 0, "bytes": -4},
        {"$view": {"$tensor": "x", "dtype": "uint8", "shape": [1], "strides": [1]}, "offset": 0},
        {"$view": {"dtype": "uint8", "shape": [1], "strides": [1]}, "offset": 0, "bytes": 4},
        {"$view": ["$tensor"], "offset": 0, "bytes": 4},
        {"$composite": "sparse_coo", "shape": [2], "values": {}},
    ],
)
def test_hostile_input_is_damage(hostile: Any) -> None:
    def read_array(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        (found,) = [torch.zeros(4, dtype=torch.uint8)] if name == "x" else []
        return found.view(dtype).reshape(shape)

    with pytest.raises(DamagedCheckpoint, match=r"^callbacks\.MyCb"):
        decode({"deep": [hostile]}, read_array, "callbacks.MyCb")


def test_hostile_depth_is_damage() -> None:
    hostile: Any = 1
    for _ in range(500):
        hostile = [hostile]
    with pytest.raises(DamagedCheckpoint, match="too deep"):
        decode(hostile, lambda name, dtype, shape: torch.empty(0), "x")
