"""The wheel, built from the sdist, has every file of the package; installed alone, it reads logs without torch."""

from __future__ import annotations

import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from release.install import ROOT, build, dalsegno, install, let_it_read_logs

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

    python = install(wheel, tmp_path / "environment")
    assert dalsegno(python, "--version", folder=tmp_path) == f"dalsegno {version('dalsegno')}\n"
    let_it_read_logs(python)
    listed = dalsegno(python, "logs", "list", str(ROOT / "tests" / "golden" / "logs"), folder=tmp_path)
    assert "diverged" in listed and "finished" in listed
    dalsegno(python, "logs", "report", str(ROOT / "tests" / "golden" / "logs" / "killed"), folder=tmp_path)
    assert (tmp_path / "report.html").is_file()
