"""Lightning, as ``lightning`` or ``pytorch_lightning``: its callbacks in dalsegno's Trainer, dalsegno's in its own.

The order of calls is in :mod:`.dialect`; in ``bridge``, dalsegno's callbacks in Lightning's Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.interop.lightning.dialect import Callback
from dalsegno.system.imports import lazy_exports

from .dialect import Lightning

if TYPE_CHECKING:
    from .bridge import Bridge
else:
    __getattr__, __dir__ = lazy_exports(__name__)  # Lightning takes seconds to import

__all__ = ["DIALECT", "Bridge", "Callback", "Lightning"]

DIALECT = Lightning
