"""FluidInfer (Xiao) by its own premises: engines of 16 requests, 8 GB of KV cache for 2,048 tokens, free swapping."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from figure import show
from msgspec.structs import replace
from shapes import SHAPES

from hpcdecode.planning import lengths
from hpcdecode.planning.hardware import device
from hpcdecode.planning.outcome import SimulationOutcome
from hpcdecode.planning.servers import SERVING
from hpcdecode.planning.servers.base import ServerLimits
from hpcdecode.planning.serving import Server, of_device, serve

MODELS, DEVICES = ("opt-125m", "opt-1.3b", "opt-6.7b"), ("rtx4090", "4xrtx4090", "4xa100-40g")
MODEL, DEVICE = "opt-6.7b", "4xrtx4090"
CONTEXT = 2048  # tokens of OPT; longer rows are left out
SEQUENCES = 16  # of the other engines
KV_SHARE = 0.3  # of the memory is KV cache (OPT-6.7B on four RTX 4090)
KV_BYTES = 8e9  # "nearly 8 GB" for 2,048 tokens of OPT-6.7B
KV_FACTOR = KV_BYTES / (CONTEXT * SHAPES[MODEL].kv_bytes_per_token())  # over what the model's shape says: 7.45
SPEED, BOUND = (2.0, 4.0), 3.0  # published: tokens/s over vLLM's; latency bound below vLLM's
ROWS, SEED = 1000, 0
LOAD, LOADS = 0.8, (0.5, 0.8, 0.95)  # rate of arrivals over that at which vLLM completes rows: not stated, chosen here
_BATCHED = 2048


class EnginePremise(NamedTuple):
    """What is assumed.

    Attributes:
        name: Of the row.
        sequences: Most requests that the other engines run at once.
        kv_factor: Room that a cached token takes, over what it takes by the model's shape.
        kv_share: Share of the memory that is KV cache; None for 0.9 less the weights.
        swap_free: Whether moving K and V takes no time.
        swap_space: As of `ServerLimits`: 0 if fluid has no more requests in flight than fit on the device.
    """

    name: str
    sequences: int = SEQUENCES
    kv_factor: float = 1.0
    kv_share: float | None = None
    swap_free: bool = False
    swap_space: float = float("inf")


PREMISES = (
    EnginePremise("true KV, 256 sequences, what fits in flight", 256, swap_space=0.0),
    EnginePremise("true KV, 16 sequences, what fits in flight", swap_space=0.0),
    EnginePremise("true KV, 16 sequences, all in flight, PCIe"),
    EnginePremise("8 GB, 16 sequences, all in flight, swap free", SEQUENCES, KV_FACTOR, KV_SHARE, swap_free=True),
    EnginePremise("8 GB, 16 sequences, all in flight, PCIe", SEQUENCES, KV_FACTOR, KV_SHARE),
    EnginePremise("8 GB, 16 sequences, what fits in flight, PCIe", SEQUENCES, KV_FACTOR, KV_SHARE, swap_space=0.0),
)
TRUE_16, PAPER = PREMISES[1], PREMISES[3]


def workload(rows: int = ROWS) -> lengths.Lengths:
    """Return rows of ShareGPT's mean lengths, without those that are too long for OPT's context."""
    drawn = lengths.lognormal(2 * rows, *lengths.SHAREGPT, 1 << 30, SEED)
    kept = np.flatnonzero(drawn.prompt + drawn.new <= CONTEXT)[:rows]
    return lengths.Lengths(drawn.prompt[kept], drawn.new[kept], CONTEXT - drawn.prompt[kept], np.zeros(rows))


def server(model: str, name: str, premise: EnginePremise) -> Server:
    """Return the devices as a premise has them."""
    one = of_device(SHAPES[model], device(name))
    capacity = float(one.capacity)
    if premise.kv_share is not None:
        memory = device(name).memory_bytes
        assert memory is not None, "GPUs have a memory"
        capacity = premise.kv_share * memory / SHAPES[model].kv_bytes_per_token()
    swap = 0.0 if premise.swap_free else one.swap_seconds_per_token
    return replace(one, capacity=int(capacity / premise.kv_factor), swap_seconds_per_token=swap)


def run(one: Server, premise: EnginePremise, schedule: str, work: lengths.Lengths) -> SimulationOutcome:
    """Return the outcome of a schedule."""
    return serve(one, schedule, ServerLimits(premise.sequences, _BATCHED, premise.swap_space), work)


class Ratios(NamedTuple):
    """What fluid reaches against vLLM.

    Attributes:
        speed: Tokens per second over vLLM's, all rows there at the start.
        latency: vLLM's mean seconds a token, from arrival to end, over fluid's; rows arrive at a share of vLLM's rate.
        bound: vLLM's mean of the rows' largest gaps between two tokens over fluid's, of the same arrivals.
        longest: The same of the largest gap of all rows.
    """

    speed: float
    latency: float
    bound: float
    longest: float


def speed(model: str, name: str, premise: EnginePremise, rows: int = ROWS, schedule: str = "fluid") -> float:
    """Return the tokens per second of a schedule over vLLM's, all rows there at the start."""
    one, work = server(model, name, premise), workload(rows)
    found, vllm = (run(one, premise, each, work) for each in (schedule, "vllm"))
    return found.tokens_per_second / vllm.tokens_per_second


def ratios(
    premise: EnginePremise, model: str = MODEL, name: str = DEVICE, rows: int = ROWS, load: float = LOAD
) -> Ratios:
    """Return the ratios under a premise."""
    one, work = server(model, name, premise), workload(rows)
    fluid, vllm = (run(one, premise, schedule, work) for schedule in ("fluid", "vllm"))
    coming = lengths.poisson(work, load * vllm.rows / vllm.seconds, SEED)
    served, other = (run(one, premise, schedule, coming) for schedule in ("fluid", "vllm"))
    return Ratios(
        fluid.tokens_per_second / vllm.tokens_per_second,
        normalised(other, work) / normalised(served, work),
        other.latency_bound / served.latency_bound,
        float(np.nanmax(other.largest_gap) / np.nanmax(served.largest_gap)),
    )


def normalised(outcome: SimulationOutcome, work: lengths.Lengths) -> float:
    """Return the mean over rows of seconds a token, from arrival to end."""
    return float(np.nanmean(outcome.latency / work.new))


def draw(pyplot: ModuleType, found: dict[str, Ratios]) -> Any:
    """Return a figure of speed and latency bound by premise."""
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 3.5), layout="constrained", sharey=True)
    names = list(reversed(found))
    for axis, what in zip(axes, ("speed", "bound"), strict=True):
        axis.barh(names, [getattr(found[name], what) for name in names])
    axes[0].axvspan(*SPEED, color="grey", alpha=0.2, label="published")
    axes[1].axvline(BOUND, color="grey", linestyle=":", label="published")
    axes[0].set(xlabel="tokens/s over vLLM's")
    axes[1].set(xlabel="vLLM's latency bound over fluid's")
    for axis in axes:
        axis.legend()
    return figure


def compare(
    premises: tuple[EnginePremise, ...] = PREMISES, model: str = MODEL, name: str = DEVICE, rows: int = ROWS
) -> dict[str, Ratios]:
    """Return the ratios of every premise, by its name."""
    return {premise.name: ratios(premise, model, name, rows) for premise in premises}


def report(found: dict[str, Ratios], model: str = MODEL, name: str = DEVICE) -> None:
    """Print the ratios of every premise."""
    shape = KV_BYTES / KV_FACTOR / 1e9
    print(f"{model} on {name}; KV of 2,048 tokens of {MODEL}: {shape:.2f} GB by its shape, 8 GB are {KV_FACTOR:.2f} x")
    show(("fluid against vllm", *Ratios._fields), [(each, *of) for each, of in found.items()])


def report_loads() -> None:
    """Print the ratios under the paper's premise, by the rate of arrivals."""
    show(
        (f"{PAPER.name}: load", "latency", "bound", "longest"),
        [(load, *ratios(PAPER, load=load)[1:]) for load in LOADS],
    )


def report_models() -> None:
    """Print the speeds of all schedules, by model and devices, at 16 sequences with the true KV."""
    others = [schedule for schedule in SERVING if schedule != "vllm"]
    show(
        (f"speed over vllm, {TRUE_16.name}", "device", *others),
        [(m, d, *(speed(m, d, TRUE_16, schedule=each) for each in others)) for m in MODELS for d in DEVICES],
    )
