"""What a simulation found: figures, a table, a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import log2
from typing import TYPE_CHECKING, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcdecode.report.plot import save
from hpcdecode.report.text import table

if TYPE_CHECKING:
    from types import ModuleType

_SAMPLES = 512  # of the load that are kept at least; twice as many at most
_QUANTILES = (50, 99)
_OCTAVE = 100
_RARE = (  # left out of the table if they are 0
    "preemptions",
    "recomputed_tokens",
    "swapped_tokens",
    "swap_in_bytes",
    "swap_out_bytes",
    "swap_wait_seconds",
)


class SimulationOutcome(msgspec.Struct, frozen=True):
    """What a simulation found.

    Attributes:
        seconds: From the start to the last row's end.
        rows: Rows that ran.
        refused: Rows that could never run.
        tokens: Tokens that were generated.
        steps: Decode steps.
        s_seconds: Busy seconds of an S-rank, the mean over the S-ranks.
        r_seconds: Busy seconds of an R-rank, the mean over the R-ranks.
        peak_load: Most tokens that a step attended to.
        load: (seconds, tokens) over time, at most twice 512 samples.
        latency: Seconds of every row from its arrival to its end, float64 [rows]; NaN for refused rows.
        preemptions: How often a simulated server took the memory of a running request.
        recomputed: Tokens whose K and V a server computed again.
        swapped: Tokens whose K and V a server moved between device and host.
        gaps: Between two tokens of a row; of groups they are the seconds of steps.
        largest_gap: Most seconds between two tokens of every row (FluidInfer's latency bound), float64 [rows]; NaN for
            rows of one token and refused rows.
        swap_in_bytes: That came from tiers of R-ranks.
        swap_out_bytes: That went there.
        swap_wait_seconds: In which attention waited for them, of all R-ranks together.
    """

    seconds: float
    rows: int
    refused: int
    tokens: int
    steps: int
    s_seconds: float
    r_seconds: float
    peak_load: int
    load: list[tuple[float, int]]
    latency: NDArray[np.float64]
    preemptions: int = 0
    recomputed: int = 0
    swapped: int = 0
    gaps: Gaps = msgspec.field(default_factory=lambda: Gaps())
    largest_gap: NDArray[np.float64] = msgspec.field(default_factory=lambda: np.empty(0))
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    swap_wait_seconds: float = 0.0

    @property
    def latency_bound(self) -> float:
        """Return the mean over rows of the largest gap between two tokens (FluidInfer); NaN if it is not known."""
        known = self.largest_gap[np.isfinite(self.largest_gap)]
        return float(known.mean()) if len(known) else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Return the generated tokens per second."""
        return self.tokens / max(self.seconds, 1e-12)


class Gaps:
    """Seconds between two tokens of a row: those of the steps, by the rows that decode in them.

    Attributes:
        counts: Gaps, by their logarithm in hundredths of an octave.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    @classmethod
    def of(cls, parts: Iterable[Gaps]) -> Gaps:
        """Return the gaps of several worlds."""
        made = cls()
        for part in parts:
            made.counts.update(part.counts)
        return made

    def add(self, seconds: float, rows: int) -> None:
        """Count a step in which so many rows decode."""
        if rows and seconds > 0:
            self.counts[round(_OCTAVE * log2(seconds))] += rows

    def quantiles(self) -> dict[str, float]:
        """Return quantiles in seconds, to 0.4 %; none if there are no gaps."""
        keys = sorted(self.counts)
        total = np.cumsum([self.counts[key] for key in keys])
        places = {q: int(np.searchsorted(total, total[-1] * q / 100)) for q in _QUANTILES} if keys else {}
        return {f"p{q}": 2.0 ** (keys[place] / _OCTAVE) for q, place in places.items()}


class LoadHistory:
    """Tokens that steps attend to.

    Attributes:
        peak: The most so far.
        samples: (seconds, tokens) of every step, then of every second, fourth, ... step.
    """

    def __init__(self) -> None:
        self.peak = 0
        self.samples: list[tuple[float, int]] = []
        self._seen, self._every = 0, 1

    def add(self, seconds: float, tokens: int) -> None:
        """Count a step at `seconds` that attends to `tokens` tokens, of all groups."""
        self.peak = max(self.peak, tokens)
        self._seen += 1
        if self._seen % self._every == 0:
            self.samples.append((seconds, tokens))
            if len(self.samples) == 2 * _SAMPLES:
                self.samples, self._every = self.samples[1::2], 2 * self._every


class Figures(TypedDict):
    """What `hpcdecode simulate --json` prints."""

    rows: int
    refused: int
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    steps: int
    s_busy: float
    r_busy: float
    peak_load_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    swap_in_bytes: int
    swap_out_bytes: int
    swap_wait_seconds: float
    latency_seconds: dict[str, float]
    gap_seconds: dict[str, float]
    latency_bound_seconds: dict[str, float]
    load: list[tuple[float, int]]


def figures(outcome: SimulationOutcome) -> Figures:
    """Return the figures of an outcome; `s_busy` and `r_busy` are shares of the time."""
    done = outcome.latency[np.isfinite(outcome.latency)]
    bounds = outcome.largest_gap[np.isfinite(outcome.largest_gap)]
    return {
        "rows": outcome.rows,
        "refused": outcome.refused,
        "generated_tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "steps": outcome.steps,
        "s_busy": outcome.s_seconds / max(outcome.seconds, 1e-12),
        "r_busy": outcome.r_seconds / max(outcome.seconds, 1e-12),
        "peak_load_tokens": outcome.peak_load,
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed,
        "swapped_tokens": outcome.swapped,
        "swap_in_bytes": outcome.swap_in_bytes,
        "swap_out_bytes": outcome.swap_out_bytes,
        "swap_wait_seconds": outcome.swap_wait_seconds,
        "latency_seconds": {f"p{q}": float(np.percentile(done, q)) for q in _QUANTILES} if len(done) else {},
        "gap_seconds": outcome.gaps.quantiles(),
        "latency_bound_seconds": {"mean": float(bounds.mean()), "max": float(bounds.max())} if len(bounds) else {},
        "load": outcome.load,
    }


def text(outcome: SimulationOutcome) -> str:
    """Return the figures as a table."""
    found = figures(outcome)
    values = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    rows = [(name.replace("_", " "), _shown(value)) for name, value in values.items() if value or name not in _RARE]
    rows += [(f"latency {quantile}", f"{_shown(s)} s") for quantile, s in found["latency_seconds"].items()]
    rows += [(f"gap of two tokens {quantile}", f"{_shown(s)} s") for quantile, s in found["gap_seconds"].items()]
    rows += [(f"latency bound {what}", f"{_shown(s)} s") for what, s in found["latency_bound_seconds"].items()]
    return table(("", ""), rows).strip()


def draw(outcome: SimulationOutcome, pyplot: ModuleType, path: str) -> None:
    """Draw the load over time and the distribution of the latencies, and save the picture.

    Raises:
        UserError: If the file cannot be written.
    """
    figure, (load, latency) = pyplot.subplots(2, 1, figsize=(9, 6), layout="constrained")
    load.plot(*zip(*outcome.load, strict=True))
    load.set(xlabel="seconds", ylabel="tokens that a step attends to")
    load.set_ylim(bottom=0)
    latency.plot(np.sort(outcome.latency), np.linspace(0, 1, len(outcome.latency)))
    latency.set(xlabel="seconds from a row's arrival to its end", ylabel="share of rows", ylim=(0, 1))
    save(pyplot, figure, path)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
