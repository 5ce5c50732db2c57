"""What a rank is doing: at every moment one operation, so that the seconds of all of them are the wall time.

Monotonic nanoseconds throughout. One thread enters operations; any thread may ask for the current one.
"""

from __future__ import annotations

from array import array
from time import perf_counter_ns

import msgspec

OPERATIONS = {  # in the order in which reports show them
    "plan": "S makes and announces a step's plan; R frees and makes room",
    "slice": "S computes between two attentions",
    "logits": "S computes the last slice",
    "post": "S sends q, k, v; R sends o",
    "prefill": "S attends for prompts",
    "take": "S puts o where the next slice reads it",
    "sample": "S draws tokens",
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
    """Operations in order, each lasting until the next begins. starts: int64 nanoseconds; lanes: int16, -1 for none.

    loads, load_starts: int64 samples of the tokens in the rank's KV cache. All are the bytes of arrays.
    """

    codes: bytes  # int8, positions in OPERATIONS
    lanes: bytes
    starts: bytes
    loads: bytes
    load_starts: bytes


class Timeline:
    """The operations of one rank since its creation: seconds by operation, and single spans if `trace` is set.

    The first MOST_SPANS spans are kept; seconds count on.
    """

    def __init__(self, trace: bool = False) -> None:
        self.began = self._lap = perf_counter_ns()
        self.current: tuple[str, int] = ("load", self.began)  # operation, since when
        self.load = KvLoadHistory()
        self._totals = dict.fromkeys(OPERATIONS, 0)
        self._codes, self._lanes, self._starts = array("b"), array("h"), array("q")
        self._room = MOST_SPANS if trace else 0
        self._keep("load", -1, self.began)

    def enter(self, operation: str, lane: int = -1, since: float = 0.0) -> None:
        """The current operation ends here, and `operation` (one of OPERATIONS) begins; both `since` seconds ago."""
        now = perf_counter_ns() - int(since * 1e9)
        before, since = self.current
        self._totals[before] += now - since
        self.current = (operation, now)
        if self._room:
            self._keep(operation, lane, now)

    def seconds(self, *operations: str) -> float:
        """Spent in `operations` up to the last `enter`; in all if none is named."""
        return sum(self._totals[o] for o in operations or OPERATIONS) * 1e-9

    def shares(self) -> dict[str, float]:
        """Seconds of every operation that took any."""
        return {o: ns * 1e-9 for o, ns in self._totals.items() if ns}

    def lap(self) -> float:
        """Seconds since the last call, or since the creation."""
        before, self._lap = self._lap, perf_counter_ns()
        return (self._lap - before) * 1e-9

    def spans(self) -> Spans:
        """What was kept; an open span counts as ending where the last one began."""
        load = self.load
        return Spans(*(a.tobytes() for a in (self._codes, self._lanes, self._starts, load.values, load.starts)))

    def _keep(self, operation: str, lane: int, now: int) -> None:
        if self._room:
            self._room -= 1
            self._codes.append(_CODES[operation])
            self._lanes.append(lane)
            self._starts.append(now)


class KvLoadHistory:
    """Tokens in a rank's KV cache, plan by plan; of a long job every second, fourth, ... plan, at most MOST_LOADS."""

    def __init__(self) -> None:
        self.values, self.starts = array("q"), array("q")
        self._plans, self._every = 0, 1

    def add(self, tokens: int) -> None:
        if self._plans % self._every == 0:
            if len(self.values) == MOST_LOADS:
                self.values, self.starts = self.values[::2], self.starts[::2]
                self._every *= 2
            self.values.append(tokens)
            self.starts.append(perf_counter_ns())
        self._plans += 1
