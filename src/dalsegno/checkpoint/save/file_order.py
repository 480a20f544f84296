"""The bytes of a file of tensors, from the live tensors, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dalsegno.checkpoint.tensor_files import FileLayout, as_bytes

from .host_copies import SMALL

_JOINED_BYTES = 1 << 20  # small tensors per call: still in the processor's cache in the next one


def in_file_order(layout: FileLayout, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of the file, several small tensors at a time.

    Small tensors are joined by one torch call: the writing thread would otherwise wait between its blocks for the
    thread that copies a thousand of them.
    """
    yield torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    small: list[torch.Tensor] = []
    room = _JOINED_BYTES
    for number in layout.order:
        tensor = tensors[number]
        is_small = tensor.numel() <= SMALL and not tensor.is_complex()
        if small and not (is_small and tensor.nbytes <= room and _are_alike(tensor, small[0])):
            yield _joined(small)
            small, room = [], _JOINED_BYTES
        if is_small:
            small.append(tensor)
            room -= tensor.nbytes
        else:
            yield as_bytes(tensor)
    if small:
        yield _joined(small)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenated bytes of tensors of one dtype on one device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
