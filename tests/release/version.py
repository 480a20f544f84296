"""Check a tag before its release: ``python -m release.version v0.1.0``, in the workflow that a tag starts.

The tag must be the version of the package, of CITATION.cff and of the newest section of CHANGELOG.md, and this section
must no longer be headed "not released yet". Prints the section, the notes of the release.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNRELEASED = "not released yet"


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version by each file that has it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "pyproject.toml": project["version"],
        "CITATION.cff": citation[1] if citation is not None else "",
        "CHANGELOG.md": newest_section(root)[0].partition(",")[0],
    }


def newest_section(root: Path = ROOT) -> tuple[str, str]:
    """Heading and text of the newest release in CHANGELOG.md."""
    heading, _, text = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1].partition("\n")
    return heading, text.strip()


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Why the tag cannot be released; empty if it can."""
    found = [f"{file} has version {version!r}" for file, version in versions(root).items() if f"v{version}" != tag]
    heading, _ = newest_section(root)
    return found + ([f"CHANGELOG.md: {heading!r}"] if UNRELEASED in heading else [])


def main() -> None:
    (tag,) = sys.argv[1:]
    if found := problems(tag):
        sys.exit(f"{tag} cannot be released: {'; '.join(found)}")
    print(newest_section()[1])


if __name__ == "__main__":
    main()
