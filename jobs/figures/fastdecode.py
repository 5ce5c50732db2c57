"""FastDecode (He and Zhai 2024): the R-load of its schedules, and its speed against a paged cache on the same GPU.

python jobs/figures/fastdecode.py [-o fastdecode.png], --settings for the range of every setting, and --help for flags;
docs/reproductions.md says what is assumed and what comes out. The paper does not state its CPUs, layers or lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from figure import drawn, flags, show
from msgspec.structs import replace as resized
from shapes import SHAPES

from hpcdecode.planning import lengths
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, Device, device
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
OVER_VLLM, OVER_ALL = (1.88, 5.04), (1.88, 8.7)  # published: over vLLM; over vLLM, TensorRT-LLM and others
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


class Testbed(NamedTuple):
    """What is assumed of the testbed.

    Attributes:
        name: Of the row.
        cpu_share: Share of the sockets' bandwidth that attention reaches.
        gpu_share: Share of the A10's peak FLOP/s that products reach.
        prompt: Prompt tokens of every row.
        new: New tokens of every row.
        layers: Of the largest model; None for as many as fit.
    """

    name: str = "as assumed elsewhere"
    cpu_share: float = BANDWIDTH_EFFICIENCY
    gpu_share: float = COMPUTE_EFFICIENCY
    prompt: int = PROMPT
    new: int = NEW
    layers: int | None = None


SETTINGS = (
    Testbed(),
    Testbed("16 + 512 tokens", new=512),
    Testbed("tuned: CPUs at 0.52 of their bandwidth", 0.52),
    Testbed("tuned: that, and OPT-175b with 1 layer", 0.52, layers=1),
    Testbed("tuned: CPUs at 0.5, A10 at 0.4 of its peak, OPT-175b with 2 layers", 0.5, 0.4, layers=2),
)


def fitted(name: str, setting: Testbed = SETTINGS[0]) -> ModelSize:
    """Return a model with as many layers as take no more memory than those of Llama-7b, so that it fits on the GPU."""
    size, layer = SHAPES[name], SHAPES[name].layer_weights // SHAPES[name].layers
    layers = min(size.layers, SHAPES["llama-7b"].layer_weights // layer)
    if setting.layers is not None and name == MODELS[-1]:
        layers = min(setting.layers, layers)
    return resized(size, shapes=size.shapes[:layers], layer_weights=layers * layer)


def _gpu(setting: Testbed) -> Device:
    gpu = device(GPU)
    return replace(gpu, curve=replace(gpu.curve, flop_share=setting.gpu_share))


def split_speed(size: ModelSize, batch: int, setting: Testbed = SETTINGS[0]) -> float:
    """Return the tokens per second of the steady state: of the later rows of a longer run."""
    sockets = replace(device(SOCKETS), cache_share=setting.cpu_share)
    cost = of_devices(size, _gpu(setting), sockets, LINK, LATENCY)
    capacity = [int(R_MEMORY / size.kv_bytes_per_token())] * R_RANKS
    new = setting.new
    world = SimulatedGroups(cost, capacity, 2 * [LaneLimits(batch // 2, max(new // 16, 1), max(new - 1, 1), 512, None)])
    short, long = (simulate([world], lengths.fixed(n * batch, setting.prompt, new)) for n in (2, 5))
    return (long.tokens - short.tokens) / (long.seconds - short.seconds)


def paged_speed(size: ModelSize, setting: Testbed = SETTINGS[0]) -> float:
    """Return the tokens per second of the GPU alone, with vLLM's schedule and defaults, all rows there at the start."""
    server = of_device(size, _gpu(setting))
    limits = ServerLimits(256, 2048)
    rows = (lengths.fixed(n, setting.prompt, setting.new) for n in (150, 450))
    short, long = (serve(server, "vllm", limits, each) for each in rows)
    return (long.tokens - short.tokens) / (long.seconds - short.seconds)


def ratios(
    models: Sequence[str] = MODELS, batches: Sequence[int] = BATCHES, setting: Testbed = SETTINGS[0]
) -> dict[str, dict[int, float]]:
    """Return the speed of the split over the GPU alone, by model and B."""
    found = {}
    for name in models:
        size = fitted(name, setting)
        paged = paged_speed(size, setting)
        found[name] = {batch: split_speed(size, batch, setting) / paged for batch in batches}
    return found


def of_settings(settings: Sequence[Testbed] = SETTINGS, batch: int = BATCHES[-1]) -> dict[str, dict[str, float]]:
    """Return the ratio of every model at a B, by setting."""
    found = ((setting.name, ratios(MODELS, (batch,), setting)) for setting in settings)
    return {name: {model: of[batch] for model, of in ratio.items()} for name, ratio in found}


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
    axes[2].axhspan(*OVER_VLLM, color="grey", alpha=0.2, label="published, over vLLM")
    axes[2].set(xlabel="B", ylabel="speed over the paged cache on the GPU", ylim=(0, None))
    axes[2].legend()
    return figure


def _options() -> argparse.Namespace:
    parser = flags("fastdecode.png")
    add = parser.add_argument
    add("--settings", action="store_true", help=f"the range of every setting, at B = {BATCHES[-1]}, and no picture")
    add("--cpu-share", type=_share, default=BANDWIDTH_EFFICIENCY, metavar="X", help="of their bandwidth (%(default)s)")
    add("--gpu-share", type=_share, default=COMPUTE_EFFICIENCY, metavar="X", help="of its FLOP/s (%(default)s)")
    add("--lengths", type=_above_0, nargs=2, default=(PROMPT, NEW), metavar=("PROMPT", "NEW"), help="(%(default)s)")
    add("--layers", type=_above_0, metavar="N", help=f"of {MODELS[-1]} (default: as many as fit)")
    return parser.parse_args()


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and up to 1, got {text}")
    return value


def _above_0(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text}")
    return value


def main() -> None:
    """Save the picture and print the tables."""
    options = _options()
    if options.settings:
        found = of_settings()
        show(
            (f"speed over vllm, B = {BATCHES[-1]}", *MODELS, "range"),
            [(name, *of.values(), f"{min(of.values()):.2f} to {max(of.values()):.2f}") for name, of in found.items()],
        )
        over_vllm, over_all = ("{:g} to {:g}".format(*each) for each in (OVER_VLLM, OVER_ALL))
        print(f"published: {over_vllm} over vLLM, {over_all} over vLLM, TensorRT-LLM and others")
        return
    setting = Testbed("by flags", options.cpu_share, options.gpu_share, *options.lengths, options.layers)
    over_time, faster = loads(), ratios(setting=setting)
    drawn(options.output, lambda pyplot: draw(pyplot, over_time, faster))
    limit = level(BATCH, STEPS, PERIOD)
    show(
        ("schedule", "peak load", "of B*(S+F)/2 + B*p", "steps"),
        [(name, o.peak_load, o.peak_load / limit, o.steps) for name, o in over_time.items()],
    )
    show(
        ("model", "layers", *(f"B = {b}" for b in BATCHES)),
        [(name, fitted(name, setting).layers, *ratio.values()) for name, ratio in faster.items()],
    )


if __name__ == "__main__":
    main()
