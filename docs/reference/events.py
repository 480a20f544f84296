"""Writes its page from dalsegno.events.table: ``python docs/reference/events.py``. A test compares the two."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from dalsegno.events.contexts import Context
from dalsegno.events.table import Event

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# Events

<!-- Written by docs/reference/events.py from src/dalsegno/events/table.py. -->

A callback has a method for each event that it handles: `def on_save(self, ctx)`. The table lists all events, in the
order in which a run fires them. Every `ctx` has {common}; the last column lists what an event adds.

A *micro-batch* is one forward and backward pass, a *step* one optimizer update. [Below](#what-a-context-has) is
what the values mean.

| handler | fires | adds to ctx |
|---|---|---|
"""

TAIL = """
## What a context has

- A `ctx` is reused for the next firing: use it inside the handler, or keep `ctx.copy()`.
- `state.global_step` counts finished steps. From `on_step_begin` to `on_optimizer_step` it still has the previous
  count, from `on_step_end` on the new one.
- `state.will_log`, `state.will_evaluate` and `state.will_save` are known from `on_step_begin` on.
- A step's `loss` is this rank's share; `logs`, `metrics` and `grad_norm` are reduced over all ranks.
- Numbers on a device (`loss`, `grad_norm`) are fetched when they are read.

`ctx.state` contains the run's progress: `global_step`, `epoch`, `max_steps` (-1: unknown), `num_input_tokens_seen`,
`samples_seen`, `best_metric`, `best_global_step`, `best_model_checkpoint`, `is_world_process_zero`, and whether the end
of the step will log, evaluate or save.

## The end of a step

1. `on_step_end`, `on_train_metrics`, `on_log_step`, `on_log`
2. for each evaluation set `on_evaluate_begin`, its batches, `on_evaluate_end`, `on_log_step`, `on_log` (kind `eval`),
   `on_evaluate`
3. `on_step_done`; after an epoch's last step `on_epoch_end`
4. `on_before_save`; then the state is captured

So a checkpoint contains everything that happened in its step, and a resumed run repeats no event of it.

## After a save

`on_save` fires once the checkpoint is durable and published: for a background save at the end of a later step, which
depends on the disk, else at the end of this one. Its `ctx.state` is that of the checkpoint.

It comes after the capture. What it changes or logs is not in this checkpoint, so a run that resumes from there fires it
once more, as its first event of a step; but not for a checkpoint that only a signal or a time limit has caused. What
`on_before_save` leaves for `on_save`, a callback keeps in its state.

A save [in memory](saving.md#in-memory) fires `on_before_save`, and no `on_save`.

## Random numbers

Handlers draw from the generators of the run, and a resumed run draws the same. Some events come at other places in a
run that is interrupted, or not at all. What they draw leaves the generators of Python, NumPy, torch and the accelerator
as they were for the steps:

- all events before the first `on_epoch_begin` or `on_step_begin` of a leg, and all after the last step;
- `on_rollback`, `on_before_save`, `on_save`;
- `state_dict` and `load_state_dict`, the lines before the loop of `ds.Run`, and what the program does between two calls
  of `train()`.

## Interruptions

- `on_train_begin` fires in every leg, also on a resume: then `ctx.resumed_from` is the checkpoint, else None. What is
  to happen once per run, or is counted from its start, belongs in the state.
- `on_train_end` does not fire again in a start that finds the run finished. The model then has the weights of the last
  checkpoint, not what `on_train_end` had put into it. Export averaged weights [from the
  checkpoint](callbacks/averages.md) (`EMA`), or write your own in `on_save`.
- If an evaluation is interrupted, by an exception or a stop, `on_evaluate_end` still fires: undo there what
  `on_evaluate_begin` has changed.
- `on_rollback` fires once the run has gone [back to a checkpoint](../guides/stopping.md#roll-back) and all states are
  restored: forget there what your `state_dict` does not contain.
- `on_predict` belongs to `trainer.predict`.
- In [your own loop](../guides/own-loop.md) and under a [pipeline](../guides/parallel.md#pipelines), some events
  cannot be fired.

## Controlling the run

A handler sets a flag of `ctx.control`; all ranks act on it together at the end of the step, even if only one rank set
it. Flags set in `on_log`, `on_log_step` or `on_evaluate` take effect at the end of the same step. On several ranks,
flags set elsewhere take effect within a quarter of a second, so the step at which they do depends on the clock.

| | |
|---|---|
| `ctx.control.roll_back("why")` | go [back to a checkpoint](../guides/stopping.md#roll-back) and train on from there |
| `ctx.control.stop("why")` | end this leg, with a checkpoint; the next start resumes. `save=False`: without one; \
`final=True`: [end the run](../guides/stopping.md#the-runs-end) |
| `ctx.control.should_training_stop = True` | end the run, without a reason: the next start trains nothing |
| `ctx.control.should_abort_without_save = True` | end training without a checkpoint, even if one is due |
| `ctx.control.should_epoch_stop = True` | end the epoch and start the next |
| `ctx.control.should_log`, `should_evaluate`, `should_save` `= True` | do that at the end of this step |
| `ctx.trainer.commands.submit("set", {"save_steps": 50}, by="me")`, on rank 0 | \
[change a setting](../guides/control.md#commands), in later legs too; `ctx.args` itself is fixed while the run trains |
"""


def pages() -> dict[Path, str]:
    """Return the whole page."""
    common = ", ".join(f"`{field.name}`" for field in dataclasses.fields(Context))
    rows = [f"| `{event.handler}` | {event.fires} | {', '.join(_payload(event))} |" for event in Event]
    return {PAGE: HEAD.format(common=common) + "\n".join(rows) + "\n" + TAIL}


def _payload(event: Event) -> list[str]:
    shared = {field.name for field in dataclasses.fields(Context)}
    fields = [field.name for field in dataclasses.fields(event.context)]
    names = [name for name in fields if name not in shared and not name.startswith("_")]
    properties = inspect.getmembers(event.context, lambda member: isinstance(member, property))
    return [f"`{name}`" for name in [*names, *(name for name, _ in properties)]]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
