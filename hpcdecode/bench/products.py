"""`hpcdecode bench products`: GEMMs with packed weights against those of oneDNN, in float32 and bfloat16, and others.

The GEMMs of all layers of a random Llama and of its logits, over weights that no cache holds together, as in a step.
Passes of both sides alternate. Ratios are medians of the pairs, above 1 if packed weights are faster. int8, whose input
is rounded beforehand, and weights in few bits (`model/lower/few_bits.py`) are compared with bfloat16. The argmax of the
LM head, which computes few of the logits (`model/run/lm_head.py`), is compared with a search of all of them.
`--experts` measures a projection by experts (`model/lower/experts.py`) against torch, one expert at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from hpcdecode import _ops_cpu
from hpcdecode._ops_cpu import Type
from hpcdecode.attention.base import isa
from hpcdecode.bench.experts import ExpertShape, measure_experts
from hpcdecode.bench.limits import Gemm, MakeGemm, by_onednn, by_packed_weights, offers_packed_weights
from hpcdecode.bench.output import Case, Report
from hpcdecode.bench.workload import SHAPES, Shape
from hpcdecode.errors import UserError
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights
from hpcdecode.model.lower.few_bits import BY_INT8, FORMS
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.model.run.lm_head import LmHead
from hpcdecode.report.benchmark import case, machine, seconds_of
from hpcdecode.sampling.sampler import argmax

MEASURED = (*FORMS, BY_INT8["int4"], BY_INT8["mxfp4"])  # weights in few bits, with activations rounded to int8 too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", choices=tuple(SHAPES), default="355m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128, 256, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument(
        "--experts",
        type=int,
        nargs=4,
        metavar=("EXPERTS", "CHOICES", "INPUTS", "OUTPUTS"),
        help="measure a projection by experts instead, bfloat16 against torch, the other forms against bfloat16",
    )


def run(args: argparse.Namespace) -> Report:
    """Measure GEMMs and argmax for every number of tokens.

    Raises:
        UserError: If this machine has no GEMMs with packed weights.
    """
    if not offers_packed_weights():
        raise UserError(f"bench products: expected a CPU with AVX2 or AVX-512, this one uses {isa()}")
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            if args.experts:
                cases = [*measure_experts(ExpertShape(*args.experts), args.tokens, args.passes)]
                return {"bench": "products", "machine": machine(), "cases": cases}
            shape = SHAPES[args.model]
            cases = [c for tokens in args.tokens for c in measure(shape, tokens, args.passes)]
            if _ops_cpu.Argmax.offered(Type.bfloat16, Type.bfloat16, isa()):
                cases += [measure_argmax(shape, tokens, args.passes) for tokens in args.tokens]
    finally:
        torch.set_num_threads(before)
    return {"bench": "products", "machine": machine(), "cases": cases}


def measure(shape: Shape, tokens: int, passes: int) -> Iterator[Case]:
    """Yield float32 and bfloat16 against oneDNN, and int8 and weights in few bits against bfloat16."""
    sizes = [*shape.linears * shape.layers, (shape.hidden, shape.vocabulary)]
    weights = [torch.randn(outputs, inputs) for inputs, outputs in sizes]
    inputs = {n: torch.randn(tokens, n) for n, _ in sizes}

    def calls(make: MakeGemm, dtype: torch.dtype) -> list[Gemm]:
        return [make(inputs[w.shape[1]].to(dtype), w.mul(30 if dtype == torch.int8 else 1).to(dtype)) for w in weights]

    sides = [calls(make, d) for d in (torch.float32, torch.bfloat16) for make in (by_packed_weights, by_onednn)]
    sides.append(calls(by_packed_weights, torch.int8))
    sides += [calls(partial(by_packed_weights, bits=bits), torch.bfloat16) for bits in MEASURED]
    seconds = [[seconds_of(partial(_run_all, side)) for side in sides] for _ in range(passes + 1)]
    work = 2e-9 * tokens * sum(w.numel() for w in weights)
    float32, float32_onednn, bfloat16, bfloat16_onednn, int8, *few_bits = zip(*seconds[1:], strict=True)
    for name, ours, theirs, against in (
        ("float32", float32, float32_onednn, "oneDNN, float32"),
        ("bfloat16", bfloat16, bfloat16_onednn, "oneDNN, bfloat16"),
        ("int8", int8, bfloat16, "packed weights, bfloat16"),
        *((bits, own, bfloat16, "packed weights, bfloat16") for bits, own in zip(MEASURED, few_bits, strict=True)),
    ):
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        yield case(f"{name}, {tokens} tokens", [work / s for s in ours], "GOP/s", against, ratios)


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def measure_argmax(shape: Shape, tokens: int, passes: int) -> Case:
    """Return the argmax of the LM head against a search of all logits, for random tokens and weights."""
    weight = torch.randn(shape.vocabulary, shape.hidden).bfloat16()
    x = torch.randn(tokens, shape.hidden).bfloat16()
    hidden, vocabulary = (TokenRows(Meta.of(x.dtype, ("T", n))) for n in (shape.hidden, shape.vocabulary))
    head, logits = LmHead(hidden, vocabulary, packed_weights.pack([weight])), by_packed_weights(x, weight)
    ways = (lambda: head.largest(x), lambda: argmax(logits()))
    seconds = [[seconds_of(way) for way in ways] for _ in range(passes + 1)]
    ours, theirs = zip(*seconds[1:], strict=True)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    name = f"largest logit, {tokens} tokens"
    return case(name, [tokens / s for s in ours], "tokens/s", "a search of all logits", ratios)
