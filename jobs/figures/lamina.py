"""Lamina (Chen et al. 2024): the wire between the S device and its attention devices, and tokens per dollar.

python jobs/figures/lamina.py [--paper] [-o lamina.png]; docs/reproductions.md says what is assumed and what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import lamina_fit
import lamina_paper
import numpy as np
from figure import drawn, flags, show
from shapes import SHAPES

from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import Device, device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.serving import MEMORY, of_device
from hpcdecode.planning.step_time import step_seconds

MODELS = ("llama-33b", "llama-65b", "opt-66b")
S_DEVICES = ("h100", "2xh100", "4xh100", "8xh100")
R_DEVICE = "rtx3090"
CONTEXT = 512  # tokens of every sequence
BATCHES = (16, 32, 64, 128, 256, 512)
NIC, EXCHANGE = 200e9 / 8, 33e-6  # 200 Gbit/s, one for each device; seconds there and back
MOST = 64  # attention devices
# Dollars an hour on demand: RunPod, as listed by deploybase.ai on March 10, 2026
PRICES = {"h100": 4.76, "a100": 2.45, "rtx4090": 0.60, "rtx3090": 0.39}


def mfu(size: ModelSize, s: Device, batch: int) -> float:
    """Return MFU(B), the share of the peak FLOP/s that B tokens reach in the layers: 2*N*B / T(B) / peak."""
    cost = of_devices(size, s, s, float("inf"), 0.0)
    return 2 * size.layer_weights * batch / cost.body_seconds(batch) / s.flop_per_second


def least_link(size: ModelSize, s: Device, batch: int, width: float = 2) -> float:
    """Return the bytes per second that keep the S device busy: 2*e*d*L*MFU(B)/N of its FLOP/s, for G = 1 (Lamina)."""
    return 2 * width * size.hidden * size.layers * mfu(size, s, batch) / size.layer_weights * s.flop_per_second


class Setting(NamedTuple):
    """Devices, a batch and what they reach.

    Attributes:
        s_device: Name of the S devices.
        batch: B.
        r_devices: Devices for attention; 0 for S devices alone.
        tokens_per_second: Generated tokens.
        per_dollar: Generated tokens per dollar.
    """

    s_device: str
    batch: int
    r_devices: int
    tokens_per_second: float
    per_dollar: float


def alone(size: ModelSize) -> Setting:
    """Return the best number of S devices alone, with the weights and as many sequences as fit."""
    return _best(_alone(size, device(name)) for name in S_DEVICES if _fits(size, device(name)))


def _fits(size: ModelSize, s: Device) -> bool:
    return size.weight_bytes + CONTEXT * size.kv_bytes_per_token() <= MEMORY * s.memory_bytes


def _alone(size: ModelSize, s: Device) -> Setting:
    server = of_device(size, s)
    cost, batch = server.cost, server.capacity // CONTEXT
    seconds = (
        cost.body_seconds(batch) + cost.logits_seconds(batch) + cost.attend_seconds_per_cached_token * batch * CONTEXT
    )
    return Setting(s.name, batch, 0, batch / seconds, 3600 * batch / seconds / price(s))


def split(size: ModelSize) -> Setting:
    """Return the devices and the batch of two lanes that give most tokens per dollar."""
    settings = (_split(size, device(name)) for name in S_DEVICES if _fits(size, device(name)))
    return _best(setting for group in settings for setting in group)


def _split(size: ModelSize, s: Device) -> Iterator[Setting]:
    r = device(R_DEVICE)
    cost = of_devices(size, s, r, s.count * NIC, EXCHANGE / 2)
    for devices in range(1, MOST + 1):
        sequences = int(devices * MEMORY * r.memory_bytes / size.kv_bytes_per_token() / CONTEXT)
        for batch in range(16, min(sequences, 2048) + 1, 16):
            attended = np.full(devices, batch / 2 * CONTEXT / devices)
            lane = cost.lane_seconds(batch // 2, 0, 0, attended, np.zeros(devices))
            speed = batch / (step_seconds([[lane, lane]]) + 2 * cost.logits_seconds(batch / 2))
            per_dollar = 3600 * speed / (price(s) + devices * price(r))
            yield Setting(s.name, batch, devices, speed, per_dollar)


def _best(settings: Iterable[Setting]) -> Setting:
    return max(settings, key=lambda setting: setting.per_dollar)


def price(d: Device) -> float:
    """Return the dollars of an hour."""
    return d.count * PRICES[d.name.removeprefix(f"{d.count}x")]


class Gains(NamedTuple):
    """Settings of one model.

    Attributes:
        alone: The best S devices alone.
        split: The best S and attention devices.
        same: The S devices of `split` alone.
    """

    alone: Setting
    split: Setting
    same: Setting


def gains(models: Sequence[str] = MODELS) -> dict[str, Gains]:
    """Return the settings of every model."""
    found = {}
    for name in models:
        best = split(SHAPES[name])
        found[name] = Gains(alone(SHAPES[name]), best, _alone(SHAPES[name], device(best.s_device)))
    return found


def draw(pyplot: ModuleType, found: dict[str, Gains]) -> Any:
    """Return a figure of the wire, and of the tokens per dollar."""
    figure, (link, money) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in MODELS:
        link.plot(BATCHES, [least_link(SHAPES[name], device("h100"), b) / 1e9 for b in BATCHES], "o-", label=name)
    link.set(xlabel="B", ylabel="least bandwidth of the wire of an H100, GB/s", ylim=(0, None))
    link.legend()
    money.bar(list(found), [each.split.per_dollar / each.alone.per_dollar for each in found.values()])
    money.axhspan(2.1, 2.8, color="grey", alpha=0.2, label="published")
    money.set(ylabel=f"tokens per dollar, split over alone, context {CONTEXT}")
    money.legend()
    return figure


def main() -> None:
    """Save the picture and print the tables."""
    parser = flags("lamina.png")
    parser.add_argument("--paper", action="store_true", help="by the paper's devices and prices")
    options = parser.parse_args()
    if options.paper:
        drawn(options.output, lamina_paper.draw)
        lamina_paper.report()
        lamina_fit.report()
        return
    found = gains()
    drawn(options.output, lambda pyplot: draw(pyplot, found))
    show(
        ("GB/s of an H100", *(f"B = {b}" for b in BATCHES)),
        [(name, *(least_link(SHAPES[name], device("h100"), b) / 1e9 for b in BATCHES)) for name in MODELS],
    )
    show(
        ("model", "", "S", "B", "R", "tokens/s", "tokens per dollar", "over alone"),
        [
            (name, kind, *s, s.per_dollar / found[name][0].per_dollar)
            for name, both in found.items()
            for kind, s in zip(("alone", "split", "the same S alone"), both, strict=True)
        ],
    )


if __name__ == "__main__":
    main()
