"""What makes a job stop early, and the exit code that follows."""

import os
import signal
import time

import pytest

from hpcdecode.system.signals import DRAINED, END_TIME, Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_says_stop_and_its_repetition_nothing_more(number):
    with Signals() as signals:
        assert not signals.stopping and signals.exit_code == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.stopping and signals.cause == number.name
        assert signals.exit_code == (DRAINED if number == signal.SIGUSR1 else 128 + number)
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.fixture
def interrupts():
    """SIGINT as a terminal's processes have it; those of a shell's background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_held_once_there_is_something_to_keep(interrupts):
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert "before the first step" in signals.interruption
        signals.hold_interrupts()
        signal.raise_signal(signal.SIGINT)
        assert signals.stopping and signals.exit_code == 128 + signal.SIGINT
        assert "again" in signals.interruption
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def drain(seconds, left):
    signals = Signals()
    return signals, signals.drain_before(seconds, {} if left is None else {END_TIME: left})


def ending_in(seconds):
    return str(int(time.time() + seconds))


def test_the_end_of_the_time_drains():
    signals, said = drain(2, ending_in(5))
    assert not signals.stopping and "stops 2 s before its end" in said and "not" not in said
    while not signals.stopping:
        time.sleep(0.05)
    assert signals.exit_code == DRAINED and signals.cause == "the end of its time"


@pytest.mark.parametrize(("drain_before", "left"), [(120, None), (120, "")])
def test_no_time_limit(drain_before, left):
    signals, said = drain(drain_before, left)
    assert not signals.stopping and not said


@pytest.mark.parametrize(
    "left", ["soon", "-5", "0", "1e9", ending_in(-10)], ids=["text", "negative", "zero", "far", "past"]
)
def test_an_absurd_end_is_named_and_does_not_stop_the_job(left):
    signals, said = drain(120, left)
    assert not signals.stopping and f"{END_TIME}: expected a Unix time to come, got {left!r}" in said


def test_a_time_shorter_than_the_drain_is_used_by_half():
    signals, said = drain(120, ending_in(60))
    assert not signals.stopping and "stops 30 s before its end, not 120 s (--drain-before)" in said


def test_zero_never_drains():
    signals, said = drain(0, ending_in(0.5))
    time.sleep(1)
    assert not signals.stopping and not said
