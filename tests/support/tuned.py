"""Runs that begin with another run's parts. At the top of a module, so that ranks can import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dalsegno as ds
from dalsegno.checkpoint.tensor_files import StoredFile
from dalsegno.distributed import collectives
from dalsegno.events.table import Event
from dalsegno.testing import FaultPlan, tiny_regression_data
from support.listeners import Listener
from support.models import Tied
from support.small import arguments


def tuned(
    output_dir: Path, origin: Path, *callbacks: ds.Callback, heads: int = 1, kill_at: int | None = None, **how: Any
) -> dict[str, Any]:
    """Begin with the model at ``origin`` and train four steps; what was loaded, from how many elements, and the end."""
    if kill_at is not None:
        FaultPlan(event=Event.OPTIMIZER_STEP, count=kill_at).arm()
    torch.manual_seed(7)
    seen: dict[str, Any] = {"read": 0, "loads": []}

    def note(ctx: Any) -> None:
        seen["loads"].append((Path(ctx.path).name, ctx.step))
        seen["report"] = ctx.report
        seen["lr"] = [group["lr"] for group in ctx.optimizer.param_groups]
        if not seen.get("weights"):
            seen["weights"] = {name: whole(each) for name, each in ctx.model.state_dict().items()}

    fill = StoredFile.fill

    def counted(self: StoredFile, target: Tensor, *rest: Any) -> None:
        fill(self, target, *rest)
        seen["read"] += target.numel()

    StoredFile.fill = counted  # type: ignore[method-assign]
    args = arguments(
        output_dir,
        max_steps=4,
        save_steps=2,
        save_in_background=False,  # so that a kill finds the checkpoints that are due by then
        parallel=how.pop("parallel", "none"),
        lr_scheduler_type=how.pop("schedule", "linear"),
    )
    listener = Listener({"on_load": note}, name="listener")
    data = tiny_regression_data(16)
    trainer = ds.Trainer(Tied(heads), args, train_dataset=data, callbacks=[listener, *callbacks])
    for name in ("ProgressCallback", "InfoCallback", "DefaultMetrics"):
        trainer.remove_callback(name)
    settings = {"load_components": ("model",), **how}
    result = trainer.train(origin, **settings)
    StoredFile.fill = fill  # type: ignore[method-assign]
    return seen | {"steps": result.global_step, "rank": collectives.rank(), "trained": trainer.state.global_step}


def tuned_until(output_dir: Path, origin: Path, kill_at: int) -> None:
    tuned(output_dir, origin, kill_at=kill_at)


def tuned_in_parallel(output_dir: Path, origin: Path, parallel: str) -> dict[str, Any]:
    return tuned(output_dir, origin, parallel=parallel)


def whole(tensor: Tensor) -> Any:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone().numpy()
