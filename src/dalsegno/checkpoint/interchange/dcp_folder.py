"""A folder of PyTorch's Distributed Checkpoint (DCP), such as torchtitan's ``step-500``.

::

    .metadata                        a pickle: names, shapes, and where each chunk is
    __0_0.distcp  __1_0.distcp  …    chunks and other items, each a pickle of torch.save

torchtitan saves the model's tensors under their own names, beside ``optimizer``, ``lr_scheduler``, ``dataloader`` and
``train_state``; other programs as they like, mostly ``model`` and ``optimizer``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dalsegno.errors import ConfigurationError

from . import pickles
from .pickles import Unpickled
from .reading import ReadOptions
from .run_state import RunState
from .torch_file import NO_PLACE, progress_of, run_of_dicts
from .writing import WriteOptions, Written, only_first, state_dict

PROGRAM = "Distributed Checkpoint (DCP)"
_TORCHTITAN = "torchtitan"
_PROGRESS = "train_state"


def is_at(path: Path) -> bool:
    return (path / ".metadata").is_file()


def read(path: Path, options: ReadOptions) -> RunState:
    """
    Raises:
        StateMismatch: if the folder contains more than data.
        ConfigurationError: if it contains no model, or neither the folder nor the options know step or optimizer class.
    """
    unpickled = pickles.read({"file": path}, program="dcp_process")
    content = dict(unpickled.content["file"])
    if isinstance(optimizer := content.get("optimizer"), Mapping):
        content["optimizer"] = _nested(optimizer) if "state" not in optimizer else _with_numbers(optimizer)
    program = PROGRAM
    if isinstance(progress := content.pop(_PROGRESS, None), Mapping):
        program = _TORCHTITAN
        content["step"] = int(progress["step"])
    return run_of_dicts(program, Unpickled({"file": content}, unpickled.dropped), options, path)


def write(run: RunState, target: Path, options: WriteOptions) -> Written:
    """A folder for ``dcp.load``: ``model``, ``optimizer`` by name, and what a file of torch.save has besides.

    Raises:
        ConfigurationError: if the optimizer's parameters have no names yet.
    """
    parts = {"model": state_dict(run, options.add_prefix), **progress_of(run)}
    if run.optimizer is not None:
        if run.optimizer.is_by_position:
            raise ConfigurationError(
                "the optimizer's parameters have only positions, as imported; DCP needs names, which the first "
                "checkpoint of a run that resumes here has"
            )
        parts["optimizer"] = run.optimizer.renamed(lambda name: f"{options.add_prefix}{name}").by_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves
        dcp_save(parts, checkpoint_id=target, no_dist=True)
    return sorted(target.iterdir()), NO_PLACE | only_first(run)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``state.<fqn>.<kind>`` and ``param_groups.<fqn>.<key>`` as a ``state_dict``: one group for equal values."""
    state: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        part, _, rest = name.partition(".")
        fqn, _, kind = rest.rpartition(".")
        if fqn:
            (state if part == "state" else values).setdefault(fqn, {})[kind] = value
    groups: dict[str, dict[str, Any]] = {}
    for fqn, its in values.items():
        groups.setdefault(repr(sorted(its.items())), {**its, "params": []})["params"].append(fqn)
    return {"state": state, "param_groups": list(groups.values())}


def _with_numbers(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """DCP makes texts of the numbers of parameters."""
    state = {int(key) if str(key).isdecimal() else key: each for key, each in optimizer["state"].items()}
    return {**optimizer, "state": state}
