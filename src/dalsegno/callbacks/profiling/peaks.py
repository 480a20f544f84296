"""Peak FLOP/s of devices in dense 16-bit matrix products that accumulate in float32, and of all ranks' devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dalsegno.args import TrainingArguments
from dalsegno.callbacks.argument_checks import number
from dalsegno.distributed import accelerator, collectives
from dalsegno.errors import ConfigurationError

_B200, _H100, _H100_PCIE, _NVL, _A100 = 2250e12, 989e12, 756e12, 835e12, 312e12

KNOWN_PEAKS: Mapping[str, float] = {
    # NVIDIA's data sheets of each data center product. They give most figures with sparsity, which is twice this.
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B300 SXM6 AC": _B200,
    "NVIDIA B200": _B200,
    "NVIDIA H200": _H100,
    "NVIDIA H200 NVL": _NVL,
    "NVIDIA GH200 480GB": _H100,
    "NVIDIA GH200 144G HBM3e": _H100,
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
    "NVIDIA L20": 119.5e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    # NVIDIA's white papers of RTX Blackwell, Ada and Ampere GA102, appendix A, "Peak BF16 Tensor TFLOPS with FP32
    # Accumulate": on a GeForce half of those with FP16 accumulate, which PyTorch does not use by default.
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 5080": 112.6e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 4080": 97.5e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX 6000 Ada Generation": 364.2e12,
    "NVIDIA RTX A6000": 154.8e12,
    # AMD's data sheets of Instinct accelerators. An MI250X is two devices, each with half of its peak of 383 TFLOP/s.
    "AMD Instinct MI355X": 2516.6e12,
    "AMD Instinct MI325X": 1307.4e12,
    "AMD Instinct MI300X": 1307.4e12,
    "AMD Instinct MI300X OAM": 1307.4e12,
    "AMD Instinct MI250X": 191.5e12,
}
"""By the device's exact name in torch: an L40 is not an L4, an A1000 not an A100, a laptop's RTX 4090 not a desktop's,
a MIG slice not a whole device."""

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
    if device.type in ("cpu", "meta") or not (args.bf16 or args.fp16):
        return None
    name = accelerator.name_of(device)
    return KNOWN_PEAKS.get(name) or (ONLY_FP16.get(name) if args.fp16 else None)


@dataclass(frozen=True, slots=True)
class GivenPeak:
    """The peak that the user gives to a callback, in FLOP/s, in at most one of three ways.

    Args:
        owner: the callback, for error messages.
        peak_hardware_flops: of the only device; for several ranks it is refused, since it means one device to some
            programs and all of them to others.
        peak_flops_per_device: of each rank's device.
        peak_flops_in_total: of all ranks' devices together.

    Raises:
        ConfigurationError: for a value that is not a number over 0, or for two ways.
    """

    owner: str
    peak_hardware_flops: float | None = None
    peak_flops_per_device: float | None = None
    peak_flops_in_total: float | None = None

    def __post_init__(self) -> None:
        names = ("peak_hardware_flops", "peak_flops_per_device", "peak_flops_in_total")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            number(self.owner, name, value, over=0)
        if len(given) > 1:
            raise ConfigurationError(f"{self.owner}: {' and '.join(given)} are given; give only one")

    def of_this_rank(self, device: torch.device, args: TrainingArguments) -> float | None:
        """Return this rank's share of the peak; None if it is unknown.

        Raises:
            ConfigurationError: for ``peak_hardware_flops`` on several ranks.
        """
        ranks = collectives.world_size()
        if self.peak_hardware_flops is not None and ranks > 1:
            value = f"{self.peak_hardware_flops:g}"
            raise ConfigurationError(
                f"{self.owner}: peak_hardware_flops={value} is ambiguous on {ranks} ranks; give "
                f"peak_flops_per_device={value} if it is the peak of one device, or peak_flops_in_total={value} if it "
                "is that of all devices together"
            )
        if self.peak_flops_in_total is not None:
            return self.peak_flops_in_total / ranks
        return self.peak_hardware_flops or self.peak_flops_per_device or known_peak(device, args)
