"""Write the model of a checkpoint as safetensors, or all of it in the files of another program.

TARGET gets model.safetensors, or several shards with model.safetensors.index.json: the files that transformers'
from_pretrained and safetensors.torch.load_file read. Memory holds one tensor at a time. The checkpoint is verified
first; for a run, the newest checkpoint that verifies is exported, or with --best the one with the best evaluation.

With --program, TARGET also gets optimizer, schedule, random state and progress, so that the program trains on: a folder
of Hugging Face's Trainer (hf), of Accelerate's save_state (accelerate) or of PyTorch's Distributed Checkpoint (dcp), or
a file of Lightning (lightning) or of torch.save (torch). With --adapters, TARGET gets only the adapters of a PEFT model
(LoRA), as PeftModel.from_pretrained reads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dalsegno.cli.command import Parser
from dalsegno.cli.console import number, print_json, size
from dalsegno.errors import ConfigurationError

from .arguments import add_place


def describe_export(parser: Parser) -> None:
    add_place(parser)
    parser.add_argument(
        "--to", metavar="TARGET", type=Path, required=True, help="output directory; must not contain a model"
    )
    parser.option("--program", metavar="NAME", help="write what this program resumes from; TARGET must not exist")
    parser.option(
        "--add-prefix", metavar="PREFIX", default="", help="with --program: prefix of the model's names there"
    )
    parser.option("--max-shard-size", metavar="SIZE", default="5GB", help="largest size of one file, with its unit")
    parser.option(
        "--config-from", metavar="FOLDER", type=Path, help="directory to copy config.json, tokenizer files etc. from"
    )
    parser.flag("--best", help="export the checkpoint with the best evaluation, not the newest")
    parser.option(
        "--average", metavar="NAME", help="export the averaged weights of this callback, say EMA, not the trained ones"
    )
    parser.flag("--adapters", help="export only the adapters, in the files of PEFT")
    parser.json()


def export(arguments: argparse.Namespace) -> int:
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
    if done.wrapped:
        names = ", ".join([*done.wrapped][:3]) + (", …" if len(done.wrapped) > 3 else "")
        print(f"quantized or wrapped ({number(len(done.wrapped))}): {names}; only the tensors inside them are written")
    return 0


def _export_run(arguments: argparse.Namespace) -> int:
    from dalsegno.checkpoint.foreign.programs import export_checkpoint

    for option, value in (("--average", arguments.average), ("--adapters", arguments.adapters)):
        if value:
            raise ConfigurationError(f"{option} is for the model alone; leave out --program")
    done = export_checkpoint(
        arguments.place,
        arguments.to,
        program=arguments.program,
        best=arguments.best,
        add_prefix=arguments.add_prefix,
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
