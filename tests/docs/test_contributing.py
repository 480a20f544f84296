"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

USE = """
import json, sys
from pathlib import Path

import dalsegno as ds
from dalsegno.interop.minimal import Hook
from dalsegno.callbacks import HighestLoss, JsonLogger
from dalsegno.testing import TinyRegression, tiny_regression_data

class Sum(Hook):
    total = 0.0

    def after_step(self, step: int, loss: float) -> None:
        self.total += loss

def train(steps: int) -> None:
    args = ds.TrainingArguments("runs/a", max_steps=steps, logging_steps=1, save_steps=1, use_cpu=True)
    own = [HighestLoss(), sums, JsonLogger()]
    ds.Trainer(TinyRegression(), args, train_dataset=tiny_regression_data(16), callbacks=own).train()

sums = Sum()
train(2)
train(4)
records = [json.loads(line) for line in Path("runs/a/logs/train.jsonl").read_text().splitlines()]
records = [record for record in records if "highest_loss" in record]
losses = [record["loss"] for record in records]
assert [record["highest_loss"] for record in records] == [max(losses[: n + 1]) for n in range(4)], records
assert abs(sums.total - sum(losses)) < 1e-6 * sum(losses), (sums.total, losses)

from dalsegno.cli import main
main(["callbacks", "list"])
sys.exit(main(["logs", "count", "--json", "runs/a"]))
"""


def test_a_callback_a_dialect_and_a_command_as_described(tmp_path: Path) -> None:
    package = tmp_path / "src" / "dalsegno"
    shutil.copytree(ROOT / "src" / "dalsegno", package, ignore=shutil.ignore_patterns("*.pyc.*"))
    recipes = re.findall(r"```python\n# (src/\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert len(recipes) == 3
    for name, code in recipes:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    built_ins = package / "callbacks" / "__init__.py"
    _insert(built_ins, "\n    from .loggers.highest_loss import HighestLoss as HighestLoss", after="if TYPE_CHECKING:")
    logs = package / "cli" / "logs" / "__init__.py"
    _insert(logs, "count, ", after="from . import checks, ")
    _insert(logs, '\n    "count": count.count,', after="COMMANDS = {")

    code = f"import sys; sys.path.insert(0, {str(package.parent)!r})\n{USE}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Adds `highest_loss`, the highest logged loss so far, to each training record." in done.stdout
    assert json.loads(done.stdout[done.stdout.rindex("[") :]) == [{"run": "a", "records": 5}]
    lint = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--quiet"]
    subprocess.run([*lint, *(str(tmp_path / name) for name, _ in recipes)], check=True)


def _insert(path: Path, text: str, *, before: str = "", after: str = "") -> None:
    whole = path.read_text()
    place = whole.index(before) if before else whole.index(after) + len(after)
    path.write_text(whole[:place] + text + whole[place:])
