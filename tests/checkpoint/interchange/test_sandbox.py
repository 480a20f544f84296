"""The process that reads pickles cannot use the network, start programs, write files, or take all memory."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ENTER = """
import os, pathlib, socket, subprocess, sys
from dalsegno.checkpoint.interchange import sandbox
folder = pathlib.Path(sys.argv[1])
"""


def attempt(code: str, folder: Path, *, enter: str = "sandbox.enter(folder, 64 << 20)") -> str:
    """What the code printed, or the last line of its error."""
    program = f"{ENTER}\n{enter}\n{code}"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket()",
        "socket.create_connection(('127.0.0.1', 9))",
        "os.system('true')",
        "subprocess.run(['true'])",
        "os.fork()",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "open(folder.parent / 'elsewhere', 'w')",
        "os.open(folder.parent / 'elsewhere', os.O_CREAT | os.O_WRONLY)",
        "os.remove(__file__ if '__file__' in globals() else '/nowhere')",
        "import ctypes; ctypes.CDLL(None)",
    ],
)
def test_refused(code: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "is refused while a pickle is read" in attempt(code, folder)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="the kernel's filter is Linux's"
)
@pytest.mark.parametrize(
    "code", ["socket.socket()", "os.execv('/bin/true', ['true'])", "os.posix_spawn('/bin/true', ['true'], {})"]
)
def test_the_kernel_refuses_too(code: str, tmp_path: Path) -> None:
    assert "Operation not permitted" in attempt(code, tmp_path, enter="sandbox._refuse_system_calls()")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit it")
def test_memory_is_limited(tmp_path: Path) -> None:
    assert attempt("bytearray(32 << 20); print('fits')", tmp_path) == "fits"
    assert attempt("bytearray(96 << 20); print('fits')", tmp_path) == "MemoryError"


def test_it_may_write_its_answer(tmp_path: Path) -> None:
    assert attempt("(folder / 'answer').write_text('42'); print('written')", tmp_path) == "written"
