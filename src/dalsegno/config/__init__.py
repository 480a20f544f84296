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

from typing import TYPE_CHECKING

from dalsegno.system.imports import lazy_exports

if TYPE_CHECKING:
    from .document import is_configuration as is_configuration
    from .document import read_assignments as read_assignments
    from .registry import NamedCallback as NamedCallback
    from .registry import find_callback as find_callback
    from .registry import load_callbacks as load_callbacks
    from .registry import named_callbacks as named_callbacks
    from .run_config import Factory as Factory
    from .run_config import RunConfig as RunConfig
    from .signature import Argument as Argument
    from .signature import Signature as Signature
    from .signature import describe as describe
    from .signature import prose as prose
    from .signature import signature_of as signature_of
    from .signature import summary as summary
else:
    __getattr__, __dir__ = lazy_exports(__name__)
