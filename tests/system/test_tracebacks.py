"""A script that makes a mistake prints its own line and the message, and not the frames inside dalsegno."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dalsegno as ds
from dalsegno.errors import ConfigurationError, DalsegnoError
from dalsegno.system.tracebacks import SWITCH
from support.listeners import Listener
from support.small import small_trainer

MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a setting": (lambda folder: ds.TrainingArguments(folder, save_steps=-1), "save_steps=-1"),
    "a callback": (lambda folder: small_trainer(folder, 3), "3"),  # type: ignore[arg-type]
    "a path": (lambda folder: small_trainer(folder).train(folder / "nowhere"), "nowhere"),
    "no data": (lambda folder: small_trainer(folder).evaluate(), "trainer.evaluate(): "),
}


def frames(mistake: Callable[[Path], Any], folder: Path) -> tuple[list[str], str]:
    """Files of dalsegno's own frames in what a script with this mistake would print, and all of it."""
    with pytest.raises(DalsegnoError) as caught:
        mistake(folder)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    own = [Path(file).name for file in files if str(Path(ds.__file__).parent) in file]
    return own, "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_frames_inside_are_not_shown(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)
    mistake, message = MISTAKES[kind]
    own, printed = frames(mistake, tmp_path)
    assert own == ["tracebacks.py"]
    assert message in printed.splitlines()[-1]
    assert f"{SWITCH}=1" in printed


def test_all_frames_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    own, _ = frames(MISTAKES["a path"][0], tmp_path)
    assert {"trainer.py", "lifecycle.py", "checkpoint_sources.py"} <= {*own}


def test_an_error_out_of_a_callback_shows_where_it_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)

    def careless(ctx: Any) -> None:
        raise ConfigurationError("of a callback")

    own, printed = frames(lambda folder: small_trainer(folder, Listener({"on_step_end": careless})).train(), tmp_path)
    assert {"trainer.py", "session.py"} <= {*own}
    assert "in careless" in printed
