"""The index of a checkpoint: a tensor's pieces cover it exactly once, or it is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.checkpoint.format.index import Index
from dalsegno.errors import DamagedCheckpoint

Box = list[tuple[int, int]]
"""Where it begins and how long it is, in each dimension."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index") / "index.json"


def is_taken(path: Path, shape: list[int], boxes: list[Box]) -> bool:
    """Whether a tensor of bytes may lie there in these pieces."""
    pieces: list[dict[str, Any]] = [
        {
            "file": "file",
            "bytes": [0, math.prod(length for _, length in box)],
            "offsets": [begin for begin, _ in box],
            "shape": [length for _, length in box],
        }
        for box in boxes
    ]
    tensors = {"model.x": {"dtype": "uint8", "shape": shape, "pieces": pieces}}
    path.write_text(json.dumps({"format": 1, "tensors": tensors}))
    try:
        Index.read(path)
    except DamagedCheckpoint:
        return False
    return True


def fills(shape: list[int], boxes: list[Box]) -> bool:
    """The same, counted element by element."""
    count = torch.zeros(shape, dtype=torch.int)
    for box in boxes:
        count[tuple(slice(begin, begin + length) for begin, length in box)] += 1
    return bool((count == 1).all())


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[list[int], list[Box]]:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    starts = [st.integers(0, size) for size in shape]
    box = st.tuples(*starts).flatmap(
        lambda begins: st.tuples(
            *(
                st.tuples(st.just(begin), st.integers(0, size - begin))
                for begin, size in zip(begins, shape, strict=True)
            )
        )
    )
    return shape, [list(each) for each in draw(st.lists(box, max_size=6))]


@settings(max_examples=300)
@given(given_=shapes_and_boxes())
def test_pieces_that_do_not_cover_the_tensor_are_refused(path: Path, given_: tuple[list[int], list[Box]]) -> None:
    shape, boxes = given_
    assert is_taken(path, shape, boxes) == fills(shape, boxes)


@settings(max_examples=100)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_however_it_is_cut_it_is_taken(path: Path, shape: list[int], data: st.DataObject) -> None:
    """Split in two repeatedly; a piece that is duplicated or missing is found."""
    boxes: list[Box] = [[(0, size) for size in shape]]
    for _ in range(data.draw(st.integers(0, 8))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dimension = data.draw(st.integers(0, len(shape) - 1))
        begin, length = box[dimension]
        first = data.draw(st.integers(0, length))
        for part in ((begin, first), (begin + first, length - first)):
            boxes.append([*box[:dimension], part, *box[dimension + 1 :]])
    assert is_taken(path, shape, boxes)
    odd = data.draw(st.sampled_from([box for box in boxes if all(length for _, length in box)]))
    assert not is_taken(path, shape, [*boxes, odd])
    assert not is_taken(path, shape, [box for box in boxes if box != odd])


def test_what_is_overlapped_does_not_make_up_for_what_is_missing(path: Path) -> None:
    assert is_taken(path, [4, 2], [[(0, 2), (0, 2)], [(2, 2), (0, 2)]])
    assert not is_taken(path, [4, 2], [[(0, 2), (0, 2)], [(0, 2), (0, 2)]])
    assert not is_taken(path, [4, 2], [[(0, 2), (0, 2)], [(1, 2), (0, 2)]])


@pytest.mark.parametrize("dimensions", [8, 9])
def test_cut_along_too_many_dimensions(path: Path, dimensions: int) -> None:
    """Nobody does that, and it takes as many corners as there are subsets of them: up to eight are counted."""
    boxes: list[Box] = [[(0, 2)] * dimensions]
    for dimension in range(dimensions):
        last = boxes.pop()
        boxes += [[*last[:dimension], (half, 1), *last[dimension + 1 :]] for half in (0, 1)]
    assert fills([2] * dimensions, boxes)
    assert is_taken(path, [2] * dimensions, boxes) == (dimensions == 8)
