"""bitsandbytes: quantized weights, taken apart for :mod:`dalsegno.checkpoint.wrapped`.

Its optimizers have plain tensors.

``Params4bit``: packed elements and quantization state. The parts have the names that bitsandbytes itself gives them in
a state dict (``weight``, ``weight.absmax``, ``weight.quant_map``, ``weight.nested_absmax``,
``weight.nested_quant_map``), and ``weight.nested_offset``. The rest of what bitsandbytes packs into
``weight.quant_state.bitsandbytes__nf4`` is the context.

``Int8Params``: the elements; its module has the scales, ``SCB``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def take_apart(tensor: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], object] | None:
    """Parts of a weight, which share its memory, and the numbers that describe its quantization; None for another
    class."""
    match type(tensor).__name__:
        case "Params4bit":
            return _of_4_bits(tensor.data, getattr(tensor, "quant_state", None))
        case "Int8Params":
            return {"": tensor.data}, {"has_fp16_weights": getattr(tensor, "has_fp16_weights", False)}
    return None


def hidden_tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Tensors that a module has beside its weight, by name.

    The quantization state of a 4-bit weight that FSDP has replaced by a sharded one; the scales of an 8-bit weight,
    which ``load_state_dict`` refuses after the first forward.
    """
    weight, state = getattr(module, "weight", None), getattr(module, "quant_state", None)
    if isinstance(weight, DTensor) and state is not None:
        parts, _ = _of_4_bits(weight, state)
        return {f"weight{end}": part for end, part in parts.items() if end}
    if type(weight).__name__ == "Int8Params":
        moved: Any = getattr(module, "state", None)
        scales = getattr(weight, "SCB", None) if moved is None or moved.SCB is None else moved.SCB
        return {} if scales is None else {"SCB": scales}
    return {}


def _of_4_bits(packed: torch.Tensor, state: Any) -> tuple[Mapping[str, torch.Tensor], object]:
    if state is None:
        return {"": packed}, "not quantized yet"
    parts = {"": packed, ".absmax": state.absmax, ".quant_map": state.code}
    context = _numbers(state)
    if state.nested:
        nested = state.state2
        parts |= {".nested_absmax": nested.absmax, ".nested_quant_map": nested.code, ".nested_offset": state.offset}
        context["nested"] = _numbers(nested)
    return parts, context


def _numbers(state: Any) -> dict[str, Any]:
    return {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "dtype": state.dtype,
        "shape": None if state.shape is None else list(state.shape),
    }
