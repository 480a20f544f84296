"""The programs of docs/examples, as small as they get, for tests that kill and resume them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> Any:
    """A program of docs/examples, as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def char_gpt(output_dir: Path) -> Any:
    return example("char_gpt").build(output_dir, steps=6, width=16, length=16)


def digits_cnn(output_dir: Path) -> Any:
    return example("digits_cnn").build(output_dir, epochs=2)


def lora(output_dir: Path) -> Any:
    return example("lora").build(output_dir, steps=8)


def fsdp(output_dir: Path) -> Any:
    return example("fsdp").build(output_dir, steps=6, width=16, length=16)


def own_loop(output_dir: Path) -> Any:
    """It trains without a Trainer; :func:`dalsegno.testing.check_resume` calls only ``train``."""
    return SimpleNamespace(train=lambda: example("own_loop").train(output_dir, steps=8))
