"""Lamina (Chen et al. 2024) by its own devices and prices: table 3, figure 1 for each premise, and the rotation.

What the paper states is in capitals below. Table 3 also needs the curve LAMINA_A100 of `planning/hardware.py`, which is
fitted to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from figure import show
from numpy.typing import NDArray
from rotation import fixed_slices, rotated_slices
from shapes import LAMINA, SHAPES

from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import ROOFLINE, Device, EfficiencyCurve, device
from hpcdecode.planning.model_size import ModelSize

COUNTS = {"13B": 1, "33B": 2, "65B": 4}  # A100 devices of each model
BATCHES = (128, 256, 512, 1024)
TABLE_3 = {
    "13B": (4.90, 8.12, 9.08, 10.06),
    "33B": (5.94, 9.31, 11.56, 12.53),
    "65B": (7.55, 11.78, 13.92, 15.90),
}  # least GB/s of the wire, by B
PRICES = {
    "a100-pcie": 17_500,
    "h100": 36_500,
    "rtx3090": 1_600,
    "rx7900xtx": 1_000,
    "arc-a770": 350,
}  # table 1, dollars
CONTEXTS = (512, 4096)
NIC = 200e9 / 8  # bytes/s, one for each device
S_DEVICE, R_DEVICE = "a100-pcie", "rtx3090"
FIGURE_1 = (2.1, 2.8)  # tokens per dollar at 512 tokens, over A100 alone
ROTATION = (1.13, 1.63)  # figures 12 and 13: throughput with rotation over that without, above B = 128
PEAKS = EfficiencyCurve(1.0, 1.0, float("inf"), 0.0, "data sheet")
_MOST_DEVICES = 256


def s_devices(name: str) -> Device:
    """Return the A100 devices of a model."""
    return device(f"{COUNTS[name]}x{S_DEVICE}" if COUNTS[name] > 1 else S_DEVICE)


def least_link(name: str, batch: int) -> float:
    """Return the GB/s that keep the S devices busy: 4*e*d*L*B bytes (section 3) in T(B)."""
    size, s = SHAPES[LAMINA[name]], s_devices(name)
    return size.wire_bytes_per_token * batch / of_devices(size, s, s, 1.0, 0.0).body_seconds(batch) / 1e9


def table_3() -> dict[str, list[float]]:
    """Return what comes out for table 3, GB/s by model and B."""
    return {name: [least_link(name, batch) for batch in BATCHES] for name in TABLE_3}


class CostPremise(NamedTuple):
    """What figure 1 may have assumed.

    Attributes:
        name: Of the row.
        curve: T(B) of the A100 devices.
        cache_share: Share of the bandwidth that attention reaches, on both kinds of device.
        capacity: Whether memory devices must hold the KV cache, not only read it in time.
        lanes: Batches that share B and overlap; 0 for one batch whose parts overlap fully, 1 for no overlap.
        r_device: Memory device.
        most: Largest B.
        memory: Share of the memory of A100 devices alone that holds weights and KV cache.
    """

    name: str
    curve: EfficiencyCurve
    cache_share: float = 0.8
    capacity: bool = True
    lanes: int = 2
    r_device: str = R_DEVICE
    most: int = 1024  # of table 3; table 2 has 512
    memory: float = 1.0


_FITTED = device(S_DEVICE).curve
PREMISES = (
    CostPremise("table 3's T(B), full overlap, capacity not counted", _FITTED, capacity=False, lanes=0),
    CostPremise("the same, B at most 512", _FITTED, capacity=False, lanes=0, most=512),
    CostPremise("the same, B at most 1,024, 0.9 of the A100's memory", _FITTED, capacity=False, lanes=0, memory=0.9),
    CostPremise("the first, but two batches of B/2", _FITTED, capacity=False),
    CostPremise("the first, but no overlap", _FITTED, capacity=False, lanes=1),
    CostPremise("table 3's T(B), full overlap, capacity counted", _FITTED, lanes=0),
    CostPremise("data-sheet peaks, full overlap, capacity counted", PEAKS, 1.0, lanes=0),
    CostPremise("0.7 and 0.8 of peaks, full overlap, capacity counted", ROOFLINE, lanes=0),
    CostPremise("0.7 and 0.8 of peaks, two batches of B/2, capacity counted", ROOFLINE),
    CostPremise("0.7 and 0.8 of peaks, no overlap, capacity counted", ROOFLINE, lanes=1),
    CostPremise("table 3's T(B), two batches of B/2, capacity counted", _FITTED),
    CostPremise("the same with RX 7900 XTX", _FITTED, r_device="rx7900xtx"),
    CostPremise("the same with Arc A770", _FITTED, r_device="arc-a770"),
)
TRUE_PREMISE = PREMISES[
    8
]  # the curve that the paper measured, memory that holds what it reads, batches that can overlap


class Best(NamedTuple):
    """The setting of most tokens per dollar: B, memory devices, and its tokens per dollar over A100 alone."""

    batch: int
    r_devices: int
    gain: float


def best(name: str, premise: CostPremise, context: int) -> Best:
    """Return the best of B in steps of 16 and of up to 256 memory devices."""
    batches = np.arange(16, premise.most + 1, 16)
    size = SHAPES[LAMINA[name]]
    s = replace(s_devices(name), curve=premise.curve, cache_share=premise.cache_share)
    r = replace(device(premise.r_device), cache_share=premise.cache_share)
    cost = of_devices(size, s, r, COUNTS[name] * NIC, 0.0)
    body = _body(size, s, batches)
    attend = cost.attend_seconds_per_cached_token * batches * context
    wire = cost.wire_seconds_per_token * batches
    devices = np.arange(1, _MOST_DEVICES + 1)[:, np.newaxis]
    seconds = _step(premise.lanes, body, _body(size, s, batches / 2), attend / devices, wire)
    per_dollar = batches / seconds / (COUNTS[name] * PRICES[S_DEVICE] + devices * PRICES[premise.r_device])
    if premise.capacity:
        assert r.memory_bytes is not None, "memory devices have a size"
        held = devices * r.memory_bytes >= batches * context * size.kv_bytes_per_token()
        per_dollar = np.where(held, per_dollar, 0.0)
    i, j = np.unravel_index(per_dollar.argmax(), per_dollar.shape)
    return Best(int(batches[j]), int(i + 1), float(per_dollar[i, j]) / alone(name, s, context, premise.memory))


def alone(name: str, s: Device, context: int, memory: float = 1.0) -> float:
    """Return the tokens per second and dollar of the A100 devices alone: as many sequences as fit, T(B) + attention."""
    size = SHAPES[LAMINA[name]]
    assert s.memory_bytes is not None, "an A100 has a size"
    batch = int((memory * s.memory_bytes - size.weight_bytes) / (context * size.kv_bytes_per_token()))
    cost = of_devices(size, s, s, 1.0, 0.0)
    seconds = cost.body_seconds(batch) + cost.attend_seconds_per_cached_token * batch * context
    return batch / seconds / (COUNTS[name] * PRICES[S_DEVICE])


def _body(size: ModelSize, s: Device, batches: NDArray[Any]) -> NDArray[np.float64]:
    cost = of_devices(size, s, s, 1.0, 0.0)
    return np.array([cost.body_seconds(float(batch)) for batch in batches])


def _step(
    lanes: int,
    body: NDArray[np.float64],
    half: NDArray[np.float64],
    attend: NDArray[np.float64],
    wire: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the seconds of a step of B sequences, [memory devices, B].

    Args:
        lanes: As of `CostPremise`.
        body: T(B), [B].
        half: T(B/2), [B].
        attend: Attention, [memory devices, B].
        wire: Of the NICs, [B].
    """
    if lanes == 1:
        return body + attend + wire
    if lanes == 0:
        return np.maximum(np.maximum(body, wire), attend)
    return np.maximum(np.maximum(np.maximum(2 * half, wire), attend), half + (attend + wire) / 2)


def gains(premise: CostPremise, context: int) -> list[Best]:
    """Return the best setting of every model."""
    return [best(name, premise, context) for name in COUNTS]


def rotation_gains(most: int = 6) -> dict[int, tuple[float, float]]:
    """Return rotation's slices per second over those of n - 1 batches that stay on their replicas, for n = 2 to `most`.

    Both are run event by event with t_a = t_m / (n - 1) (section 5.1), and with twice as long an attention.
    """
    return {n: (_rotated_over_fixed(n, 1 / (n - 1)), _rotated_over_fixed(n, 2 / (n - 1))) for n in range(2, most + 1)}


def _rotated_over_fixed(n: int, attend: float) -> float:
    return rotated_slices(n, n - 1, 1.0, attend) / fixed_slices(n - 1, n - 1, 1.0, attend)


def attention_share(name: str = "13B", batch: int = 512, context: int = 1500) -> float:
    """Return attention's share of a step of A100 devices alone, whether their memory holds it or not."""
    s = s_devices(name)
    cost = of_devices(SHAPES[LAMINA[name]], s, s, 1.0, 0.0)
    attend = cost.attend_seconds_per_cached_token * batch * context
    return attend / (attend + cost.body_seconds(batch))


def staggered(
    batches: Sequence[int] = (128, 256, 512), contexts: Sequence[int] = (128, 256, 512)
) -> NDArray[np.float64]:
    """Return (t_m + t_a) / max(t_m, t_a) for 13B with three RTX 3090, by B and context: two batches in place of one."""
    size, s = SHAPES[LAMINA["13B"]], s_devices("13B")
    cost = of_devices(size, s, device(R_DEVICE), NIC, 0.0)
    body = _body(size, s, np.array(batches))[:, np.newaxis]
    attend = cost.attend_seconds_per_cached_token / 3 * np.outer(batches, contexts)
    return (body + attend) / np.maximum(body, attend)


def draw(pyplot: ModuleType) -> Any:
    """Return a figure of table 3 and of figure 1 by premise."""
    figure, (link, money) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for i, (name, found) in enumerate(table_3().items()):
        link.plot(BATCHES, found, "-", color=f"C{i}", label=f"{name}, T(B) fitted")
        link.plot(BATCHES, TABLE_3[name], "o", color=f"C{i}", label=f"{name}, table 3")
    link.set(xlabel="B", ylabel="least bandwidth of the wire, GB/s", ylim=(0, None), xscale="log", xticks=BATCHES)
    link.minorticks_off()
    link.set_xticklabels(BATCHES)
    link.legend()
    for i, premise in enumerate(reversed(PREMISES)):
        found_gains = [each.gain for each in gains(premise, 512)]
        money.plot([min(found_gains), max(found_gains)], [i, i], "o-", color="C0")
    money.set_yticks(range(len(PREMISES)), [premise.name for premise in reversed(PREMISES)], fontsize=7)
    money.axvspan(*FIGURE_1, color="grey", alpha=0.2, label="published")
    money.set(xlabel="tokens per dollar over A100 alone, 512 tokens", xlim=(0, None))
    money.legend()
    return figure


def report() -> None:
    """Print the tables."""
    found = table_3()
    errors = np.array([np.divide(found[name], TABLE_3[name]) - 1 for name in TABLE_3])
    show(
        ("table 3, GB/s", *(f"B = {b}" for b in BATCHES)),
        [row for name in TABLE_3 for row in ((f"{name}, published", *TABLE_3[name]), (f"{name}, T(B)", *found[name]))],
    )
    print(f"tuned: {_FITTED.flop_share} of FLOP/s, {_FITTED.weight_share} of bytes/s, {_FITTED.sum_seconds * 1e6:g} us")
    print(f"error: rms {np.sqrt((errors**2).mean()):.1%}, worst {abs(errors).max():.1%} of 12 cells\n")
    a100, r = device(S_DEVICE), device(R_DEVICE)
    assert a100.memory_bytes and r.memory_bytes, "both have a memory"
    of_capacity = PRICES[S_DEVICE] / a100.memory_bytes / (PRICES[R_DEVICE] / r.memory_bytes)
    of_bandwidth = PRICES[S_DEVICE] / a100.bytes_per_second / (PRICES[R_DEVICE] / r.bytes_per_second)
    print(f"alpha: {of_capacity:.2f} dollars of capacity, {of_bandwidth:.2f} of bandwidth\n")
    shares = ", ".join(f"{name} {attention_share(name):.0%}" for name in COUNTS)
    print(f"attention's share of a step, B = 512, 1,500 tokens: {shares}; published: over 80 % beyond that\n")
    for context in CONTEXTS:
        rows = [(premise.name, gains(premise, context)) for premise in PREMISES]
        show(
            (f"figure 1, context {context}", *(f"{name}, B + devices" for name in COUNTS), "range"),
            [
                (name, *(f"{g.gain:.2f}, {g.batch} + {g.r_devices}" for g in of), _range([g.gain for g in of]))
                for name, of in rows
            ],
        )
    show(
        ("n", "rotation over fixed, t_a = t_m/(n-1)", "t_a twice that"),
        [(n, *both) for n, both in rotation_gains().items()],
    )
    show(
        ("13B, 3 RTX 3090: B", "context 128", "256", "512"),
        [(b, *row) for b, row in zip((128, 256, 512), staggered().tolist(), strict=True)],
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
