"""DumpActivations: writes modules' outputs to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dalsegno.callbacks.argument_checks import folder, pattern, whole
from dalsegno.data.loader import tensors_in
from dalsegno.distributed import collectives
from dalsegno.distributed.sharded_tensors import dense, strip_wrappers
from dalsegno.distributed.stage_places import expect_whole
from dalsegno.errors import ConfigurationError
from dalsegno.events import FlaglessCallback, contexts


class DumpActivations(FlaglessCallback):
    """Writes the output of every module in training's forward passes to safetensors files.

    ``<outdir>/rank-00000/steps-00000001-00000010.safetensors`` holds the tensors of ten steps, under
    ``step-00000003/microbatch-0/<module>``; further tensors of a module are ``<module>#1`` and so on. A checkpoint ends
    a file, too. Needs CPU memory for all activations of ``buffer_steps`` steps, and waits for the device at each
    module: for debugging.

    Args:
        outdir: directory, relative to ``output_dir``.
        buffer_steps: number of steps in one file.
        modules: regular expression, searched in modules' names; modules that do not match are left out. None: all.
    """

    def __init__(self, outdir: str | Path = "activations", buffer_steps: int = 1, modules: str | None = None) -> None:
        self._outdir = folder("DumpActivations", "outdir", outdir)
        self._buffer_steps = whole("DumpActivations", "buffer_steps", buffer_steps)
        self._wanted = None if modules is None else pattern("DumpActivations", "modules", modules)
        self._folder = Path()
        self._handles: list[RemovableHandle] = []
        self._kept: dict[str, Tensor] = {}
        self._steps: list[int] = []
        self._prefix = ""  # step and micro-batch; empty outside of micro-batches

    def on_train_begin(self, ctx: contexts.TrainBeginContext) -> None:
        expect_whole(ctx.model, "DumpActivations", "whose micro-batches alternate in the modules")
        self._folder = ctx.args.directory / self._outdir / f"rank-{collectives.rank():05d}"
        self._kept, self._steps, self._prefix = {}, [], ""
        for name, module in ctx.model.named_modules():
            if self._wanted is None or self._wanted.search(strip_wrappers(name)):
                self._handles.append(module.register_forward_hook(self._keeping(strip_wrappers(name) or "model")))
        if self._wanted is not None and not self._handles:
            raise ConfigurationError(f"DumpActivations: no module's name matches modules={self._wanted.pattern!r}")

    def on_microbatch_begin(self, ctx: Any) -> None:
        self._prefix = f"step-{ctx.state.global_step + 1:08d}/microbatch-{ctx.index}"

    def on_microbatch_end(self, ctx: contexts.Context) -> None:
        self._prefix = ""

    def on_step_end(self, ctx: contexts.StepEndContext) -> None:
        self._steps.append(ctx.step)
        if len(self._steps) == self._buffer_steps:
            self._write()

    def on_before_save(self, ctx: contexts.BeforeSaveContext) -> None:
        """End the file, so that a leg that resumes from this checkpoint begins a new one, with no step in two files."""
        if self._steps:
            self._write()

    def on_rollback(self, ctx: contexts.RollbackContext) -> None:
        self._kept, self._steps = {}, []

    def on_train_end(self, ctx: contexts.TrainEndContext) -> None:
        while self._handles:
            self._handles.pop().remove()
        if self._steps:
            self._write()
        self._kept = {}

    def _keeping(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, outputs: Any) -> None:
            if self._prefix and torch.is_grad_enabled():
                for tensor in tensors_in(outputs):
                    key = self._free(f"{self._prefix}/{name}")
                    self._kept[key] = dense(tensor.detach()).to("cpu", copy=True).contiguous()

        return keep

    def _free(self, key: str) -> str:
        number = 0
        while (numbered := f"{key}#{number}" if number else key) in self._kept:
            number += 1
        return numbered

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._steps[0]:08d}-{self._steps[-1]:08d}.safetensors"
        temporary = path.with_name(f".{path.name}.tmp")
        save_file(self._kept, temporary)
        temporary.replace(path)
        self._kept, self._steps = {}, []
