"""The seconds of a rank's operations, and its spans."""

from __future__ import annotations

import time
from array import array
from itertools import pairwise

import pytest

from hpcdecode.system.timeline import MOST_LOADS, OPERATIONS, Timeline


def test_the_seconds_of_all_operations_are_the_wall_time():
    timeline = Timeline()
    for operation in ("slice", "post", "slice", "wait"):
        timeline.enter(operation)
        time.sleep(0.002)
    timeline.enter("other")
    wall = (timeline.current[1] - timeline.began) * 1e-9
    assert timeline.seconds() == pytest.approx(wall) == pytest.approx(sum(timeline.shares().values()))
    assert timeline.seconds("slice") >= 0.004 and timeline.seconds("slice", "post") >= 0.006
    assert timeline.seconds("attend") == 0 and "attend" not in timeline.shares()


def test_the_current_operation_is_known_with_its_beginning():
    timeline = Timeline()
    assert timeline.current == ("load", timeline.began)
    before = time.perf_counter_ns()
    timeline.enter("wait", 1)
    operation, since = timeline.current
    assert operation == "wait" and before <= since <= time.perf_counter_ns()


def test_spans_are_kept_for_a_trace_alone():
    kept, other = Timeline(trace=True), Timeline()
    for timeline in (kept, other):
        timeline.enter("slice", 1)
        timeline.enter("wait")
    assert other.spans().codes == b""
    spans = kept.spans()
    assert [list(OPERATIONS)[code] for code in array("b", spans.codes)] == ["load", "slice", "wait"]
    assert array("h", spans.lanes).tolist() == [-1, 1, -1]
    starts = array("q", spans.starts).tolist()
    assert starts == sorted(starts) and starts[0] == kept.began


def test_the_load_of_a_long_job_is_thinned_out():
    timeline = Timeline()
    for tokens in range(10 * MOST_LOADS):
        timeline.load.add(tokens)
    values = array("q", timeline.spans().loads).tolist()
    assert MOST_LOADS // 2 <= len(values) <= MOST_LOADS
    assert values[0] == 0 and len({b - a for a, b in pairwise(values)}) == 1
