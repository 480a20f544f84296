"""Resumable data: sample order, datasets and loaders, and the position that a run has reached in them.

A run iterates a :class:`ResumableLoader` of :class:`Microbatch` es. :func:`train_loader` builds it from a dataset,
:func:`resumable_loader` from a loader. docs/reference/data.md lists which kinds of data resume exactly, and how.
"""

from .fingerprint import TrainingData, check_same_length
from .loader import NOT_EXACT, Microbatch, ResumableLoader, sample_count, to_device
from .mixture import Mixture
from .sampler import ResumableSampler
from .sources import EvalBatches, EvalLoader, eval_loader, resumable_eval_loader, resumable_loader, train_loader

__all__ = [
    "NOT_EXACT",
    "EvalBatches",
    "EvalLoader",
    "Microbatch",
    "Mixture",
    "ResumableLoader",
    "ResumableSampler",
    "TrainingData",
    "check_same_length",
    "eval_loader",
    "resumable_eval_loader",
    "resumable_loader",
    "sample_count",
    "to_device",
    "train_loader",
]
