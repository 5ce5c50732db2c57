"""What the machine allows a job: the time of the model's GEMMs, and the read bandwidth of the memory.

`python -m hpcdecode.bench.limits MODEL TOKENS...` measures in a process of its own and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from hpcdecode._ops_cpu import Product, Type
from hpcdecode.attention.base import isa, multiplies_bfloat16
from hpcdecode.bench.own_models import OwnShape, shape_of
from hpcdecode.bench.workload import Shape
from hpcdecode.model.frontend.held import BFLOAT16
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.chain import Link, assemble
from hpcdecode.model.lower.recipe import packed_by_onednn
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.bandwidth import read_rate

PREFILL_TOKENS = prefill_limit(apart=False)  # a step's prompt tokens, as in one process of `generate`
_PASSES = 5
_MOST_WEIGHTS = 1 << 30  # of the layers that are multiplied: no cache holds them
_LARGE_GEMM, _LARGE_GEMMS = 4096, 8  # inputs and outputs of each of those whose rate stands for all, and their number
_ENOUGH = 4.0  # seconds after which no other pass begins; the first one counts if it took as long

Gemm = Callable[[], Tensor]
MakeGemm = Callable[[Tensor, Tensor], Gemm]  # from x [tokens, inputs] and weight [outputs, inputs]


@dataclass(frozen=True)
class IdealTimes:
    """What was measured.

    Attributes:
        body: Seconds of the GEMMs of all layers, by tokens.
        head: Seconds of the GEMM of the logits, by tokens.
        read: Read bandwidth in bytes per second.
    """

    body: dict[int, float]
    head: dict[int, float]
    read: float


@dataclass(frozen=True)
class Ideal:
    """Least seconds of a bfloat16 job on this machine.

    Attributes:
        prefill_seconds: Until every row has its first token.
        decode_seconds: From there to the end.
    """

    prefill_seconds: float
    decode_seconds: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole job."""
        return self.prefill_seconds + self.decode_seconds


def ideal(shape: Shape, lengths: Sequence[int], new: int, limits: IdealTimes, shared: Sequence[int] = ()) -> Ideal:
    """Return the seconds of GEMMs at the measured rate, and of KV bytes at the measured bandwidth.

    Both take the same cores, one after the other. With B rows of n_i prompt tokens, of which s_i are those of another
    row, N new tokens each, and chunks of C prompt tokens:

    prefill_seconds = sum(n_i - s_i) / C * body(C) + head(B) + attention FLOP / rate(C)
    decode_seconds = (N - 1) * (body(B) + head(B)) + KV bytes of sum(n_i + t) over rows and t = 1..N-1 / bandwidth
                     + (N - 1) * B * 2 * bytes of a sequence's states / bandwidth

    Causal attention takes half the FLOP of all pairs, n_i^2 - s_i^2; rate(C) is the FLOP/s of body(C).

    Args:
        shape: Of the model.
        lengths: Prompt tokens of every row.
        new: Tokens to generate for each.
        limits: What the machine allows.
        shared: Tokens of every row that others have prefilled; nothing for none.
    """
    rows, steps = len(lengths), new - 1
    earlier = shared or [0] * rows
    chunk = limits.body[PREFILL_TOKENS]
    rate = PREFILL_TOKENS * 2 * shape.layer_weights / chunk
    attention = shape.pair_flop / 2 * sum(n * n - s * s for n, s in zip(lengths, earlier, strict=True))
    held = steps * sum(lengths) + rows * steps * (steps + 1) // 2  # tokens read, over all steps
    moved = held * shape.kv_bytes + 2 * steps * rows * shape.state_bytes  # bytes
    return Ideal(
        prefill_seconds=(sum(lengths) - sum(earlier)) / PREFILL_TOKENS * chunk + limits.head[rows] + attention / rate,
        decode_seconds=steps * (limits.body[rows] + limits.head[rows]) + moved / limits.read,
    )


def measure(shape: Shape, tokens: list[int]) -> IdealTimes:
    """Return the fastest of some passes, with torch's plain GEMMs, weights packed by oneDNN, or packed weights here.

    Of a large model some layers are multiplied, and count as all. For an OwnShape the rate of a large GEMM is measured,
    and the rest computed. Activations are float32 where the CPU has no arithmetic in bfloat16: there torch multiplies
    bfloat16 more slowly.
    """
    cpus = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(len(cpus))
    read = read_rate(cpus, passes=2 * _PASSES)
    body: dict[int, float] = {}
    head: dict[int, float] = {}
    dtype, bits = (torch.bfloat16, None) if multiplies_bfloat16() else (torch.float32, BFLOAT16)
    makes: list[MakeGemm] = [plain, by_onednn]
    if offers_packed_weights():
        makes.append(partial(by_packed_weights, bits=bits))
    with torch.inference_mode():
        if isinstance(shape, OwnShape):
            rate = _large_rate(makes, dtype)
            body = {count: shape.body_seconds(count, rate, read) for count in tokens}
            return IdealTimes(body, {count: shape.head_seconds(count, rate, read) for count in tokens}, read)
        layers = min(shape.layers, -(-_MOST_WEIGHTS // sum(k * n for k, n in shape.linears)))
        weights = [torch.randn(n, k).to(dtype) for _ in range(layers) for k, n in shape.linears]
        weights.append(torch.randn(shape.vocabulary, shape.hidden).to(dtype))
        for count in tokens:
            ways = [_pass_seconds(make, weights, count) for make in makes]
            of_layers, head[count] = (min(seconds) for seconds in zip(*ways, strict=True))
            body[count] = of_layers * shape.layers / layers
    return IdealTimes(body, head, read)


def _large_rate(makes: Sequence[MakeGemm], dtype: torch.dtype) -> float:
    """Return the FLOP/s of large GEMMs of a step's prompt tokens, the fastest way."""
    weights = [torch.randn(_LARGE_GEMM, _LARGE_GEMM).to(dtype) for _ in range(_LARGE_GEMMS)]
    seconds = min(sum(_pass_seconds(make, weights, PREFILL_TOKENS)) for make in makes)
    return 2 * PREFILL_TOKENS * sum(w.numel() for w in weights) / seconds


def _pass_seconds(make: MakeGemm, weights: list[Tensor], tokens: int) -> tuple[float, float]:
    """Return the seconds of all GEMMs but the last, and of the last, over weights that no cache holds together."""
    inputs = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype) for w in weights}
    calls = [make(inputs[w.shape[1]], w) for w in weights]
    passes: list[tuple[float, float]] = []
    begin = perf_counter()
    while len(passes) <= _PASSES and (not passes or perf_counter() - begin < _ENOUGH):
        start = perf_counter()
        for call in calls[:-1]:
            call()
        middle = perf_counter()
        calls[-1]()
        passes.append((middle - start, perf_counter() - middle))
    body, head = zip(*passes[1:] or passes, strict=True)
    return min(body), min(head)


def plain(x: Tensor, weight: Tensor) -> Gemm:
    """Return the GEMM x @ weight.T by torch."""
    return lambda: torch.nn.functional.linear(x, weight)


def by_onednn(x: Tensor, weight: Tensor) -> Gemm:
    """Return the GEMM by oneDNN, with weights packed for it if it packs them."""
    if not packed_by_onednn(Meta.of(weight.dtype, weight.shape)):
        return plain(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))

    def gemm() -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return y

    return gemm


def by_packed_weights(x: Tensor, weight: Tensor, bits: str | None = None) -> Gemm:
    """Return the GEMM of native/ops_cpu.

    The result is float32 for float32, else bfloat16. int8 numbers are multiplied as they are, with scales of 1.

    Args:
        x: Activations [tokens, in].
        weight: Weight [out, in].
        bits: Form of the weight in few bits, or None.
    """
    rows, outputs = len(x), len(weight)
    y = Meta.of(torch.float32 if x.dtype == torch.float32 else torch.bfloat16, ("T", outputs))
    stage = packed_weights.gemm(Meta.of(x.dtype, ("T", x.shape[1])), Meta.of(weight.dtype, weight.shape), y, bits=bits)
    assert stage is not None, "by_packed_weights: expected a machine that offers it"
    if bits is not None:
        packed = packed_weights.pack_few_bits(bits, [weight])
    elif weight.dtype == torch.int8:
        packed = packed_weights.pack_int8(weight, torch.ones(outputs))
    else:
        packed = packed_weights.pack([weight])
    chain = assemble([Link(stage.work, ("x", "weight"), {"y": 0})], ["x", "weight", "y"])

    def gemm() -> Tensor:
        made = torch.empty(rows, outputs, dtype=y.dtype)
        places = [t.data_ptr() for t in (x, packed, made)]
        chain.run(rows, torch.get_num_threads(), places, [x.stride(0) * x.element_size(), 0, y.bytes_per_token])
        return made

    return gemm


def offers_packed_weights() -> bool:
    """Return whether this machine has such GEMMs."""
    return Product.offered(Type.bfloat16, Type.bfloat16, isa())


def main(arguments: list[str]) -> None:
    """Measure a model for some numbers of tokens, and print one JSON object."""
    model, *tokens = arguments
    print(json.dumps(asdict(measure(shape_of(model), [int(t) for t in tokens]))))


if __name__ == "__main__":
    main(sys.argv[1:])
