"""Random kills are certain to happen, whatever the run."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.events.table import Event
from dalsegno.testing.faults import EventTrace


@st.composite
def traces(draw: st.DrawFn) -> EventTrace:
    steps = draw(st.integers(1, 60))
    saves = draw(st.lists(st.integers(1, steps), unique=True))
    return EventTrace(steps, {step: draw(st.integers(1, 9)) for step in saves})


@settings(max_examples=200)
@given(traces(), st.integers(0, 1 << 40))
def test_each_kill_is_ahead_of_its_leg(trace: EventTrace, seed: int) -> None:
    kills = trace.random_kills(seed)
    between = [plan for plan in kills if plan.event is not None]
    saving = [plan for plan in kills if plan.operation is not None]
    assert kills == between + saving
    assert len(between) == (trace.steps > 1)
    steps_done = between[0].count - 1 if between else 0
    for plan in between:
        assert plan.event is Event.STEP_BEGIN
        assert 1 <= steps_done < trace.steps
    assert len(saving) == any(step > steps_done for step in trace.writes)
    for plan in saving:
        step = int(plan.path.removeprefix("step-").removesuffix(".partial"))
        assert step > steps_done
        assert 1 <= plan.count <= trace.writes[step]


@settings(max_examples=50)
@given(traces(), st.integers())
def test_the_same_seed_gives_the_same_kills(trace: EventTrace, seed: int) -> None:
    assert trace.random_kills(seed) == trace.random_kills(seed)


def test_a_kill_between_checkpoints_costs_steps() -> None:
    trace = EventTrace(12, {4: 8, 8: 8, 12: 8})
    for seed in range(20):
        assert trace.random_kills(seed)[0].count - 1 in {5, 6, 7, 9, 10, 11}
