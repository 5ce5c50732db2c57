"""FastDecode (He and Zhai 2024): the R-load of its schedules, and its speed against a paged cache on the same GPU.

python jobs/figures/fastdecode.py [-o fastdecode.png]; docs/reproductions.md says what is assumed and what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
from figure import drawn, show
from msgspec.structs import replace as resized
from shapes import SHAPES

from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.outcome import SimulationOutcome
from hpcdecode.planning.servers.base import ServerLimits
from hpcdecode.planning.serving import of_device, serve
from hpcdecode.planning.simulator import SimulatedGroups, simulate
from hpcdecode.schedule.limits import LaneLimits

GPU, SOCKETS, R_RANKS = "a10", "epyc-7003", 4  # four machines of two sockets
LINK, LATENCY = 100e9 / 8, 20e-6  # 100 Gbit/s and 20 us
R_MEMORY = 256e9  # of a machine: 16 modules of 16 GB
PROMPT, NEW = 16, 1024  # tokens of every row
BATCH, STEPS, PERIOD = 128, 512, 32  # of the loads
BATCHES = (128, 256, 512, 1024)
MODELS = ("llama-7b", "llama-13b", "opt-175b")
_STEP = Cost(1, [1, 2], [1.0, 1.0], [1, 2], [0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0.0)  # a second a step


def loads(batch: int = BATCH, steps: int = STEPS, period: int = PERIOD, seed: int = 0) -> dict[str, SimulationOutcome]:
    """Return the R-load of every schedule over time.

    Rows of one prompt token decode for `steps` steps, with the static schedule and with fixed F. Mixed rows decode for
    up to `steps` steps, with fixed F and under load control at the level load.
    """
    fixed = lengths.fixed(6 * batch, 1, steps + 1)
    limits = LaneLimits(batch, period, steps, 1 << 20, None, schedule="fixed-f", load=level(batch, steps, period))
    found = {name: simulate([_world(replace(limits, schedule=name))], fixed) for name in ("static", "fixed-f")}
    new = np.random.default_rng(seed).integers(2, steps + 2, 12 * batch)
    mixed = lengths.Lengths(np.ones_like(new), new, new, np.zeros(len(new)))
    for name in ("fixed-f", "load-control"):
        found[f"{name}, mixed"] = simulate([_world(replace(limits, schedule=name, batch=2 * batch))], mixed)
    return found


def level(batch: int, steps: int, period: int) -> int:
    """Return B*(S+F)/2 (FastDecode, section 4.2) and the tokens of the prompts, one each."""
    return batch + batch * (steps + period) // 2


def _world(limits: LaneLimits) -> SimulatedGroups:
    return SimulatedGroups(_STEP, [1 << 30], [limits])


def fitted(name: str) -> ModelSize:
    """Return a model with as many layers as take no more memory than those of Llama-7b, so that it fits on the GPU."""
    size, layer = SHAPES[name], SHAPES[name].layer_weights // SHAPES[name].layers
    layers = min(size.layers, SHAPES["llama-7b"].layer_weights // layer)
    return resized(size, shapes=size.shapes[:layers], layer_weights=layers * layer)


def split_speed(size: ModelSize, batch: int) -> float:
    """Return the tokens per second of the steady state: of the later rows of a longer run."""
    cost = of_devices(size, device(GPU), device(SOCKETS), LINK, LATENCY)
    capacity = [int(R_MEMORY / size.kv_bytes_per_token())] * R_RANKS
    world = SimulatedGroups(cost, capacity, 2 * [LaneLimits(batch // 2, NEW // 16, NEW - 1, 512, None)])
    short, long = (simulate([world], lengths.fixed(n * batch, PROMPT, NEW)) for n in (2, 5))
    return (long.tokens - short.tokens) / (long.seconds - short.seconds)


def paged_speed(size: ModelSize) -> float:
    """Return the tokens per second of the GPU alone, with vLLM's schedule and defaults, all rows there at the start."""
    server = of_device(size, device(GPU))
    limits = ServerLimits(256, 2048)
    short, long = (serve(server, "vllm", limits, lengths.fixed(n, PROMPT, NEW)) for n in (150, 450))
    return (long.tokens - short.tokens) / (long.seconds - short.seconds)


def ratios(models: Sequence[str] = MODELS, batches: Sequence[int] = BATCHES) -> dict[str, dict[int, float]]:
    """Return the speed of the split over the GPU alone, by model and B."""
    found = {}
    for name in models:
        size = fitted(name)
        paged = paged_speed(size)
        found[name] = {batch: split_speed(size, batch) / paged for batch in batches}
    return found


def draw(pyplot: ModuleType, over_time: dict[str, SimulationOutcome], faster: dict[str, dict[int, float]]) -> Any:
    """Return a figure of the loads over time, and of the speeds."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    for axis, names in zip(axes, (("static", "fixed-f"), ("fixed-f, mixed", "load-control, mixed")), strict=False):
        for name in names:
            axis.plot(*zip(*over_time[name].load, strict=True), label=name)
        axis.axhline(level(BATCH, STEPS, PERIOD), color="grey", linestyle=":", label="B*(S+F)/2 + B*p, W_lim")
        axis.set(xlabel="step", ylabel="tokens that a step attends to")
        axis.legend()
    for name, ratio in faster.items():
        axes[2].plot(list(ratio), list(ratio.values()), "o-", label=name)
    axes[2].axhspan(1.88, 5.04, color="grey", alpha=0.2, label="published")
    axes[2].set(xlabel="B", ylabel="speed over the paged cache on the GPU", ylim=(0, None))
    axes[2].legend()
    return figure


def main() -> None:
    """Save the picture and print the tables."""
    over_time, faster = loads(), ratios()
    drawn("fastdecode.png", lambda pyplot: draw(pyplot, over_time, faster))
    limit = level(BATCH, STEPS, PERIOD)
    show(
        ("schedule", "peak load", "of B*(S+F)/2 + B*p", "steps"),
        [(name, o.peak_load, o.peak_load / limit, o.steps) for name, o in over_time.items()],
    )
    show(
        ("model", "layers", *(f"B = {b}" for b in BATCHES)),
        [(name, fitted(name).layers, *ratio.values()) for name, ratio in faster.items()],
    )


if __name__ == "__main__":
    main()
