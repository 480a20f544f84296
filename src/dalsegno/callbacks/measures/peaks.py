"""Peak FLOP/s of devices in dense 16-bit matrix products, from the makers' data sheets."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dalsegno.args import TrainingArguments

_H100, _H100_PCIE, _NVL, _A100 = 989e12, 756e12, 835e12, 312e12

KNOWN_PEAKS: Mapping[str, float] = {
    # NVIDIA's data sheets give most figures with sparsity, which is twice this.
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA GH200 480GB": _H100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _NVL,
    "NVIDIA H800": _H100,
    "NVIDIA H800 PCIe": _H100_PCIE,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A800-SXM4-80GB": _A100,
    "NVIDIA A800 80GB PCIe": _A100,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    # AMD Instinct MI300X data sheet: 1307.4 TFLOP/s.
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
}
"""By the device's exact name in torch: an L40 is not an L4, an A1000 not an A100, a MIG slice not a whole device."""

ONLY_FP16: Mapping[str, float] = {
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla T4": 65e12,
}
"""Devices without matrix units for bf16."""


def known_peak(device: torch.device, args: TrainingArguments) -> float | None:
    """Return one device's peak FLOP/s in 16-bit matrix products; None if unknown, or if the run is not in 16 bits."""
    if device.type != "cuda" or not (args.bf16 or args.fp16):
        return None
    name = torch.cuda.get_device_name(device)
    return KNOWN_PEAKS.get(name) or (ONLY_FP16.get(name) if args.fp16 else None)
