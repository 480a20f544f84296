"""All files have the same version, and a tag of another one is not released."""

from __future__ import annotations

import shutil
from pathlib import Path

from release.version import ROOT, newest_section, problems, versions


def test_all_files_have_the_version_of_the_package() -> None:
    assert len(set(versions().values())) == 1, versions()


def test_a_tag_is_released_once_all_files_have_it(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    changes = tmp_path / "CHANGELOG.md"
    version = versions()["pyproject.toml"]
    heading = newest_section()[0]
    changes.write_text(changes.read_text().replace(f"## {heading}\n", f"## {version}, not released yet\n"))
    assert problems(f"v{version}", tmp_path) == [f"CHANGELOG.md: '{version}, not released yet'"]
    changes.write_text(changes.read_text().replace(", not released yet\n", ", 2030-01-31\n"))
    assert problems(f"v{version}", tmp_path) == []
    assert len(problems("v99.0.0", tmp_path)) == 3
    assert newest_section(tmp_path)[1].startswith("The first release") or version != "0.1.0"
