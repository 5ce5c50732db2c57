"""What counts as movement of a rank."""

import threading
import time

import pytest

from hpcdecode.timeline import Timeline
from hpcdecode.watchdog import Vitals


@pytest.fixture
def timeline():
    return Timeline()


def still_after(vitals, action, reports=4, every=0.25):
    """Seconds without movement, as a thread sees it after several reports while `action` is done again and again."""
    still = []

    def watch():
        for _ in range(reports):
            still.append(vitals.take()[1])
            time.sleep(every)

    watcher = threading.Thread(target=watch)
    watcher.start()
    while watcher.is_alive():
        action()
    return still[-1]


def test_loading_moves_while_the_process_computes_and_stands_still_while_it_sleeps(timeline):
    vitals = Vitals(timeline, has_s=True)
    assert still_after(vitals, lambda: sum(range(1000))) < 0.3
    assert still_after(vitals, lambda: time.sleep(1e-3)) < 0.3  # as a rank that polls
    assert still_after(vitals, lambda: time.sleep(1.1)) > 0.6


def test_an_operation_of_a_step_has_a_bound_of_its_own(timeline):
    vitals = Vitals(timeline, has_s=True)
    timeline.enter("slice")
    assert still_after(vitals, lambda: sum(range(1000))) > 0.6
    assert still_after(vitals, lambda: timeline.enter("slice")) < 0.3


@pytest.mark.parametrize(
    ("operation", "has_s", "patient"), [("idle", False, True), ("wait", False, True), ("wait", True, False)]
)
def test_an_r_rank_may_wait_for_ever(timeline, operation, has_s, patient):
    vitals = Vitals(timeline, has_s=has_s)
    timeline.enter(operation)
    assert (still_after(vitals, lambda: time.sleep(1.1)) < 0.3) == patient
