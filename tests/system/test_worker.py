"""Calls on a thread of their own: order, what they raise, a full queue, the end."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from dalsegno.errors import ConfigurationError
from dalsegno.system.worker import Worker


def test_calls_are_done_in_order_on_another_thread() -> None:
    seen: list[tuple[int, str]] = []
    worker = Worker("observer")
    for number in range(50):
        worker.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    worker.close(60)
    assert seen == [(number, "observer") for number in range(50)]
    assert (worker.counts.ran, worker.counts.failed, worker.counts.dropped) == (50, 0, 0)
    assert "observer" not in [thread.name for thread in threading.enumerate()]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_call_raises_is_logged_and_counted(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    worker = Worker("observer")
    worker.submit(lambda: fail(error))
    worker.submit(lambda: seen.append("after"))
    worker.close(60)
    assert seen == ["after"]
    assert str(worker.counts) == "2 calls, 1 failed, 0 dropped"
    (record,) = caplog.records
    assert record.getMessage() == "observer: a call failed; training continues"
    assert record.exc_info is not None and record.exc_info[1] is error


def test_a_thread_that_dies_is_replaced_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logging handler that raises kills it while it reports a call that failed."""
    seen: list[int] = []
    worker = Worker("observer", size=1, when_full="block")

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    def call(number: int) -> None:
        if number % 2:
            raise ValueError(number)
        seen.append(number)

    def ask() -> None:
        for number in range(6):
            worker.submit(lambda number=number: call(number))

    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # which would tell of each dead thread
    logger = logging.getLogger("dalsegno")
    logger.addHandler(broken := Broken())
    try:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(60)
        assert not asking.is_alive()
        worker.close(60)
    finally:
        logger.removeHandler(broken)
    assert seen == [0, 2, 4]
    assert str(worker.counts) == "6 calls, 3 failed, 0 dropped"


def test_async_functions_are_awaited(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    async def call(number: int) -> None:
        seen.append(number)
        if number == 1:
            raise ValueError("async")

    worker = Worker("observer")
    for number in range(3):
        worker.submit(lambda number=number: call(number))
    worker.close(60)
    assert seen == [0, 1, 2]
    assert worker.counts.failed == 1


def test_a_full_queue_forgets_the_oldest() -> None:
    seen: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    worker = Worker("observer", size=3)
    worker.submit(hold)
    begun.wait(60)
    for number in range(10):
        worker.submit(lambda number=number: seen.append(number))
    go_on.set()
    worker.close(60)
    assert seen == [7, 8, 9]
    assert (worker.counts.ran, worker.counts.dropped) == (4, 7)


def test_or_lets_its_caller_wait() -> None:
    seen: list[int] = []
    begun, go_on, all_given = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    worker = Worker("observer", size=2, when_full="block")

    def give() -> None:
        worker.submit(hold)
        for number in range(10):
            worker.submit(lambda number=number: seen.append(number))
        all_given.set()

    giver = threading.Thread(target=give)
    giver.start()
    begun.wait(60)
    assert not all_given.wait(0.05)
    go_on.set()
    giver.join(60)
    worker.close(60)
    assert seen == list(range(10))
    assert worker.counts.dropped == 0


def test_one_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(60)

    worker = Worker("observer")
    worker.submit(hang)
    begun.wait(60)
    worker.submit(lambda: seen.append("never"))
    worker.close(0.05)
    assert worker.counts.dropped == 1
    assert caplog.messages == ["observer: not done after 0.05 s; abandoned, 1 calls dropped"]
    hanging = next(thread for thread in threading.enumerate() if thread.name == "observer")
    worker.submit(lambda: seen.append("again"))
    go_on.set()
    hanging.join(60)
    worker.close(60)
    assert seen == ["again"]


def test_the_process_ends_although_a_call_hangs() -> None:
    code = (
        "import threading; from dalsegno.system.worker import Worker\n"
        "begun = threading.Event()\n"
        "def hang():\n"
        "    begun.set(); threading.Event().wait()\n"
        "worker = Worker('observer'); worker.submit(hang); begun.wait(); print('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the end\n"


def test_done_at_once_it_is_as_careful(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    worker = Worker("observer")
    worker.do(lambda: fail(SystemExit(1)))
    assert str(worker.counts) == "1 calls, 1 failed, 0 dropped"
    with pytest.raises(KeyboardInterrupt):
        worker.do(lambda: fail(KeyboardInterrupt()))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 1.5}, {"size": True}, {"when_full": "wait"}])
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"observer: (queue|when_full)="):
        Worker("observer", **wrong)  # type: ignore[arg-type]
