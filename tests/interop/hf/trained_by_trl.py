"""A supervised fine-tuning by TRL with a Bridge in it. At the top of a module, so that a process can import it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.table import InMemoryTable
from trl import SFTConfig, SFTTrainer

from dalsegno.interop.hf import Bridge
from interop.bridges import several
from interop.hf.bridged import At
from support.languages import WORDS, byte_pairs, llama


def sft(output_dir: Path, *others: Any) -> Any:
    words = WORDS.split()
    table = InMemoryTable.from_pydict({"text": [" ".join(words[start : start + 8]) for start in range(20)]})
    texts, valid = (Dataset(table.slice(0, rows), fingerprint=f"{rows} texts") for rows in (20, 4))
    args = SFTConfig(
        str(output_dir),
        per_device_train_batch_size=2,
        max_steps=8,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=4,
        max_length=16,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        llama(),
        args,
        train_dataset=texts,
        eval_dataset=valid,
        processing_class=byte_pairs(),
        callbacks=list(others),
    )
    trainer.add_callback(Bridge(several(), trainer=trainer))
    return trainer


def sft_until_killed(output_dir: Path, step: int) -> None:
    def kill(control: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    sft(output_dir, At("on_step_end", step, kill)).train()
