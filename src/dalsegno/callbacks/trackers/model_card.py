"""Model card: describes a checkpoint in Markdown."""

from __future__ import annotations

from typing import Any

from dalsegno.events.contexts import SaveContext
from dalsegno.logs.values import to_json

from .privacy import public


def model_card(ctx: SaveContext) -> str:
    """Return step, best metric, newest numbers and settings of the checkpoint that was saved. No wall-clock times."""
    state = ctx.state
    facts: dict[str, Any] = {
        "checkpoint": ctx.path.name,
        "step": ctx.step,
        "epoch": round(state.epoch, 4),
        "best so far": "yes" if ctx.is_best else "no",
        "best metric": state.best_metric,
        "tokens": state.num_input_tokens_seen,
        "model": type(ctx.model).__name__,
    }
    settings = public(to_json(ctx.args.to_dict()))
    lines = [f"# {ctx.args.run_name or ctx.args.directory.name}, step {ctx.step}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    lines += ["", "| setting | value |", "|---|---|"]
    lines += [f"| `{name}` | `{value}` |" for name, value in settings.items() if value is not None]
    return "\n".join(lines) + "\n"
