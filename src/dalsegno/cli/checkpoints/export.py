"""Write a checkpoint's model as plain safetensors, for inference or other programs.

FOLDER then holds model.safetensors, or for a larger model several files with model.safetensors.index.json: what
transformers' from_pretrained and safetensors.torch.load_file read. Memory holds one tensor at a time. The checkpoint is
verified first; of a run, the newest one that verifies is taken, or with --best the one with the best evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_json, add_place


def describe(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_place(parser)
    parser.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="where to; must not hold a model yet")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="split a larger model into files of up to this size; default: %(default)s",
    )
    parser.add_argument(
        "--config-from", metavar="FOLDER", type=Path, help="copy config.json, tokenizer and the like from there"
    )
    parser.add_argument(
        "--best", action="store_true", help="of a run, the checkpoint with the best evaluation, not the newest one"
    )
    parser.add_argument(
        "--average", metavar="NAME", help="the averages of this callback, say EMA, in place of the trained weights"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        NotFound: if there is no checkpoint, none of the best evaluation, or no configuration.
        UnknownName: if there are no such averages in it.
        DamagedCheckpoint: if it does not verify.
        ConfigurationError: if the size is none, or there is a model in the folder already.
    """
    from dalsegno.checkpoint.interchange.export import export_model
    from dalsegno.cli.tables import number, print_json, size

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
            }
        )
        return 0
    print(f"{done.checkpoint}: {number(done.tensors)} tensors, {size(done.size)}")
    for path in (*done.files, *done.copied):
        print(f"  {path}")
    for alias, name in done.tied.items():
        print(f"{alias} is tied to {name}, and written once")
    for name in done.left_out:
        print(f"{name} is no tensor, and left out")
    return 0
