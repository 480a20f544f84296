"""Install a wheel of dalsegno into an empty environment and run it: ``make dist``, and a shorter form in the tests.

Nothing is downloaded. The environment finds the dependencies of this Python: those that reading logs needs, and for
the demo all.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


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


def packages_for_reading() -> list[str]:
    """What docs/guides/logs.md installs before dalsegno itself, to read logs without torch."""
    page = (ROOT / "docs" / "guides" / "logs.md").read_text(encoding="utf-8")
    (packages,) = re.findall(r"^\$ pip install (.*) && pip install --no-deps \.$", page, re.MULTILINE)
    return packages.split()


def environment(folder: Path) -> Path:
    """Make an empty environment; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def install(wheel: Path, python: Path) -> str:
    """Install ``wheel``, and nothing else; returns what pip complains about."""
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(
        [*words, "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"],
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.stderr


def let_it_read_logs(python: Path) -> Path:
    """Give the environment :func:`packages_for_reading` and what they need; returns the folder with links to them."""
    found = python.parent.parent / "reading"
    found.mkdir()
    names, known = packages_for_reading(), set[str]()
    while names:
        installed = distribution(names.pop())
        if installed.name in known:
            continue
        known.add(installed.name)
        needed = map(Requirement, installed.requires or ())
        names += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (found / top).symlink_to(str(installed.locate_file(top)))
    _add_to_path(python, found)
    return found


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
        python = environment(Path(scratch) / "environment")
        let_it_read_logs(python)
        install(wheel, python)
        print(dalsegno(python, "logs", "list", str(ROOT / "tests" / "golden" / "logs"), folder=Path(scratch)))
        let_it_train(python)
        print(dalsegno(python, "demo", "--steps", arguments.steps, folder=Path(scratch)))
    print(*sorted(arguments.out.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
