"""Imports what the first trainer of a process would: for a process that ranks are forked from.

The first optimizer of a process imports torch._dynamo, which takes a second; the first trainer, all dialects.
"""

import torch._dynamo  # noqa: F401

import dalsegno.training.trainer  # noqa: F401
from dalsegno.events.adapters import installed_dialects

installed_dialects()
