"""Install a wheel of dalsegno into an empty environment and run it: ``make dist``, and a shorter form in the tests.

Nothing is downloaded. The environment finds the dependencies of this Python: those that reading logs needs, and for
the demo all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
READING = ("numpy", "xxhash", "rich", "markdown-it-py", "mdurl", "pygments", "jinja2", "markupsafe")
"""Distributions that ``dalsegno logs list`` and ``logs report`` need."""


def build(target: Path, source: Path = ROOT) -> Path:
    """Build an sdist, and a wheel from it; returns the wheel's path. Works on a copy: ``source`` stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "dalsegno"
        copy.mkdir()
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, copy)
        for name in ("src", "tests", "docs", "benchmarks"):
            shutil.copytree(source / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(copy)]
        subprocess.run(words, check=True, capture_output=True)
    (wheel,) = target.glob("dalsegno-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install ``wheel``, and nothing else, into a new environment in ``folder``; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*words, "--quiet", "--disable-pip-version-check"], check=True)
    return python


def let_it_read_logs(python: Path) -> None:
    """Give the environment what reading logs needs: neither torch, nor what needs torch."""
    found = python.parent.parent / "reading"
    found.mkdir()
    for name in READING:
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (found / top).symlink_to(str(installed.locate_file(top)))
    _add_to_path(python, found)


def let_it_train(python: Path) -> None:
    """Give the environment everything that this Python has installed."""
    _add_to_path(python, Path(sysconfig.get_path("purelib")))


def _add_to_path(python: Path, folder: Path) -> None:
    """The folder's own ``.pth`` files, such as an editable install's, do not count."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = python.parent.parent / "lib" / version / "site-packages"
    (site_packages / f"{folder.name}.pth").write_text(f"{folder}\n", encoding="utf-8")


def dalsegno(python: Path, *words: str, folder: Path) -> str:
    """What the installed command prints.

    Raises:
        CalledProcessError: if it fails.
    """
    command = [python.with_name("dalsegno"), *words]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, encoding="utf-8").stdout


def main() -> None:
    """Build into ``dist/``, install, read the golden logs and run a short demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the sdist and the wheel")
    parser.add_argument("--steps", default="60", help="steps of the demo")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    wheel = build(arguments.out)
    with tempfile.TemporaryDirectory() as scratch:
        python = install(wheel, Path(scratch) / "environment")
        let_it_read_logs(python)
        print(dalsegno(python, "logs", "list", str(ROOT / "tests" / "golden" / "logs"), folder=Path(scratch)))
        let_it_train(python)
        print(dalsegno(python, "demo", "--steps", arguments.steps, folder=Path(scratch)))
    print(*sorted(arguments.out.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
