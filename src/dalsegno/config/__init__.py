"""Config: build callbacks and whole runs from a file. A configuration names the user's code; it contains none.

Nothing in a file is evaluated. Every name and argument is checked against the annotations of its target before the
first callback is built::

    trainer = "my_training:build"
    callbacks = [{use = "JsonLogger", run = "baseline"}, {use = "my_pkg.hooks:Beat", every = 10}]

    [args]
    output_dir = "runs/a"
    max_steps = 1000
"""

from __future__ import annotations

from dalsegno.config.document import is_configuration, read_assignments
from dalsegno.config.registry import load_callbacks
from dalsegno.config.signature import describe, prose, summary

from .registry import NamedCallback, find_callback, named_callbacks
from .run_config import Factory, RunConfig
from .signature import Argument, Signature, signature_of

__all__ = [
    "Argument",
    "Factory",
    "NamedCallback",
    "RunConfig",
    "Signature",
    "describe",
    "find_callback",
    "is_configuration",
    "load_callbacks",
    "named_callbacks",
    "prose",
    "read_assignments",
    "signature_of",
    "summary",
]
