"""For all tests."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background job. What the tests start would inherit it, and never be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, and no clock: what passes here, passes on a busy machine too. `pytest
# --hypothesis-profile=search` tries others.
steady = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("search", **steady)
settings.register_profile("steady", **steady, derandomize=True, database=None)
settings.load_profile("steady")

# Tests run on the CPU: ranks are forked, which a process that has used a GPU cannot be. `make gpu` is for a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Small sums gain nothing by more threads, and these wait for each other by turning in circles.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A process that is woken waits for a free core. Else ranks interrupt each other at each message, often one that holds
# the lock of a connection, for which its own other thread then turns in circles: a fifth of four ranks' CPU time.
if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A failing test shows where its error was raised.
os.environ["DALSEGNO_FULL_TRACEBACK"] = "1"

# Processes keep the bytecode of what they import, such as a copy of the package, for the next ones.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Jobs are registered in a folder of the tests' own, not among the user's.
_state_home = tempfile.TemporaryDirectory(prefix="dalsegno-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _state_home.name

# Memory checkpoints of killed runs are removed with the tests.
_memory_of_the_host = Path("/dev/shm")
_shared_memory = tempfile.TemporaryDirectory(
    prefix="dalsegno-tests-", dir=_memory_of_the_host if _memory_of_the_host.is_dir() else None
)
os.environ["DALSEGNO_SHARED_MEMORY"] = _shared_memory.name

# `tmp_path` is in memory too where there is room: the tests would wait for a disk thousands of times, and show no more.
if _memory_of_the_host.is_dir() and shutil.disk_usage(_memory_of_the_host).free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_memory_of_the_host))

# A proxy would be asked for what lies on this machine.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

# Tests that need a terminal set what it is like.
os.environ["TERM"] = "xterm"
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)  # unknown under -p no:xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: about half of the time, a test waits for processes, disks and clocks."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from one process, rather than each import all libraries anew."""
    from support import workers

    if sys.platform == "linux":
        config.add_cleanup(workers.fork_from_one(specs, Path(_state_home.name)).communicate)


def pytest_configure(config: pytest.Config) -> None:
    """Compile what several processes import, else each would do so anew: the package, the tests, and their asserts."""
    if hasattr(config, "workerinput"):
        return
    files, cores = [path for name in ("src", "tests") for path in sorted(ROOT.glob(f"{name}/**/*.py"))], 1
    if config.getoption("numprocesses", None):
        cores = os.cpu_count() or 1
    else:
        files = [path for path in files if not _is_test(path)]  # few are run, and pytest compiles these
    shares = [get_context("fork").Process(target=_compile, args=(config, files[n::cores])) for n in range(cores)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def _compile(config: pytest.Config, files: list[Path]) -> None:
    for file in files:
        if not _is_test(file):
            compileall.compile_file(file, quiet=2)
        elif config.getoption("assertmode") == "rewrite":
            _compile_asserts(config, file)


def _compile_asserts(config: pytest.Config, test: Path) -> None:
    """Write the bytecode that pytest otherwise makes on import. It has no public function for this."""
    bytecode = rewrite.get_cache_dir(test) / (test.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(test, bytecode) is None:
        source_hash, code = rewrite._rewrite_test(test, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, bytecode)


LONGEST = [
    ROOT / "tests" / name
    for name in (
        "distributed/parallel/test_layouts.py",
        "distributed/pipeline/test_pipeline.py",
        "benchmarks/test_benchmarks.py",
        "durability/test_matrix.py",
        "durability/test_soak.py",
        "training/test_memory_on_hosts.py",
        "durability/test_kills.py",
        "durability/test_scenarios.py",
        "callbacks/trackers/test_trackers.py",
        "distributed/test_torchrun.py",
        "callbacks/loggers/test_textgen_callback.py",
        "training/test_stopping.py",
        "distributed/parallel/test_transformers_split.py",
        "distributed/parallel/test_collectives_of_a_step.py",
        "durability/test_power_cut.py",
        "durability/test_lies.py",
        "release/test_install.py",
    )
]
"""Files with tests that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first: one that begins last would run alone, while the other workers have nothing to do."""
    items.sort(key=lambda item: LONGEST.index(item.path) if item.path in LONGEST else len(LONGEST))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported here is never garbage: it is not searched for any, neither now nor while tests run.

    Ranks, and programs that are forked, begin with all of it, rather than import it anew.
    """
    gc.disable()
    collected = yield
    if "dalsegno.testing" in sys.modules:
        import dalsegno.training.preloaded  # noqa: F401  # what the first trainer of this process would import
        from support import loopback, rehearsal

        loopback.begin_at_own_port()
        rehearsal.seed_without_stacks()
        rehearsal.rehearse()
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)  # else a twentieth of the time goes into searching what is in use
    gc.enable()
    if "dalsegno.testing" in sys.modules:
        from support import fork_server

        fork_server.fork_from_here()
    return collected


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
