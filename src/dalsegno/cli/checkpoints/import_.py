"""Turn a checkpoint of another program into one that a run here resumes from.

SOURCE is a folder "checkpoint-500" of Hugging Face's Trainer, a file .ckpt of Lightning, a folder of Accelerate's
save_state, of PyTorch's Distributed Checkpoint or of torchtitan, or a file of torch.save. OUTPUT_DIR becomes a run with
that one checkpoint and the log up to it: train() of a trainer with the same model, and with output_dir OUTPUT_DIR,
resumes from there. A table lists what was imported, and what was not and why.

Pickled files are read as data, by torch's restricted unpickler; a file that contains code is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.command import Parser
from dalsegno.cli.console import Column, number, print_json, print_table, size

if TYPE_CHECKING:
    from dalsegno.checkpoint.foreign.programs import Imported


def describe_import(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="folder or file of the other program")
    parser.add_argument(
        "-o",
        "--output-dir",
        metavar="OUTPUT_DIR",
        type=Path,
        required=True,
        help="of the new run; must not contain one",
    )
    parser.option(
        "--program",
        metavar="NAME",
        help="program that wrote it: hf, accelerate, dcp (also torchtitan), lightning or torch; default: recognized by "
        "its files",
    )
    parser.option("--step", metavar="N", type=int, help="finished optimizer steps, if the files do not contain it")
    parser.option(
        "--epoch", metavar="EPOCHS", type=float, help="passes over the data, say 1.25, if the files do not contain it"
    )
    parser.option(
        "--strip-prefix", metavar="PREFIX", default="", help="prefix that only the source has in the model's names"
    )
    parser.option(
        "--optimizer", metavar="CLASS", help="class of the optimizer, such as torch.optim.AdamW; default: inferred"
    )
    parser.json()


def import_run(arguments: argparse.Namespace) -> int:
    from dalsegno.checkpoint.foreign.programs import import_checkpoint

    done = import_checkpoint(
        arguments.source,
        arguments.output_dir,
        program=arguments.program,
        step=arguments.step,
        epoch=arguments.epoch,
        strip_prefix=arguments.strip_prefix,
        optimizer=arguments.optimizer,
    )
    rows = _rows(done)
    if arguments.json:
        print_json({"checkpoint": str(done.checkpoint), "program": done.run.program, "parts": rows})
        return 0
    print(f"{done.checkpoint}: step {done.run.step} of {done.run.program}")
    print_table([Column("part", "part"), Column("taken", "taken"), Column("detail", "")], rows)
    print(_next(done, arguments.output_dir))
    return 0


def _rows(done: Imported) -> list[dict[str, Any]]:
    run = done.run
    taken = {"model": f"{number(len(run.model))} tensors, {size(sum(each.nbytes for each in run.model.values()))}"}
    if (optimizer := run.optimizer) is not None:
        by = "position: the first run that resumes assigns them" if optimizer.is_by_position else "name"
        taken["optimizer"] = f"{optimizer.class_name}, {len(optimizer.groups)} groups, parameters by {by}"
    if run.schedulers:
        taken["learning rate schedule"] = ", ".join(f"at step {each.get('last_epoch', '?')}" for each in run.schedulers)
    if run.scaler is not None:
        taken["gradient scaler"] = f"scale {run.scaler.get('scale', '?')}"
    if run.random:
        taken["random generators"] = f"of {len(run.random)} ranks"
    if run.place.is_known:
        within = "" if run.place.microbatches is None else f", after {number(run.place.microbatches)} micro-batches"
        taken["place in the data"] = f"epoch {run.place.position:g}{within}"
    if run.records:
        taken["log"] = f"{number(len(run.records))} records"
    rows = [{"part": part, "taken": "yes", "detail": detail} for part, detail in taken.items()]
    return rows + [{"part": part, "taken": "no", "detail": why} for part, why in run.left_out.items()]


def _next(done: Imported, output_dir: Path) -> str:
    if done.can_resume:
        return f"train() with TrainingArguments({str(output_dir)!r}, …) continues at step {done.run.step}"
    return f'train("{done.checkpoint}", load_components=("model",)) begins a new run with these weights'
