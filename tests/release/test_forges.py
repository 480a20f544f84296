"""Workflows and templates of the forges: they call what exists, and are the same on each forge."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cli import _parser
from release.install import packages_for_reading
from release.version import ROOT

yaml = pytest.importorskip("yaml")

WORKFLOWS = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".gitlab-ci.yml"]


def commands(value: Any) -> list[str]:
    """The shell commands in a workflow: its entries ``run`` (GitHub) and ``script`` (GitLab)."""
    if isinstance(value, list):
        return [each for item in value for each in commands(item)]
    if not isinstance(value, dict):
        return []
    own = [value[key] for key in ("run", "script") if key in value]
    lines = [line for entry in own for line in (entry if isinstance(entry, list) else [entry])]
    return lines + [each for item in value.values() for each in commands(item)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = commands(yaml.safe_load(workflow.read_text(encoding="utf-8")))
    assert lines
    for words in (shlex.split(part) for line in lines for part in line.split("&&")):
        words = [word for word in words if not re.match(r"\w+=", word)]
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        elif words[:2] == ["python", "-m"]:
            assert words[2] == "pip" or find_spec(words[2]) is not None, words
        elif words[0] == "dalsegno":
            assert _parser(words[1:]).parse_known_args(words[1:])[1] == [], words
        else:
            assert words[0] == "gh", words


def test_logs_are_read_elsewhere_with_what_the_page_installs() -> None:
    line = " ".join(packages_for_reading())
    assert f"{line} && python -m pip install --no-deps ." in (ROOT / ".github" / "workflows" / "test.yml").read_text()


def test_templates_are_the_same_on_each_forge() -> None:
    request = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    assert (ROOT / ".gitlab" / "merge_request_templates" / "Default.md").read_text(encoding="utf-8") == request
    issues = ROOT / ".github" / "ISSUE_TEMPLATE"
    copies = ROOT / ".gitlab" / "issue_templates"
    assert {path.name for path in issues.iterdir()} == {path.name for path in copies.iterdir()}
    for path in issues.iterdir():
        assert path.read_text(encoding="utf-8").endswith((copies / path.name).read_text(encoding="utf-8"))
