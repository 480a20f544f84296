"""How many floating-point operations a model takes, counted once; and how many a device could do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.hooks import RemovableHandle

from .args import TrainingArguments

TRAINING = 3
"""Times the forward pass: the backward pass takes two more, one for the gradients of the inputs and one for those of
the weights. Operations that activation checkpointing does again are not the model's, and do not count."""

PER_PARAMETER = 6
"""For each parameter and token, where nothing can be counted: one multiplication and one addition forward, twice that
backward (C ≈ 6 N; Kaplan et al. 2020, "Scaling Laws for Neural Language Models", arXiv:2001.08361, section 2.1). It
leaves out attention over long contexts, and takes embeddings for matrices that are multiplied."""


def _attention(*args: Any, **named: Any) -> Any:
    return flop_registry[torch.ops.aten._scaled_dot_product_flash_attention](*args, **named)


_attention._get_raw = True  # type: ignore[attr-defined]  # it is given tensors, and takes their shapes itself
_ON_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}  # torch's own table leaves it out

KNOWN_PEAKS: Mapping[str, float] = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""FLOP/s in 16-bit matrix products without sparsity, of the makers' data sheets, by what is in the device's name; the
first that fits counts."""


def known_peak(device: torch.device, args: TrainingArguments) -> float | None:
    """FLOP/s of one device in 16-bit matrix products; None where that is not known, or the run is not in 16 bits."""
    if device.type != "cuda" or not (args.bf16 or args.fp16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in KNOWN_PEAKS.items() if part in name), None)


class CountedForward:
    """Counts the operations of a model's next forward pass, with torch's own counter, and is gone after it.

    The pass itself stays as it is; results are the same, bit by bit. On a rank, it is the operations of that rank. The
    hooks go with the pass after it: torch does not expect one to remove itself while a failing pass is wound up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.flops: int | None = None
        """Of that pass, once it is over."""
        self.tokens = 0
        """Elements of its ``input_ids``; 0 where there are none."""
        self.samples = 0
        """The first dimension of the first tensor that it was given."""
        self._counter = FlopCounterMode(display=False, custom_mapping=_ON_CPU)
        self._counting = False
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Stop waiting for a pass."""
        while self._handles:
            self._handles.pop().remove()
        self._stop()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.flops is not None:
            self.close()
        if self.flops is not None or self._counting or not torch.is_grad_enabled():  # the last: an evaluation's
            return
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        self.samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        ids = kwargs.get("input_ids")
        self.tokens = ids.numel() if isinstance(ids, Tensor) else 0
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        self._counting = True

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._counting:
            self._stop()
            self.flops = self._counter.get_total_flops()

    def _stop(self) -> None:
        if self._counting:
            self._counting = False
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
