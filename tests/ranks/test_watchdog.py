"""What counts as movement of a rank."""

import threading
import time

import pytest

from hpcdecode.ranks.watchdog import Vitals
from hpcdecode.system.timeline import Timeline


@pytest.fixture
def timeline():
    return Timeline()


def still_during(vitals, action, reports=6, every=0.25):
    """Seconds without movement, as a thread sees them in its later reports while `action` is done again and again."""
    still = []

    def watch():
        for _ in range(reports):
            still.append(vitals.take()[1])
            time.sleep(every)

    watcher = threading.Thread(target=watch)
    watcher.start()
    while watcher.is_alive():
        action()
    return still[2:]


def test_loading_moves_while_the_process_computes_and_stands_still_while_it_sleeps(timeline):
    vitals = Vitals(timeline, has_s=True)
    assert min(still_during(vitals, lambda: sum(range(1000)))) < 0.3
    assert min(still_during(vitals, lambda: time.sleep(1e-3))) < 0.3  # as a rank that polls
    asleep = (max(still_during(vitals, lambda: time.sleep(2))) for _ in range(5))
    assert any(still > 0.6 for still in asleep)  # once is enough: other threads of this process may have things to do


def test_an_operation_of_a_step_has_a_bound_of_its_own(timeline):
    vitals = Vitals(timeline, has_s=True)
    timeline.enter("slice")
    assert max(still_during(vitals, lambda: sum(range(1000)))) > 0.6
    assert min(still_during(vitals, lambda: timeline.enter("slice"))) < 0.3


@pytest.mark.parametrize(
    ("operation", "has_s", "patient"), [("idle", False, True), ("wait", False, True), ("wait", True, False)]
)
def test_an_r_rank_may_wait_for_ever(timeline, operation, has_s, patient):
    vitals = Vitals(timeline, has_s=has_s)
    timeline.enter(operation)
    assert (max(still_during(vitals, lambda: time.sleep(2))) < 0.3) == patient
