"""Deques in a callback's state, which Cerebras's own checkpoints can contain, as values that any checkpoint can."""

from __future__ import annotations

from collections import deque
from typing import Any

_MARK = "__deque__"


def encode_deques(tree: Any) -> Any:
    """Return ``tree`` with every deque as a dict of its items and its greatest length."""
    if type(tree) is deque:
        return {_MARK: [encode_deques(item) for item in tree], "maxlen": tree.maxlen}
    if type(tree) is dict:
        return {key: encode_deques(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(encode_deques(item) for item in tree)
    return tree


def decode_deques(tree: Any) -> Any:
    """Undo :func:`encode_deques`."""
    if type(tree) is dict and tree.keys() == {_MARK, "maxlen"}:
        return deque((decode_deques(item) for item in tree[_MARK]), tree["maxlen"])
    if type(tree) is dict:
        return {key: decode_deques(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(decode_deques(item) for item in tree)
    return tree
