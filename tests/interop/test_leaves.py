"""All about one other library is in one module or package, and in its tests. Without both, everything else works as
before."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from pathlib import Path

import pytest

from dalsegno.system.imports import homes_of
from support import warm

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src/dalsegno/interop", ROOT / "tests/interop"


def places_of(library: str) -> list[Path]:
    """The files and folders of one library."""
    found = [SOURCE / library, SOURCE / f"{library}.py", TESTS / library, TESTS / f"test_{library}.py"]
    return [path for path in found if path.exists()]


LIBRARIES = sorted(path.stem for path in SOURCE.glob("[!_]*") if len(places_of(path.stem)) > 1)
FLAT_NAMES = ROOT / "src/dalsegno/__init__.py"
"""The one file that may know a library: it lists where public names are, and leaves out those that are not there."""
BENCHMARK = ROOT / "benchmarks/dialects.py"
"""Measures Hugging Face's dialect where there is one."""

FORGET = """
import sys

for name, module in [*sys.modules.items()]:
    place = getattr(module, "__file__", None) or str(getattr(module, "__path__", ""))  # a folder of tests has no file
    if "{src}/" in place or "{tests}/" in place:
        del sys.modules[name]
""".format(src=ROOT / "src", tests=ROOT / "tests")
"""A warm process has the originals of what is here imported from a copy."""

TRY_EACH = """
import contextlib, importlib, os, sys
from pathlib import Path
import hypothesis, pytest, torch._dynamo, torch.distributed.fsdp, torch.utils.data, torchdata.stateful_dataloader


for name in (
    "accelerate", "boto3", "httpx", "matplotlib.pyplot", "peft", "prometheus_client", "pytorch_lightning",
    "starlette.applications", "torchmetrics", "transformers.trainer_callback", "uvicorn",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

targets, chosen, *libraries = (words.split() for words in sys.argv[1:])
sys.path[:0] = [os.path.abspath("src"), os.path.abspath("tests")]
from support.imports import imports

def modules():
    source = Path("src").absolute()
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith(".__main__"):  # which runs the command line
            yield name, path

for test in Path("tests").absolute().glob("*/test_*.py"):
    imports(test)  # which the tests of the rooms ask for, as what is next
for name, path in modules():
    imports(path)
    if not name.startswith(("dalsegno.interop", "dalsegno.training.preloaded")):  # which imports all dialects
        importlib.import_module(name)
assert sys.modules["dalsegno"].__file__.startswith(os.getcwd())
libraries_there = [name for name in sys.modules if name.startswith("dalsegno.interop.")]
assert not libraries_there, libraries_there

statuses = []
for places in libraries:
    for number, place in enumerate(places):
        os.rename(place, f"deleted-{number}")
    if not (child := os.fork()):
        status = 1
        try:
            for name, _ in modules():
                importlib.import_module(name)
            del sys.modules["dalsegno.testing"]  # so that nothing is made ready for ranks, of which there are none
            status = int(pytest.main([*targets, "-k", " ".join(chosen)]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for number, place in enumerate(places):
        os.rename(f"deleted-{number}", place)
sys.exit(max(statuses))
"""
"""A process forked for each library, after what takes longest: it has imported, and read, all else."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_else_names_its_folder(library: str) -> None:
    """Nor what is found there by another name: flat names, and the name of its dialect."""
    folder = re.compile("|".join([rf"interop[./]{library}\b", *other_names(library)]))
    others = [path for place in ("src", "tests", "benchmarks", "docs") for path in (ROOT / place).rglob("*.py")]
    own = {*places_of(library)}
    named = [path for path in others if not own & {path, *path.parents} and folder.search(path.read_text())]
    assert [path for path in named if path not in (FLAT_NAMES, BENCHMARK)] == []


def other_names(library: str) -> list[str]:
    """Patterns of ``ds.`` with each flat name of a module in the folder, and of ``adapt`` with its dialect."""
    homes = homes_of("dalsegno")
    home = f"dalsegno.interop.{library}"
    flat = [rf"ds\.{name}\b" for name, module in homes.items() if f"{module}.".startswith(f"{home}.")]
    dialect = getattr(importlib.import_module(f"dalsegno.interop.{library}"), "DIALECT", None)
    return flat if dialect is None else [*flat, rf"""adapt\([^"'\n]*["']{dialect.dialect}["']"""]


def test_the_folders_of_each_can_be_deleted(tmp_path: Path) -> None:
    """In a copy, one at a time: every module can be imported, and the tests pass that look at all libraries or modules.

    Those are the tests of how dialects are found, of the rooms, and of the public names. No other test needs a dialect
    of a library's but through that library's folder, as the test above shows.
    """
    for folder in ("src", "tests"):
        ignored = shutil.ignore_patterns("*.egg-info", "golden", "*.pyc.*")  # one that is being written
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    files = "test_architecture", "interop/test_dialects", "docs/test_docs", "docs/test_site"
    targets = " ".join([*(f"tests/{file}.py" for file in files), "-p no:cacheprovider"])
    found = "module_of_a_base_class or dialects_are_listed or library_need_not_be_installed"
    chosen = f"(architecture and not without_torch) or {found} or public_name"
    (tmp_path / "try_each.py").write_text(FORGET + TRY_EACH)
    places = [" ".join(str(path.relative_to(ROOT)) for path in places_of(library)) for library in LIBRARIES]
    words = ["try_each.py", targets, chosen, *places]
    done = warm.run(words, folder=tmp_path, env={**environment(), "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == len(LIBRARIES)


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def test_all_of_them_can_be_deleted(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "dalsegno"
    shutil.copytree(ROOT / "src" / "dalsegno", copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.rmtree(copy / "interop")
    (tmp_path / "native_run.py").write_text(FORGET + NATIVE_RUN)
    environment_of_copy = {**environment(), "PYTHONPATH": f"{copy.parent}{os.pathsep}{ROOT}"}
    done = warm.run(["native_run.py", "run"], folder=tmp_path, env=environment_of_copy)
    assert done.returncode == 0, done.stderr
    assert "Known dialects: none" in done.stdout
    assert done.stdout.count("not measured: unknown dialect 'huggingface'") == 2


NATIVE_RUN = """
import sys
for name in [each for each in sys.modules if each.partition(".")[0] == "fsspec"]:
    del sys.modules[name]
import dalsegno as ds
assert ds.__file__.startswith(sys.path[1]), ds.__file__
from dalsegno.callbacks import JsonLogger
from dalsegno.testing import TinyRegression, tiny_regression_data

class Foreign: ...

args = ds.TrainingArguments(sys.argv[1], max_steps=3, logging_steps=1, save_steps=2, use_cpu=True, disable_tqdm=True)
trainer = ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(), callbacks=[JsonLogger()])
assert trainer.train().reason == "finished"
unused = {"fsspec", "dalsegno.checkpoint.remote.store", "dalsegno.distributed.pipeline.schedules"}
unused |= {f"dalsegno.callbacks.{name}" for name in ("control.diloco", "averages.ema")}
assert not unused & set(sys.modules), f"a restart would wait for {unused & set(sys.modules)}"
try:
    trainer.add_callback(Foreign())
except ds.UnknownDialect as error:
    print(error)

from benchmarks import dialects

for row in dialects.run(**dialects.SMALL):
    print(row.peer)
"""
