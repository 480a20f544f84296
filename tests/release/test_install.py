"""The wheel, built from the sdist, has every file of the package; installed alone, it reads logs without torch."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from release.install import ROOT, build, dalsegno, environment, install, let_it_read_logs

pytest.importorskip("build")


def test_a_wheel_installs_into_an_empty_environment_and_reads_logs(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist")
    package = ROOT / "src" / "dalsegno"
    own = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert own == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dalsegno/")}
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as sdist:
        beside = {
            "README.md",
            "LICENSE",
            "pyproject.toml",
            "CHANGELOG.md",
            "SECURITY.md",
            "Makefile",
            "constraints.txt",
        }
        beside |= {"tests/conftest.py", "tests/golden/logs/printed.py", "docs/index.md", "benchmarks/__main__.py"}
        assert beside <= {name.partition("/")[2] for name in sdist.getnames()}

    python = environment(tmp_path / "environment")
    packages = let_it_read_logs(python)
    assert not (packages / "torch").exists()
    assert install(wheel, python) == ""
    assert dalsegno(python, "--version", folder=tmp_path) == f"dalsegno {version('dalsegno')}\n"
    logs = ROOT / "tests" / "golden" / "logs"
    listed = dalsegno(python, "logs", "list", str(logs), folder=tmp_path)
    assert "diverged" in listed and "finished" in listed
    dalsegno(python, "logs", "report", str(logs / "killed"), folder=tmp_path)
    assert (tmp_path / "report.html").is_file()
    assert "loss" in dalsegno(python, "logs", "plot", "--terminal", str(logs / "killed"), folder=tmp_path)
    (packages / "plotille").unlink()
    (tmp_path / "events.out.tfevents.1.host").touch()
    lacking = {
        f"plot --terminal {logs}/killed": ("plotting in a terminal", "plotille"),
        f"export {logs}/killed --to tensorboard -o events": ("writing event files", "tensorboard"),
        f"show {tmp_path}": ("reading event files", "tensorboard"),
    }
    for call, (what, package) in lacking.items():
        words = [python.with_name("dalsegno"), "logs", *call.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        hint = f"dalsegno: {what} needs {package}, which is not installed; pip install {package}\n"
        assert (done.returncode, done.stderr) == (2, hint)
