"""Timeline of a rank: exactly one operation at every moment, so that all seconds add up to the wall time.

Times are monotonic nanoseconds. One thread enters operations; any thread may read the current one.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns

import msgspec

OPERATIONS = {  # in the order of reports
    "plan": "S makes and announces a step's plan; R frees and makes room",
    "slice": "S computes between two attentions",
    "logits": "S computes the last slice",
    "post": "S sends q, k, v; R sends o",
    "prefill": "S attends for prompts",
    "sum": "S adds up with the other members of its group",
    "take": "S puts o where the next slice reads it",
    "sample": "S draws tokens",
    "draft": "S guesses tokens with its second model",
    "commit": "S takes the tokens and hands on finished rows",
    "desk": "S writes results, shows progress, serves other S-ranks",
    "append": "R stores K and V of prompts",
    "attend": "R attends",
    "wait": "S waits for o, R for q, k, v",
    "idle": "R has no plan",
    "load": "model and KV cache are made ready",
    "end": "results are made final",
    "other": "anything else",
}
_CODES = {name: code for code, name in enumerate(OPERATIONS)}
MOST_SPANS = 1 << 20
MOST_LOADS = 1 << 12


class Spans(msgspec.Struct):
    """Operations in order, each of which lasts until the next one begins. Every field holds the bytes of an array.

    Attributes:
        codes: Positions in OPERATIONS, int8.
        lanes: Lanes, int16; -1 for none.
        starts: Begins, int64 nanoseconds.
        loads: Samples of the tokens in the rank's KV cache, int64.
        load_starts: Times of these samples, int64 nanoseconds.
    """

    codes: bytes
    lanes: bytes
    starts: bytes
    loads: bytes
    load_starts: bytes


class Timeline:
    """Operations of one rank since this object was made.

    Args:
        trace: Keep single spans, the first MOST_SPANS of them, beside the seconds of every operation.

    Attributes:
        current: Operation under way, and its begin in nanoseconds.
        load: History of the tokens in the rank's KV cache.
    """

    def __init__(self, trace: bool = False) -> None:
        self.began = self._lap = perf_counter_ns()
        self.current: tuple[str, int] = ("load", self.began)
        self.load = KvLoadHistory()
        self._totals = dict.fromkeys(OPERATIONS, 0)
        self._codes, self._lanes, self._starts = array("b"), array("h"), array("q")
        self._spans_left = MOST_SPANS if trace else 0
        self._keep("load", -1, self.began)

    def enter(self, operation: str, lane: int = -1, since: float = 0.0) -> None:
        """End the current operation and begin another.

        Args:
            operation: One of OPERATIONS.
            lane: Lane that it works for; -1 for none.
            since: Seconds that have passed since the change.
        """
        now = perf_counter_ns() - int(since * 1e9)
        before, began = self.current
        self._totals[before] += now - began
        self.current = (operation, now)
        if self._spans_left:
            self._keep(operation, lane, now)

    def seconds(self, *operations: str) -> float:
        """Return the seconds in `operations` up to the last `enter`, or in all of them if none is named."""
        return sum(self._totals[o] for o in operations or OPERATIONS) * 1e-9

    def shares(self) -> dict[str, float]:
        """Return the seconds of every operation that took any."""
        return {o: ns * 1e-9 for o, ns in self._totals.items() if ns}

    def lap(self) -> float:
        """Return the seconds since the last call, or since this object was made."""
        before, self._lap = self._lap, perf_counter_ns()
        return (self._lap - before) * 1e-9

    def spans(self) -> Spans:
        """Return the spans that were kept. The last of them has no end."""
        load = self.load
        return Spans(*(a.tobytes() for a in (self._codes, self._lanes, self._starts, load.values, load.starts)))

    def _keep(self, operation: str, lane: int, now: int) -> None:
        if self._spans_left:
            self._spans_left -= 1
            self._codes.append(_CODES[operation])
            self._lanes.append(lane)
            self._starts.append(now)


class KvLoadHistory:
    """Samples of the tokens in a rank's KV cache, at most MOST_LOADS.

    They are taken at every plan; in a long job at every second, fourth, ... plan.

    Attributes:
        values: Tokens, int64.
        starts: Times in nanoseconds, int64.
    """

    def __init__(self) -> None:
        self.values, self.starts = array("q"), array("q")
        self._plans, self._every = 0, 1

    def add(self, tokens: int) -> None:
        """Count a plan at which the KV cache holds `tokens` tokens."""
        if self._plans % self._every == 0:
            if len(self.values) == MOST_LOADS:
                self.values, self.starts = self.values[::2], self.starts[::2]
                self._every *= 2
            self.values.append(tokens)
            self.starts.append(perf_counter_ns())
        self._plans += 1
