"""What takes long only the first time in a process: done once, before ranks are forked, rather than in each of them.

torch, abc, inspect and PEFT keep what they have found out: the decompositions of an operator, the lines of a file in a
traceback, the classes that are subclasses, the modules of files, the names of all models' weights. A rank under FSDP
begins with it and takes two thirds of the time. Nothing that is kept has to do with the ranks themselves: what torch
keeps for a mesh is never found again, as no mesh of theirs has this name.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import dalsegno as ds
from dalsegno.testing import TinyRegression, tiny_regression_data


def seed_without_stacks() -> None:
    """``torch.manual_seed`` formats its caller's stack for each kind of accelerator, in case that one fails later."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


def rehearse() -> None:
    """Without a thread and without a backward pass: after these, autograd refuses to work in forked processes."""
    with torch.random.fork_rng():
        _update_of_shards()
        _trainer()
        _stack()
        if "peft" in sys.modules:
            _adapter()


def _update_of_shards() -> None:
    """One rank of two, alone: its collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("rehearsal",)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.destroy_process_group()


def _trainer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = ds.TrainingArguments(Path(folder), use_cpu=True, disable_tqdm=True)
        ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data())


def _adapter() -> None:
    from peft import LoraConfig, get_peft_model

    from support.languages import llama

    get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))


def _stack() -> None:
    """torch's rendezvous asks for ``inspect.stack()`` with each message.

    A frame of no file, such as one of an ``exec``, is looked for in all modules each time: note that none has it.
    """
    for frame, _ in traceback.walk_stack(None):
        if inspect.getmodule(frame) is None:
            inspect.modulesbyfile[frame.f_code.co_filename] = "none"  # type: ignore[attr-defined]
