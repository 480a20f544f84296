"""Parallel modes: what ``TrainingArguments(parallel=…)`` accepts, and the mesh that the ranks form by it.

A mode describes; :mod:`dalsegno.distributed.parallel` carries it out. Names of mesh dimensions are torchtitan's:
``dp_replicate`` and ``dp_shard`` over which the data are split, ``tp`` whose ranks read the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from dalsegno.errors import ConfigurationError, expect_known
from dalsegno.policies import Policy, read_policies

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

STAGES, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"
"""Dimensions of a mesh, outermost first: neighbouring ranks, which share a host, exchange the most."""

NAMES = ("auto", "none", "ddp", "fsdp")


class Mode(Policy):
    """Base of the modes, which are dataclasses."""

    __slots__ = ()


@dataclass(frozen=True, repr=False)
class DDP(Mode):
    """A copy of the model on each rank (DistributedDataParallel).

    Composes with TensorParallel and Pipeline, in a list: a copy of their part of the model on each group of ranks.
    """


@dataclass(frozen=True, repr=False)
class FSDP(Mode):
    """Parameters, gradients and optimizer state sharded over the ranks: FSDP2, ``fully_shard``."""

    mp_policy: MixedPrecisionPolicy | None = field(default=None, kw_only=True)
    """Dtypes of gathered parameters and reduced gradients. None: those of the parameters; with ``bf16=True``, bfloat16
    and float32."""
    reshard_after_forward: bool | int | None = field(default=None, kw_only=True)
    """Whether to free gathered parameters after the forward pass, and gather them again in the backward pass; a number
    of ranks to shard them over meanwhile. None: free them, except those of the root."""
    units: str | Sequence[str] | None = field(default=None, kw_only=True)
    """Names of the modules that are gathered one at a time, with ``*`` for any part: ``"layers.*"``. None: each element
    of a ``ModuleList`` or ``Sequential``."""

    def __post_init__(self) -> None:
        if self.units is not None:
            listed = self.units if isinstance(self.units, Iterable) else ()
            units = listed if isinstance(listed, str) else tuple(listed)
            if not units or not all(isinstance(each, str) for each in units):
                raise ConfigurationError(f"units={self.units!r}; needs names of modules, such as 'layers.*'")
            object.__setattr__(self, "units", units)
        shards = self.reshard_after_forward
        if not (shards is None or isinstance(shards, bool) or (isinstance(shards, int) and shards > 0)):
            raise ConfigurationError(f"reshard_after_forward={shards!r}; needs True, False, or a number of ranks")


@dataclass(frozen=True, repr=False)
class HSDP(FSDP):
    """FSDP within each of ``replicate`` groups of ranks, which average their gradients."""

    replicate: int
    """Number of groups. Each group's ranks hold the whole model between them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect_size("HSDP: replicate", self.replicate)


@dataclass(frozen=True, repr=False)
class TensorParallel(Mode):
    """Layers split over ``size`` neighbouring ranks, which read the same data (``torch.distributed.tensor.parallel``).

    Composes, in a list, with FSDP, HSDP or DDP: the parts of each layer are then sharded over the other ranks, or
    copied; and with Pipeline: the layers of each stage are split.
    """

    plan: str | Mapping[str, ParallelStyle] = "auto"
    """Style of each split module by its name, with ``*`` for any part: ``{"layers.*.up": ColwiseParallel()}``.
    ``"auto"``: the model's own plan, of Hugging Face models."""
    size: int | None = None
    """Number of ranks. None: all; needed in a composition."""

    def __post_init__(self) -> None:
        if self.size is not None:
            _expect_size("TensorParallel: size", self.size)
        if self.plan != "auto" and not (isinstance(self.plan, Mapping) and self.plan):
            raise ConfigurationError(
                f"TensorParallel: plan={self.plan!r}; needs a style for each module, "
                "{'layers.*.up': ColwiseParallel(), …}, or 'auto' for the model's own plan"
            )

    def __repr__(self) -> str:
        styles = (
            self.plan if isinstance(self.plan, str) else {name: type(each).__name__ for name, each in self.plan.items()}
        )
        return f"TensorParallel({styles!r}" + (")" if self.size is None else f", size={self.size})")


@dataclass(frozen=True, repr=False)
class Pipeline(Mode):
    """A model cut into stages, each on other ranks (``torch.distributed.pipelining``).

    Composes, in a list, with FSDP, HSDP or DDP: each stage is then sharded over the ranks that read different data, or
    copied; and with TensorParallel, which splits the layers of each stage.
    """

    stages: int | Sequence[str] | Sequence[Sequence[str]] | Callable[[nn.Module], Any]
    """How many: the model's longest list of layers is shared out evenly. Or names of the modules at which the second,
    third, … stage begins. Or the names of each stage's modules, in the order in which the forward calls them. Or a
    function that returns one of these for the model."""
    schedule: str = "1f1b"
    """Order of the forward and backward passes: ``gpipe``, ``1f1b``; or, with several stages on each rank,
    ``interleaved`` (1F1B), ``looped_bfs``, ``interleaved_zero_bubble``."""
    microbatches: int = 1
    """Parts of equal size into which each batch is split. A step runs ``gradient_accumulation_steps`` times as many."""
    size: int | None = None
    """Number of ranks with different stages. None: as many as there are stages; for schedules with several stages on
    each rank, and for stages that a function decides, all ranks."""

    def __post_init__(self) -> None:
        given = self.stages
        if not (isinstance(given, int) or callable(given)):
            listed = [*given] if isinstance(given, Iterable) and not isinstance(given, str) else []
            nested = tuple(
                each if isinstance(each, str) else tuple(each) if isinstance(each, Iterable) else (each,)
                for each in listed
            )
            are_names = all(isinstance(name, str) for each in nested for name in each)
            object.__setattr__(self, "stages", nested if are_names and len({*map(type, nested)}) == 1 else ())
        if not callable(self.stages) and self.count < 2:
            raise ConfigurationError(
                f"Pipeline: stages={given!r}; give a number of at least 2, a list of the names of the modules at "
                "which the second, third, … stage begins, or for each stage a list of the names of its modules"
            )
        _expect_size("Pipeline: microbatches", self.microbatches)
        expect_known("schedule of Pipeline:", [self.schedule], (*SINGLE_STAGE, *SEVERAL_STAGES))
        if self.size is not None:
            _expect_size("Pipeline: size", self.size)

    def __repr__(self) -> str:
        shown = super().__repr__()
        if not callable(self.stages):
            return shown
        name = getattr(self.stages, "__qualname__", type(self.stages).__name__)  # the same in every process
        return shown.replace(repr(self.stages), name)

    def of_model(self, model: nn.Module) -> Self:
        """Return the pipeline with stages that are a number or names: what their function returns for ``model``."""
        return replace(self, stages=self.stages(model)) if callable(self.stages) else self

    @property
    def count(self) -> int:
        """Number of stages, unless a function decides."""
        assert not callable(self.stages), "of_model() calls it"
        if isinstance(self.stages, int):
            return self.stages
        begins = bool(self.stages) and all(isinstance(each, str) for each in self.stages)
        return len(self.stages) + begins

    def ranks(self, of: int) -> int:
        """Number of ranks with different stages, ``of`` all ranks of a job. Raises ConfigurationError if the schedule
        cannot run the stages on so many."""
        if callable(self.stages):  # checked when there is a model
            return self.size or of
        ranks = self.size or (self.count if self.schedule in SINGLE_STAGE else of)
        if self.schedule in SINGLE_STAGE and ranks != self.count:
            raise ConfigurationError(
                f"{self}: {self.count} stages for {ranks} ranks, but this schedule has one stage on each rank; use "
                f"{ranks} stages, or schedule='interleaved' with a multiple of {ranks}"
            )
        if self.schedule in SEVERAL_STAGES and (self.count % ranks or self.count == ranks):
            raise ConfigurationError(
                f"{self}: {self.count} stages for {ranks} ranks, but this schedule has several stages on each rank; "
                f"use {2 * ranks} stages or another multiple of {ranks}, or schedule='1f1b' with {ranks}"
            )
        return ranks


SINGLE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank."""
SEVERAL_STAGES = ("interleaved", "looped_bfs", "interleaved_zero_bubble")
"""Schedules with several stages on each rank."""


@dataclass(frozen=True, repr=False)
class Parallelized(Mode):
    """The model as you have spread it, over a mesh of your own.

    Your code reduces the gradients in the backward pass, to their mean over the data ranks.
    """

    mesh: DeviceMesh
    """Over all ranks, with names of its dimensions."""
    data: str | Sequence[str] = ("dp",)
    """Dimensions over which the data are split. Ranks that differ in other dimensions only read the same data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", (self.data,) if isinstance(self.data, str) else tuple(self.data))

    def __repr__(self) -> str:
        shape, names = self.mesh.shape, self.mesh.mesh_dim_names
        sizes = ", ".join(map(str, shape) if names is None else map("{}={}".format, names, shape))
        return f"Parallelized({sizes}; data={'·'.join(self.data)})"


def _expect_size(what: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{what}={size!r}; needs a number of at least 1")


Setting = str | Mode | Sequence["str | Mode"]
"""A value of ``TrainingArguments(parallel=…)``: a name, a mode, or several that are composed."""


def checked(setting: Any) -> str | Mode | tuple[Mode, ...]:
    """Return a name as it is, else the modes that ``setting`` stands for; text such as ``HSDP(replicate=2)`` is
    parsed."""
    if (isinstance(setting, str) and setting in NAMES) or isinstance(setting, Mode):
        return setting
    several = [setting] if isinstance(setting, str) else setting
    if not isinstance(several, Iterable):
        raise _not_a_mode(setting)
    modes = tuple(mode for each in several for mode in _parsed(each))
    _check_composition(modes)
    return modes[0] if isinstance(setting, str) and len(modes) == 1 else modes


def modes_of(setting: Setting) -> tuple[Mode, ...]:
    """The modes of a checked setting; none for ``none``."""
    if isinstance(setting, str):
        return {"none": (), "fsdp": (FSDP(),)}.get(setting, (DDP(),))
    return (setting,) if isinstance(setting, Mode) else tuple(setting)  # type: ignore[arg-type]


def parts_of_batch(setting: Setting) -> int:
    """Number of micro-batches into which each batch of the loader is split."""
    return next((mode.microbatches for mode in modes_of(setting) if isinstance(mode, Pipeline)), 1)


def text_of(setting: Setting) -> str | list[str]:
    """The setting as text, for JSON."""
    return str(setting) if isinstance(setting, (str, Mode)) else [str(each) for each in setting]


def mesh_dimensions(modes: Sequence[Mode], ranks: int) -> dict[str, int]:
    """Sizes of the mesh's dimensions by name, outermost first."""
    pipeline = next((mode for mode in modes if isinstance(mode, Pipeline)), None)
    tensor = next((mode for mode in modes if isinstance(mode, TensorParallel)), None)
    data = next((mode for mode in modes if isinstance(mode, (DDP, FSDP))), None)
    parts = 1 if tensor is None else tensor.size or ranks
    stages = 1 if pipeline is None else pipeline.ranks(of=max(ranks // parts, 1))
    replicate = data.replicate if isinstance(data, HSDP) else 1
    groups, rest = divmod(ranks, stages * replicate * parts)
    if rest or not groups:
        sizes = " · ".join(str(each) for each in (stages, replicate, parts) if each > 1)
        raise ConfigurationError(
            f"parallel={text_of(tuple(modes))}: {sizes} does not divide the {ranks} ranks of this job; start a "
            f"multiple of {stages * replicate * parts} ranks, or choose sizes whose product divides {ranks}"
        )
    if data is None and groups > 1:
        shown = ", ".join(map(str, modes))
        raise ConfigurationError(
            f"parallel={shown}: leaves {groups} groups of ranks with different data and no mode that "
            f"averages their gradients; compose it, parallel=[{shown}, FSDP()], or use all {ranks} ranks"
        )
    dimensions = {} if pipeline is None else {STAGES: stages}
    if isinstance(data, DDP):
        dimensions |= {REPLICATE: groups, SHARD: 1}
    elif data is not None:
        dimensions |= {REPLICATE: replicate} if isinstance(data, HSDP) else {}
        dimensions |= {SHARD: groups}
    return dimensions | ({} if tensor is None else {TENSOR: parts})


def _parsed(each: object) -> list[Mode]:
    if isinstance(each, Mode):
        return [each]
    if not isinstance(each, str):
        raise _not_a_mode(each)
    if each in ("ddp", "fsdp"):
        return [*modes_of(each)]
    if "(" not in each:
        raise _not_a_mode(each)
    return read_policies(each, [DDP, FSDP, HSDP, TensorParallel, Pipeline])


def _not_a_mode(value: object) -> ConfigurationError:
    return ConfigurationError(
        f"parallel={value!r}; allowed are {', '.join(map(repr, NAMES))}, FSDP(…), HSDP(…), TensorParallel(…), "
        "Pipeline(…), Parallelized(…), or a list of them"
    )


def _check_composition(modes: Sequence[Mode]) -> None:
    kinds = ["data" if isinstance(mode, (DDP, FSDP)) else type(mode).__name__ for mode in modes]
    composable = {"data", TensorParallel.__name__, Pipeline.__name__}
    if not modes or len({*kinds}) < len(kinds) or (len(kinds) > 1 and not {*kinds} <= composable):
        raise ConfigurationError(
            f"parallel={[*modes]}: these cannot be composed; TensorParallel and Pipeline can, with each other and with "
            "one of FSDP, HSDP and DDP"
        )
    if len(modes) > 1 and any(isinstance(m, Pipeline) and callable(m.stages) and m.size is None for m in modes):
        raise ConfigurationError(
            f"parallel={[*modes]}: Pipeline needs size= here, the number of ranks with different stages; the others "
            "share each stage"
        )
    if len(modes) > 1 and any(isinstance(mode, TensorParallel) and mode.size is None for mode in modes):
        raise ConfigurationError(
            f"parallel={[*modes]}: TensorParallel needs size= here, the number of ranks that split each layer; the "
            "others share its parts"
        )
