"""dalsegno's callbacks in TRL's trainers. Skipped where TRL is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.testing import start_ranks
from interop.hf.bridged import records, states
from support.threads import one_thread

pytest.importorskip("trl")
from interop.hf.trained_by_trl import sft, sft_until_killed

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(output_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The records, without what TRL and Hugging Face count anew after a resume."""
    logs = records(output_dir)
    own = ("train_loss", "num_tokens", "eval_num_tokens")
    return {name: [{key: each[key] for key in each if key not in own} for each in log] for name, log in logs.items()}


def test_a_killed_fine_tuning_resumes_with_the_logs_and_states_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    (outcome,) = start_ranks(sft_until_killed, 1, killed, 7).wait(300)
    assert outcome.was_killed
    with one_thread():
        sft(whole).train()
        sft(killed).train(resume_from_checkpoint=True)
    found, expected = trained(killed), trained(whole)
    assert found == expected
    assert [record["global_step"] for record in found["gradient_norms.jsonl"]] == [2, 4, 6, 8]
    assert states(killed / "checkpoint-8") == states(whole / "checkpoint-8")
