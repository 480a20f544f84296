"""Uploads of models: the ``checkpoint-<step>`` folder that Hugging Face's integrations read in ``on_save``.

A checkpoint of dalsegno's has another layout and place. So for a callback that uploads checkpoints, its model is
exported under Hugging Face's names while the callback's ``on_save`` runs, on rank 0, and removed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from dalsegno.checkpoint import export_model
from dalsegno.errors import ConfigurationError
from dalsegno.events.contexts import Context, SaveContext
from dalsegno.system import filesystem

from .shared_state import SharedState

_MARK = "dalsegno.json"
"""File that distinguishes a folder made here from a checkpoint of Hugging Face's Trainer."""

_UPLOADS: Mapping[str, Callable[[Any], object]] = {
    "WandbCallback": lambda callback: callback._log_model == "checkpoint",
    "MLflowCallback": lambda callback: callback._log_artifacts,
    "ClearMLCallback": lambda callback: callback._log_model,
    "FlyteCallback": lambda callback: callback.sync_checkpoints,
    "NeptuneCallback": lambda callback: callback._log_checkpoints,
}
"""By the class's name, whether an integration uploads checkpoints. Most decide in ``on_train_begin``."""


def uploads_checkpoints(callback: object) -> bool:
    """Whether ``callback`` reads ``checkpoint-<step>``: by its settings, or else by the code of its ``on_save``."""
    for cls in type(callback).__mro__:
        if cls.__name__ in _UPLOADS and cls.__module__.startswith("transformers."):
            return bool(_UPLOADS[cls.__name__](callback))
    code = getattr(getattr(type(callback), "on_save", None), "__code__", None)
    return code is not None and ("checkpoint-" in code.co_consts or "PREFIX_CHECKPOINT_DIR" in code.co_names)


@contextmanager
def checkpoint_view(ctx: SaveContext, shared: SharedState) -> Iterator[None]:
    """Have ``checkpoint-<step>`` below ``output_dir``: weights, configuration, tokenizer and ``trainer_state.json``."""
    folder = ctx.args.directory / f"checkpoint-{ctx.step}"
    if folder.exists():
        if not (folder / _MARK).exists():
            raise ConfigurationError(
                f"{folder}: exists already, and a callback would upload it as this run's; move it away"
            )
        filesystem.remove(folder)  # of a leg that was killed during an upload
    filesystem.make_directory(folder)
    try:
        filesystem.replace_durably(folder / _MARK, json.dumps({"made_from": ctx.path.name}).encode())
        export_model(ctx.path, folder)
        for each in (getattr(ctx.model, "config", None), getattr(ctx.model, "generation_config", None)):
            _save_pretrained(each, folder)
        _save_pretrained(ctx.processing_class, folder)
        shared.state_at(ctx.state).save_to_json(str(folder / "trainer_state.json"))
        yield
    finally:
        filesystem.remove(folder)


def _save_pretrained(part: Any, folder: Path) -> None:
    if callable(save := getattr(part, "save_pretrained", None)):
        save(str(folder))


def check_uploads(callback: Any, context: Context) -> None:
    """Raises ConfigurationError for a callback that uploads the final model in a way that cannot work here."""
    names = {cls.__name__ for cls in type(callback).__mro__ if cls.__module__.startswith("transformers.")}
    export = "dalsegno.checkpoint.export_model(result.checkpoint, folder)"
    if "DVCLiveCallback" in names and callback._log_model is True:
        raise ConfigurationError(
            "DVCLiveCallback(log_model=True): builds Hugging Face's Trainer at the end of training, which needs "
            f"arguments of its own class; use log_model='all', or log a folder made by {export}"
        )
    is_sharded = any(isinstance(parameter, DTensor) for parameter in context.model.parameters())
    if "WandbCallback" in names and callback._log_model.value != "false" and is_sharded:
        raise ConfigurationError(
            f"WANDB_LOG_MODEL={callback._log_model.value}: saves the model from rank 0's memory at the end, "
            f"where a sharded model is not whole; unset it, and log a folder made by {export}"
        )
