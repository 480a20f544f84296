"""For all tests."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job. What the tests start would inherit it, and never be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, and no clock: what passes here, passes on a busy machine too. `pytest
# --hypothesis-profile=search` tries others.
steady = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("search", **steady)
settings.register_profile("steady", **steady, derandomize=True, database=None)
settings.load_profile("steady")

# Small sums gain nothing by more threads, and these wait for each other by turning in circles.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A failing test shows where its error was raised.
os.environ["DALSEGNO_FULL_TRACEBACK"] = "1"

# Jobs are registered in a folder of the tests' own, not among the user's.
_state_home = tempfile.TemporaryDirectory(prefix="dalsegno-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _state_home.name

# Memory checkpoints of killed runs are removed with the tests.
_memory_of_the_host = Path("/dev/shm")
_shared_memory = tempfile.TemporaryDirectory(
    prefix="dalsegno-tests-", dir=_memory_of_the_host if _memory_of_the_host.is_dir() else None
)
os.environ["DALSEGNO_SHARED_MEMORY"] = _shared_memory.name

# A proxy would be asked for what lies on this machine.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

# What a terminal is like is said by the tests that need one.
os.environ["TERM"] = "xterm"
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: about half of the time, a test waits for processes, disks and clocks."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Compile what the processes of the tests import; where Python writes no bytecode, each would do so anew."""
    if not hasattr(config, "workerinput"):
        for name in ("src", "tests"):
            compileall.compile_dir(Path(__file__).parents[1] / name, quiet=2)


SLOW_TO_IMPORT = (
    "pytest",
    "hypothesis",
    "transformers.models.llama.modeling_llama",
    "peft",
    "torchmetrics.regression",
    "s3fs",
)


def pytest_collection_finish() -> None:
    """What is imported by now is never garbage: no collection of a test needs to walk it.

    Ranks begin with what the tests import, rather than import it once for each.
    """
    gc.collect()
    gc.freeze()
    if processes := sys.modules.get("dalsegno.testing.processes"):
        processes.PRELOADED.extend(name for name in SLOW_TO_IMPORT if name.partition(".")[0] in sys.modules)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A TLS certificate that is its own authority, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = [folder / "cert.pem", folder / "key.pem"]
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node-7", "-days", "2"]
    subprocess.run(
        ["openssl", "req", *kind, "-out", made[0], "-keyout", made[1]],
        check=True,
        capture_output=True,
    )
    return made[0], made[1]
