"""Resumable data: sample order, datasets and loaders, and the position that a run has reached in them.

A run iterates a :class:`ResumableLoader` of :class:`Microbatch` es. :func:`train_loader` builds it from a dataset,
:func:`resumable_loader` from a loader. docs/reference/data.md lists which kinds of data resume exactly, and how.
"""

from .fingerprint import TrainingData as TrainingData
from .fingerprint import check_same_length as check_same_length
from .loader import NOT_EXACT as NOT_EXACT
from .loader import Microbatch as Microbatch
from .loader import sample_count as sample_count
from .loader import to_device as to_device
from .mixture import Mixture as Mixture
from .sampler import ResumableSampler as ResumableSampler
from .sources import EvalBatches as EvalBatches
from .sources import EvalLoader as EvalLoader
from .sources import ResumableLoader as ResumableLoader
from .sources import eval_loader as eval_loader
from .sources import resumable_eval_loader as resumable_eval_loader
from .sources import resumable_loader as resumable_loader
from .sources import train_loader as train_loader
