"""Commands that exchange checkpoints with other programs: import, export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.cli.command import DIR, JSON, argument, command, flag, option
from dalsegno.cli.console import number, print_json, print_table, size, texts
from dalsegno.errors import ConfigurationError

if TYPE_CHECKING:
    from dalsegno.checkpoint.foreign.programs import Imported


@command(
    argument("source", metavar="SOURCE", type=Path, help="folder or file of the other program"),
    argument(
        "-o",
        "--output-dir",
        metavar="OUTPUT_DIR",
        type=Path,
        required=True,
        help="of the new run; must not contain one",
    ),
    option(
        "--program",
        metavar="NAME",
        help="program that wrote it: hf, accelerate, dcp (also torchtitan), lightning or torch; default: recognized by "
        "its files",
    ),
    option("--step", metavar="N", help="finished optimizer steps, if the files do not contain it"),
    option("--epoch", metavar="EPOCHS", help="passes over the data, say 1.25, if the files do not contain it"),
    option("--strip-prefix", metavar="PREFIX", default="", help="prefix that only the source has in the model's names"),
    option("--optimizer", metavar="CLASS", help="class of the optimizer, such as torch.optim.AdamW; default: inferred"),
    JSON,
)
def import_(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of another program into one that a run here resumes from.

    SOURCE is a folder "checkpoint-500" of Hugging Face's Trainer, a file .ckpt of Lightning, a folder of Accelerate's
    save_state, of PyTorch's Distributed Checkpoint or of torchtitan, or a file of torch.save. OUTPUT_DIR becomes a run
    with that one checkpoint: train() of a trainer with the same model, and with output_dir OUTPUT_DIR, resumes from
    there. A table lists what was imported, and what was not and why.

    Pickled files are read as data, by torch's restricted unpickler; a file that contains code is refused.
    """
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
    run, rows = done.run, _parts(done)
    if arguments.json:
        print_json({"checkpoint": str(done.checkpoint), "program": run.program, "parts": rows})
        return 0
    print(f"{done.checkpoint}: step {run.step} of {run.program}")
    print_table(texts(part="part", taken="taken", detail=""), rows)
    if done.can_resume:
        print(f"train() with TrainingArguments({str(arguments.output_dir)!r}, …) continues at step {run.step}")
    else:
        print(f'train("{done.checkpoint}", load_components=("model",)) begins a new run with these weights')
    return 0


def _parts(done: Imported) -> list[dict[str, Any]]:
    run = done.run
    taken = {"model": f"{number(len(run.model))} tensors, {size(sum(each.nbytes for each in run.model.values()))}"}
    if (optimizer := run.optimizer) is not None:
        by = "position: the first run that resumes assigns them" if optimizer.is_by_position else "name"
        taken["optimizer"] = f"{optimizer.class_name}, {len(optimizer.groups)} groups, parameters by {by}"
    if run.schedulers:
        taken["learning rate schedule"] = ", ".join(f"at step {each.get('last_epoch', '?')}" for each in run.schedulers)
    if run.place.is_known:
        within = "" if run.place.microbatches is None else f", after {number(run.place.microbatches)} micro-batches"
        taken["place in the data"] = f"epoch {run.place.position:g}{within}"
    rows = [{"part": part, "taken": "yes", "detail": detail} for part, detail in taken.items()]
    return rows + [{"part": part, "taken": "no", "detail": why} for part, why in run.left_out.items()]


@command(
    DIR,
    argument("--to", metavar="TARGET", type=Path, required=True, help="output directory; must not contain a model"),
    option(
        "--program", metavar="NAME", help="write what this program resumes from: hf or torch; TARGET must not exist"
    ),
    option("--max-shard-size", metavar="SIZE", default="5GB", help="largest size of one file, with its unit"),
    option("--config-from", metavar="FOLDER", help="directory to copy config.json, tokenizer files etc. from"),
    flag("--best", help="export the checkpoint with the best evaluation, not the newest"),
    option(
        "--average", metavar="NAME", help="export the averaged weights of this callback, say EMA, not the trained ones"
    ),
    flag("--adapters", help="export only the adapters, in the files of PEFT"),
    JSON,
)
def export(arguments: argparse.Namespace) -> int:
    """Write the model of a checkpoint as safetensors, or all of it in the files of another program.

    TARGET gets model.safetensors, or several shards with model.safetensors.index.json: the files that transformers'
    from_pretrained and safetensors.torch.load_file read. Memory holds one tensor at a time. The checkpoint is verified
    first; for a run, the newest checkpoint that verifies is exported, or with --best the one with the best evaluation.

    With --program, TARGET also gets optimizer, schedule and progress, so that the program trains on: a folder of
    Hugging Face's Trainer (hf), or a file of torch.save for any loop (torch). With --adapters, TARGET gets only the
    adapters of a PEFT model (LoRA), as PeftModel.from_pretrained reads them.
    """
    if arguments.program is not None:
        return _export_run(arguments)

    from dalsegno.checkpoint.export import export_adapters, export_model

    if arguments.adapters:
        done = export_adapters(arguments.place, arguments.to, average=arguments.average, best=arguments.best)
    else:
        done = export_model(
            arguments.place,
            arguments.to,
            max_shard_size=arguments.max_shard_size,
            config_from=arguments.config_from,
            average=arguments.average,
            best=arguments.best,
        )
    if arguments.json:
        print_json(
            {
                "checkpoint": str(done.checkpoint),
                "files": [str(path) for path in done.files],
                "size": done.size,
                "tensors": done.tensors,
                "tied": dict(done.tied),
                "left_out": done.left_out,
                "copied": [str(path) for path in done.copied],
                "wrapped": [*done.wrapped],
                "adapters": [*done.adapters],
            }
        )
        return 0
    print(f"{done.checkpoint}: {number(done.tensors)} tensors, {size(done.size)}")
    for path in (*done.files, *done.copied):
        print(f"  {path}")
    for alias, name in done.tied.items():
        print(f"{alias} is tied to {name} and written once")
    for name in done.left_out:
        print(f"{name} is not a tensor and is left out")
    if done.adapters:
        print(
            f"the model has adapters ({', '.join(done.adapters)}), so all names are peft's: load the files into a "
            "model that get_peft_model returns, or export the adapters alone (--adapters)"
        )
    if done.wrapped:
        names = ", ".join([*done.wrapped][:3]) + (", …" if len(done.wrapped) > 3 else "")
        print(f"quantized or wrapped ({number(len(done.wrapped))}): {names}; only the tensors inside them are written")
    return 0


def _export_run(arguments: argparse.Namespace) -> int:
    from dalsegno.checkpoint.foreign.programs import export_checkpoint

    for given, value in (("--average", arguments.average), ("--adapters", arguments.adapters)):
        if value:
            raise ConfigurationError(f"{given} is for the model alone; leave out --program")
    done = export_checkpoint(
        arguments.place,
        arguments.to,
        program=arguments.program,
        best=arguments.best,
        max_shard_size=arguments.max_shard_size,
        config_from=arguments.config_from,
    )
    if arguments.json:
        print_json(
            {
                "checkpoint": str(done.checkpoint),
                "program": done.program,
                "files": [str(path) for path in done.files],
                "left_out": dict(done.left_out),
            }
        )
        return 0
    print(f"{done.checkpoint}: for {done.program}")
    for path in done.files:
        print(f"  {path}")
    for part, why in done.left_out.items():
        print(f"{part} is left out: {why}")
    return 0
