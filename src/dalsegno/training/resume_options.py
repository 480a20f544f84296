"""ResumeOptions: how a leg begins, as the user asks for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dalsegno.checkpoint.load.compatibility import check_allowed
from dalsegno.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """How a leg begins: the arguments of ``Trainer.train`` and ``dalsegno.Run`` about it."""

    origin: bool | str | Path = True
    """True: the newest checkpoint, if there is one. A path: that one. False: none, whatever there is."""
    strict: bool = False
    """Raise if the newest checkpoint is damaged, instead of using an older one."""
    strict_callbacks: bool = False
    """Raise if a saved callback is missing here, or one here was not saved."""
    allow_changes: Collection[str] = ()
    """What may differ from the checkpoint although its state belongs to it: names from ``compatibility.REFUSED``."""

    load_components: Collection[str] = ()
    """Load only these, from the path, into a new run that begins at step 0."""
    continue_stopped: bool = False
    """Resume a run that a callback has judged to be over."""

    @property
    def chooses(self) -> bool:
        """Whether the user selects where to begin, instead of resuming the run where it is."""
        return self.origin is not True and not self.load_components

    def __post_init__(self) -> None:
        if not isinstance(self.origin, (bool, str, Path)):
            raise ConfigurationError(
                f"resume_from_checkpoint={self.origin!r}; pass True (from the newest checkpoint, if any), False "
                "(start anew) or a checkpoint's path"
            )
        object.__setattr__(self, "allow_changes", check_allowed(self.allow_changes))
        names = [self.load_components] if isinstance(self.load_components, str) else list(self.load_components)
        object.__setattr__(self, "load_components", names)
        if names and isinstance(self.origin, bool):
            raise ConfigurationError(
                f"load_components={names}: pass resume_from_checkpoint= the path of a checkpoint, or of a folder of "
                f"safetensors; it is {self.origin}"
            )
