"""What counts as movement of a rank."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcdecode.timeline import Timeline
from hpcdecode.watchdog import Vitals


@pytest.fixture
def timeline():
    return Timeline()


def still_after(vitals, action, seconds=1.2):
    """Seconds without movement, as a thread sees it every 0.4 s while `action` is done again and again."""
    with ThreadPoolExecutor(1) as watcher:
        watcher.submit(vitals.take).result()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due = time.monotonic() + 0.4
            while time.monotonic() < due:
                action()
            _, still = watcher.submit(vitals.take).result()
    return still


def test_loading_moves_while_the_process_computes_and_stands_still_while_it_sleeps(timeline):
    vitals = Vitals(timeline, has_s=True)
    assert still_after(vitals, lambda: sum(range(1000))) < 0.3
    assert still_after(vitals, lambda: time.sleep(1e-3)) < 0.3  # as a rank that polls
    assert still_after(vitals, lambda: time.sleep(0.4)) > 0.7


def test_an_operation_of_a_step_has_a_bound_of_its_own(timeline):
    vitals = Vitals(timeline, has_s=True)
    timeline.enter("slice")
    assert still_after(vitals, lambda: sum(range(1000))) > 0.7
    assert still_after(vitals, lambda: timeline.enter("slice")) < 0.3


@pytest.mark.parametrize(
    ("operation", "has_s", "patient"), [("idle", False, True), ("wait", False, True), ("wait", True, False)]
)
def test_an_r_rank_may_wait_for_ever(timeline, operation, has_s, patient):
    vitals = Vitals(timeline, has_s=has_s)
    timeline.enter(operation)
    assert (still_after(vitals, lambda: time.sleep(0.4)) < 0.3) == patient
