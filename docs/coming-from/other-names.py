"""Writes its page from dalsegno.args.other_names: ``python docs/coming-from/other-names.py``. A test compares them."""

from __future__ import annotations

from pathlib import Path

from dalsegno.args import TrainingArguments
from dalsegno.args.other_names import COMMON, HUGGING_FACE, INSTRUCTLAB, LIGHTNING

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# Settings of other trainers

<!-- Written by docs/coming-from/other-names.py from src/dalsegno/args/other_names.py. -->

Coming from another trainer, you find here what its arguments are called, or what to do instead. An error about an
unknown argument contains the same answer. Names that are not listed are the same here: `learning_rate`,
`per_device_train_batch_size`, `save_total_limit` …; [all settings](../guides/trainer.md).
"""


def page() -> str:
    """The page's text."""
    tables = [
        ("Hugging Face's TrainingArguments and Trainer", HUGGING_FACE),
        ("Lightning's Trainer", LIGHTNING),
        ("InstructLab's TrainingArgs", INSTRUCTLAB),
        ("Other names", {name: answer for name, answer in COMMON.items() if name != answer}),
    ]
    return HEAD + "".join(_table(title, answers) for title, answers in tables)


def _table(title: str, answers: dict[str, str]) -> str:
    rows = [f"| `{name}` | {_cell(answer)} |" for name, answer in answers.items()]
    return "\n".join([f"\n## {title}\n", "| there | here |", "|---|---|", *rows, ""])


def _cell(answer: str) -> str:
    if answer.isidentifier():
        owner = "TrainingArguments" if answer in TrainingArguments.__dataclass_fields__ else "Trainer"
        return f"`{owner}({answer}=…)`"
    return answer.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
