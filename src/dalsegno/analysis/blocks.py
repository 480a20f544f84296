"""Block: a part of a log, in columns. One made of records, and one made of a Polars frame, which is how the long logs
are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dalsegno.logs.values import Record

if TYPE_CHECKING:
    import polars as pl


class Block(Protocol):
    """n records, one below the other."""

    def __len__(self) -> int: ...

    def numeric(self) -> list[str]:
        """The names under which there are numbers, in the log's order."""
        ...

    def numbers(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Values, and where there are any; both of shape (n,). Texts, lists and truth values are none."""
        ...

    def texts(self, name: str) -> NDArray[np.object_]:
        """What stands under a name that holds texts, such as ``kind``: shape (n,); None where nothing does."""
        ...

    def frame(self) -> pl.DataFrame: ...


class RecordBlock:
    """Made of records."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def numeric(self) -> list[str]:
        return list({name: None for record in self._records for name, value in record.items() if is_number(value)})

    def numbers(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        found = [value if is_number(value := record.get(name)) else None for record in self._records]
        present = np.array([value is not None for value in found], np.bool_)
        return np.array([np.nan if value is None else float(value) for value in found]), present

    def texts(self, name: str) -> NDArray[np.object_]:
        return np.array([record.get(name) for record in self._records], np.object_)

    def frame(self) -> pl.DataFrame:
        import polars as pl

        names = list({name: None for record in self._records for name in record})
        numeric = set(self.numeric())
        columns = {name: [record.get(name) for record in self._records] for name in names}
        return pl.DataFrame([_column(name, columns[name], name in numeric) for name in names])


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _column(name: str, values: list[Any], numeric: bool) -> pl.Series:
    """A column of one type: numbers if there are any, whatever else stands between them left out."""
    import polars as pl

    if numeric:
        numbers = [value if is_number(value) else None for value in values]
        whole = all(isinstance(value, int) and abs(value) < 1 << 63 for value in numbers if value is not None)
        return pl.Series(name, numbers, pl.Int64 if whole else pl.Float64, strict=False)
    if all(value is None or isinstance(value, bool) for value in values):
        return pl.Series(name, values, pl.Boolean)
    return pl.Series(name, [_text(value) for value in values], pl.String)


def _text(value: Any) -> str | None:
    import json

    return value if value is None or isinstance(value, str) else json.dumps(value)
