"""Ranks that agree, step by step, on what one of them has seen."""

from __future__ import annotations

from dalsegno import ranks
from dalsegno.agreement import Agreement
from dalsegno.state import NO_WISHES, TrainerControl, Wishes


def agree_on_what_rank_one_sees(each_step: bool) -> tuple[int, Wishes, str | None, bool]:
    """From its 50th step on, rank 1 sees a reason to stop. At which step each rank hears of it, and what."""
    control = TrainerControl()
    step = 0

    def look() -> Wishes:
        if ranks.rank() == 1 and step >= 50:
            control.stop("seen by rank 1", by="a clock")
            return Wishes(stop=True, landed=True)
        return NO_WISHES

    agreement = Agreement(control, [look, lambda: NO_WISHES], each_step=each_step)
    while True:
        step += 1
        wishes = agreement.at_step()
        if wishes.stop:
            agreement.share_reason()
            return step, wishes, control.stop_reason, control.should_training_stop
