"""What a simulation found: figures, a table, a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdecode.planning.simulator import Outcome
from hpcdecode.report.plot import save
from hpcdecode.report.text import table

_QUANTILES = (50, 99)
_RARE = ("preemptions", "recomputed_tokens", "swapped_tokens")


def figures(outcome: Outcome) -> dict[str, Any]:
    """As JSON: seconds, tokens/s, shares of busy time, peak R-load, latency quantiles, and the load over time."""
    done = outcome.latency[np.isfinite(outcome.latency)]
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
        "latency_seconds": {f"p{q}": float(np.percentile(done, q)) for q in _QUANTILES} if len(done) else {},
        "load": outcome.load,
    }


def text(outcome: Outcome) -> str:
    found = figures(outcome)
    del found["load"]
    latency = found.pop("latency_seconds")
    shown = {name: value for name, value in found.items() if value or name not in _RARE}
    rows = [(name.replace("_", " "), _shown(value)) for name, value in shown.items()]
    return table(("", ""), [*rows, *((f"latency {q}", f"{_shown(s)} s") for q, s in latency.items())]).strip()


def draw(outcome: Outcome, pyplot: Any, path: str) -> None:
    """The load and the latencies, as `save`."""
    figure, (load, latency) = pyplot.subplots(2, 1, figsize=(9, 6), layout="constrained")
    load.plot(*zip(*outcome.load, strict=True))
    load.set(xlabel="seconds", ylabel="tokens that a step attends to")
    load.set_ylim(bottom=0)
    latency.plot(np.sort(outcome.latency), np.linspace(0, 1, len(outcome.latency)))
    latency.set(xlabel="seconds from a row's arrival to its end", ylabel="share of rows", ylim=(0, 1))
    save(pyplot, figure, path)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
