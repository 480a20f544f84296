"""Hugging Face's dialect on two ranks: what each rank's callbacks receive, and which of them may end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dalsegno as ds
from dalsegno.testing import run_ranks, tiny_regression_data
from support.small import small_trainer


def told_on_a_rank(output_dir: Path, goes_on: bool = False) -> dict[str, Any]:
    """What a callback sees on this rank; rank 1's alone asks for an end, in a handler that returns a control."""
    seen: dict[str, Any] = {"records": []}

    class Rank(ds.TrainerCallback):
        steps = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["rank"] = (args.world_size, args.process_index, state.is_world_process_zero, args.should_log)
            seen["batches"] = (len(kwargs["train_dataloader"]), len(kwargs["eval_dataloader"]))
            seen["begins at"] = (state.global_step, self.steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.steps += 1
            control.should_training_stop |= args.process_index == 1 and state.global_step == 3
            return control

        def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **kwargs: Any) -> None:
            seen["records"].append({name: logs[name] for name in ("loss", "eval_loss", "epoch") if name in logs})

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    sets = {"eval_dataset": tiny_regression_data(8, seed=1)}
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "parallel": "ddp"}
    trainer = small_trainer(output_dir, Rank(), parts=sets, max_steps=5, logging_steps=1, eval_steps=2, **settings)
    result = trainer.train(continue_stopped=goes_on)
    seen["end"] = (result.global_step, result.reason)
    return seen


def test_two_ranks_are_told_the_same_and_stop_together(tmp_path: Path) -> None:
    first, second = run_ranks(told_on_a_rank, 2, tmp_path)
    assert (first["rank"], second["rank"]) == ((2, 0, True, True), (2, 1, False, False))
    assert first["batches"] == second["batches"] == (5, 2)
    assert first["records"] == second["records"]
    assert sum("eval_loss" in record for record in first["records"]) == 1
    assert first["end"] == second["end"] == (3, "stopped")

    first, second = run_ranks(told_on_a_rank, 2, tmp_path, True)
    assert first["begins at"] == second["begins at"] == (3, 3)
    assert first["records"] == second["records"]
    assert first["end"] == second["end"] == (5, "finished")


def best_on_a_rank(output_dir: Path) -> tuple[float | None, Any]:
    """A metric of this rank's own, which a callback adds; the evaluations' second is the best."""

    class Adds(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> None:
            metrics["eval_score"] = state.global_step % 4 + args.process_index
            metrics["eval_table"] = ["not a number"]

    class Hears(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> None:
            self.heard = metrics["eval_score"]

    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    best = {"metric_for_best_model": "eval_score", "greater_is_better": True, "load_best_model_at_end": True}
    settings = {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, **best}
    trainer = small_trainer(output_dir, Adds(), hears := Hears(), parts=parts, **settings)
    trainer.train()
    return trainer.state.best_metric, (trainer.state.best_global_step, hears.heard)


def test_a_metric_that_a_callback_adds_selects_the_best_model_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(best_on_a_rank, 2, tmp_path) == [(2.0, (2, 0))] * 2


def heard_on_rank_zero(output_dir: Path) -> tuple[int, int]:
    """What a callback adds that the other rank does not have."""

    class Adds(ds.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any, **kwargs: Any) -> None:
            metrics["eval_score"] = 1.0
            heard.append(state.global_step)

    heard: list[int] = []
    adds = ds.adapt(Adds())
    adds.ranks = "zero"
    parts = {"eval_dataset": tiny_regression_data(8, seed=1)}
    trainer = small_trainer(output_dir, adds, parts=parts, max_steps=2, eval_steps=1, per_device_train_batch_size=2)
    return trainer.train().global_step, len(heard)


def test_a_callback_of_rank_zero_hears_of_evaluations(tmp_path: Path) -> None:
    assert run_ranks(heard_on_rank_zero, 2, tmp_path) == [(2, 2), (2, 0)]
