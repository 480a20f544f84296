"""Layout: which ranks read the same data, and the mesh that all ranks form.

Whatever follows the data (samples, loss weights, records, per-rank state, random seeds) asks for the *data rank*.
Whatever all ranks decide together (stops, saves) uses :mod:`dalsegno.distributed.collectives` as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dalsegno.distributed import accelerator, collectives
from dalsegno.distributed.modes import (
    DDP,
    REPLICATE,
    SHARD,
    STAGES,
    Mode,
    Parallelized,
    Pipeline,
    Setting,
    TensorParallel,
    checked,
    mesh_dimensions,
    modes_of,
    text_of,
)
from dalsegno.errors import ConfigurationError, expect_known

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a job share its data and its model. Equal on all ranks."""

    mesh: DeviceMesh | None
    """Over all ranks, with named dimensions; None if every rank has the whole model."""
    data_ranks: tuple[int, ...]
    """The data rank of each rank: 0 to ``data_size - 1``."""

    @classmethod
    def flat(cls) -> Self:
        """Every rank reads its own data."""
        return cls(None, tuple(range(collectives.world_size())))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, data: Sequence[str]) -> Self:
        """Ranks at the same coordinates of the dimensions ``data`` read the same data.

        Raises:
            UnknownName: for a dimension that the mesh does not have; the message suggests the nearest.
            ConfigurationError: for a mesh without names, or not of all ranks.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise ConfigurationError(
                f"parallel=Parallelized({mesh}): its dimensions have no names; build it with mesh_dim_names="
            )
        expect_known("data dimension of Parallelized(mesh, data=…):", data, names)
        if sorted(mesh.mesh.flatten().tolist()) != list(range(collectives.world_size())):
            raise ConfigurationError(
                f"parallel=Parallelized({mesh}): the mesh has {mesh.size()} ranks, this job has "
                f"{collectives.world_size()}; pass the mesh of all ranks"
            )
        return cls(mesh, _data_ranks(mesh.mesh, names, data))

    @classmethod
    def of(cls, parallel: Setting) -> Self:
        """The data ranks that a ``parallel`` setting gives this job's ranks, without a mesh: to build your own loader,
        before the trainer.

        Raises:
            ConfigurationError: if the setting does not fit the number of ranks, or the ranks have not joined.
        """
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not collectives.initialized():
            raise ConfigurationError(
                "Layout.of(parallel): this process does not know its rank yet; call "
                "torch.distributed.init_process_group() first"
            )
        modes = modes_of(checked(parallel))
        if (given := cls._without_sizes(modes)) is not None:
            return given
        sizes = mesh_dimensions(modes, collectives.world_size())
        ranks = torch.arange(collectives.world_size()).view(tuple(sizes.values()))
        return cls(None, _data_ranks(ranks, tuple(sizes), data_dimensions(sizes)))

    @classmethod
    def _without_sizes(cls, modes: Sequence[Mode]) -> Self | None:
        """Of modes that do not make a mesh: the user has made it, or every rank has the whole model."""
        if modes and isinstance(modes[0], Parallelized):
            return cls.of_mesh(modes[0].mesh, modes[0].data)
        return cls.flat() if all(isinstance(mode, DDP) for mode in modes) else None

    @property
    def data_rank(self) -> int:
        """Ranks with the same number read the same data."""
        return self.data_ranks[collectives.rank()]

    @property
    def data_size(self) -> int:
        """Number of ranks with different data."""
        return max(self.data_ranks) + 1

    @property
    def stage(self) -> tuple[int, int]:
        """This rank's place along the pipeline, and the number of places; (0, 1) without one."""
        if self.mesh is None or STAGES not in self.dimensions:
            return 0, 1
        return self.mesh.get_local_rank(STAGES), self.dimensions[STAGES]

    @property
    def random_rank(self) -> int:
        """Ranks with the same number draw the same random numbers: those that read the same data, in one stage."""
        place, _ = self.stage
        return place * self.data_size + self.data_rank

    @property
    def sharing(self) -> int:
        """Number of ranks that read the same data."""
        return len(self.data_ranks) // self.data_size

    @property
    def counted(self) -> list[int]:
        """For each data rank, the rank that stands for it: the lowest."""
        return _lowest_ranks(self.data_ranks)

    @property
    def is_primary(self) -> bool:
        """Whether this rank stands for its data rank."""
        return self.counted[self.data_rank] == collectives.rank()

    @property
    def dimensions(self) -> dict[str, int]:
        """Sizes of the mesh's dimensions, by name; empty without a mesh."""
        if self.mesh is None:
            return {}
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))

    def sum_floats(self, values: Sequence[float], purpose: str) -> list[float]:
        """Sum over the data ranks, each with the mean of the ranks that read its data. Collective of all ranks; see
        :func:`collectives.sum_floats`."""
        return self.totals(collectives.gather_floats(values, purpose))

    def totals(self, rows: Sequence[Sequence[float]]) -> list[float]:
        """Sum a row for each rank, as :meth:`sum_floats` does."""
        return [sum(column) / self.sharing for column in zip(*rows, strict=True)]

    def of_data_ranks(self, rows: Sequence[T]) -> list[T]:
        """Of a row for each rank, those that stand for a data rank, in the order of the data ranks."""
        return [rows[number] for number in self.counted]


@lru_cache(maxsize=8)
def _lowest_ranks(data_ranks: tuple[int, ...]) -> list[int]:
    """For each data rank, the lowest rank that reads its data. Asked for in each step, of up to thousands of ranks."""
    lowest: dict[int, int] = {}
    for rank, number in enumerate(data_ranks):
        lowest.setdefault(number, rank)
    return [lowest[number] for number in range(len(lowest))]


def _data_ranks(ranks: torch.Tensor, names: Sequence[str], data: Sequence[str]) -> tuple[int, ...]:
    """The data rank of each rank of a mesh, which has a dimension for each of ``names``; the data are split over
    ``data``."""
    inner = [number for number, name in enumerate(names) if name not in data]
    order = [*(names.index(name) for name in data), *inner]
    groups = ranks.permute(order).reshape(-1, math.prod(ranks.shape[number] for number in inner)).tolist()
    numbers = {rank: number for number, group in enumerate(groups) for rank in group}
    return tuple(numbers[rank] for rank in sorted(numbers))


def data_dimensions(names: Collection[str]) -> list[str]:
    """Of the names of a mesh's dimensions, those over which the data are split."""
    return [name for name in (REPLICATE, SHARD) if name in names]


def meshes_like(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of this rank's ``mesh``, and of those that the other ranks have in its place, if it is a part of a
    larger one: shape (number of meshes, ``*mesh.shape``). Equal on all ranks."""
    if not hasattr(mesh, "_rank_map"):  # torch before 2.10
        if mesh.size() < collectives.world_size():
            raise ConfigurationError(
                f"{mesh} is a part of a larger mesh; to save tensors on it, use torch 2.10 or newer"
            )
        return mesh.mesh.unsqueeze(0)
    return mesh._layout.remap_to_tensor(mesh._rank_map)


def build_layout(parallel: Setting, device: torch.device) -> Layout:
    """Build the mesh of a checked ``parallel`` setting. Collective. Raises ConfigurationError if the modes' sizes do
    not fit the number of ranks, or a mesh is not of all ranks."""
    modes = modes_of(parallel)
    if (given := Layout._without_sizes(modes)) is not None:
        return given
    dimensions = mesh_dimensions(modes, collectives.world_size())
    if collectives.world_size() == 1:
        return Layout.flat()
    mesh = init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    return Layout.of_mesh(mesh, data_dimensions(dimensions))


def layout_of_own_loop(parallel: Setting) -> Layout:
    """The layout of a hand-written loop, whose author has spread the model. Raises ConfigurationError for modes that
    only a Trainer carries out."""
    modes = modes_of(parallel)
    if any(isinstance(mode, Pipeline) for mode in modes):
        raise ConfigurationError(
            f"parallel={text_of(parallel)}: only a Trainer runs a pipeline's forward and backward passes; in a loop "
            "around dalsegno.Run, use another mode"
        )
    if any(isinstance(mode, TensorParallel) for mode in modes):
        raise ConfigurationError(
            f"parallel={text_of(parallel)}: a loop around dalsegno.Run spreads its model itself; spread it, and pass "
            "parallel=Parallelized(mesh, data=…), which names the dimensions over which the data are split"
        )
    return Layout._without_sizes(modes) or Layout.flat()


# --- what determines the order of sums, and so their last bits, without being a setting -----------------------------


def environment_of(device: torch.device, layout: Layout) -> dict[str, Any]:
    values = {"world_size": collectives.world_size(), "torch": str(torch.__version__)}
    if layout.mesh is not None:
        values["mesh"] = layout.dimensions
    if device.type != "cpu":
        return {**values, "processor": accelerator.name_of(device)}
    # the instructions for which torch chooses its kernels: AVX2, AVX512, …
    processor = str(torch.backends.cpu.get_cpu_capability())
    return {**values, "processor": processor, "threads": torch.get_num_threads()}
