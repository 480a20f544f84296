"""Writes docs/events.md from dalsegno.events.table: ``python docs/events.py``. A test compares the two."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from dalsegno.events.contexts import Context
from dalsegno.events.table import Event

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# The events

<!-- Written by docs/events.py from src/dalsegno/events/table.py. -->

A callback has a method for each event that it wants to hear of, `def on_save(self, ctx)`. This is the whole table, in
the order in which a run fires it. Every `ctx` has {common}; what an event adds to it stands in the last column.

A *micro-batch* is one forward and backward, a *step* one update of the weights. `state.global_step` counts finished
steps: from `on_step_begin` to `on_optimizer_step` it still shows the previous count, from `on_step_end` on the new one.
`state.will_log`, `state.will_evaluate` and `state.will_save` are known from `on_step_begin` on.

A `ctx` is reused for the next firing: use it inside the handler, or keep `ctx.copy()`. Numbers that lie on a device
(`loss`, `grad_norm`) are fetched when they are read. A step's `loss` is this rank's share; `logs`, `metrics` and
`grad_norm` are of all ranks.

At a step's end: `on_step_end`, `on_train_metrics`, `on_log_step`, `on_log`, then for each evaluation set
`on_evaluate_begin`, its batches, `on_evaluate_end`, `on_log_step`, `on_log` (kind `eval`), `on_evaluate`; then
`on_before_save`, the state is captured, `on_step_done`. So a checkpoint contains all that happened in its step, but for
the last. `on_save` comes once the checkpoint is on the disk and published: with background saves at a later step's end,
else at this one's. A resumed run does not repeat these two, and no state should hang on them.

Where an evaluation is broken off, by an exception or because the run is to stop, `on_evaluate_end` comes all the same:
what `on_evaluate_begin` has changed can be changed back there. `on_predict` belongs to `trainer.predict`; nothing fires
`on_rollback` yet. In [your own loop](own-loop.md) some events cannot be fired.

| handler | fires | adds to ctx |
|---|---|---|
"""

TAIL = """
## Asking for something

A handler sets a flag of `ctx.control`, and the run acts on it at the step's end, on all ranks together; any rank's wish
counts. What is set in `on_log`, `on_log_step` or `on_evaluate` is acted on at that same step. On several ranks, what is
set elsewhere waits up to a quarter of a second, so at which step it comes depends on the clock.

| | |
|---|---|
| `ctx.control.stop("why")` | end the training, with a checkpoint; `save=False`: without one |
| `ctx.control.should_training_stop = True` | the same, without a reason in words |
| `ctx.control.should_abort_without_save = True` | end the training without a checkpoint, even if one is due |
| `ctx.control.should_epoch_stop = True` | end the epoch, go on with the next |
| `ctx.control.should_log`, `should_evaluate`, `should_save` `= True` | do that at this step's end |

`ctx.state` says where the run stands: `global_step`, `epoch`, `max_steps` (-1: unknown), `num_input_tokens_seen`,
`samples_seen`, `best_metric`, `best_global_step`, `best_model_checkpoint`, `is_world_process_zero`, and what the
step's end is going to do: `will_log`, `will_evaluate`, `will_save`.
"""


def page() -> str:
    """The whole page."""
    common = ", ".join(f"`{field.name}`" for field in dataclasses.fields(Context))
    rows = [f"| `{event.handler}` | {event.fires} | {', '.join(_payload(event))} |" for event in Event]
    return HEAD.format(common=common) + "\n".join(rows) + "\n" + TAIL


def _payload(event: Event) -> list[str]:
    shared = {field.name for field in dataclasses.fields(Context)}
    fields = [field.name for field in dataclasses.fields(event.context)]
    names = [name for name in fields if name not in shared and not name.startswith("_")]
    properties = inspect.getmembers(event.context, lambda member: isinstance(member, property))
    return [f"`{name}`" for name in [*names, *(name for name, _ in properties)]]


if __name__ == "__main__":
    PAGE.write_text(page())
