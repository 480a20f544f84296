"""What a launch sends to its ranks, as it arrives there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dalsegno.launcher.parcel import pack, read_private, unpack, write_private


def sent(value: Any, folder: Path) -> Any:
    """Packed, written, read and rebuilt."""
    write_private(folder / "parcel.json", pack(value, "it"))
    return unpack(read_private(folder / "parcel.json"))
