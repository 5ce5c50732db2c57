"""`hpcdecode bench products`: products by weights in panels against those of oneDNN, in bfloat16 and int8.

The products of all layers of a random Llama and its logits, over weights that no cache holds together, as a step has
them. Passes of both sides alternate; ratios are medians of the pairs, above 1 where panels are faster. int8, whose
input is rounded already, is compared with bfloat16 in panels; finding the largest logits without most of the others
(`model/head.py`) with a search of all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from hpcdecode.attention.base import isa
from hpcdecode.bench.limits import by_onednn, has_panels, in_panels
from hpcdecode.bench.workload import SHAPES, Shape
from hpcdecode.errors import UserError
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.lower import packed_weights as panels
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.model.run.lm_head import Head
from hpcdecode.report.benchmark import case, machine, seconds_of
from hpcdecode.sampling.sampler import argmax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(SHAPES), default="355m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128, 256, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--passes", type=int, default=9)


def run(args: argparse.Namespace) -> dict:
    """Measure. Returns the object that `bench --json` prints. UserError on a machine without such products."""
    if not has_panels():
        raise UserError(f"bench products: expected a CPU with products in panels (avx512_bf16), this one uses {isa()}")
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            shape = SHAPES[args.model]
            cases = [c for tokens in args.tokens for c in measure(shape, tokens, args.passes)]
            cases += [measure_largest(shape, tokens, args.passes) for tokens in args.tokens]
    finally:
        torch.set_num_threads(before)
    return {"bench": "products", "machine": machine(), "cases": cases}


def measure(shape: Shape, tokens: int, passes: int) -> Iterator[dict]:
    """bfloat16 against oneDNN, int8 against bfloat16."""
    sizes = [*shape.linears * shape.layers, (shape.hidden, shape.vocabulary)]
    weights = [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in sizes]
    inputs = {n: torch.randn(tokens, n).bfloat16() for n, _ in sizes}
    calls = [[make(inputs[w.shape[1]], w) for w in weights] for make in (in_panels, by_onednn)]
    calls.append([in_panels(inputs[w.shape[1]].to(torch.int8), w.mul(30).to(torch.int8)) for w in weights])
    seconds = [[seconds_of(lambda side=side: [call() for call in side]) for side in calls] for _ in range(passes + 1)]
    work = 2e-9 * tokens * sum(w.numel() for w in weights)
    panels, onednn, int8 = zip(*seconds[1:], strict=True)
    for name, ours, theirs, against in (
        ("bfloat16", panels, onednn, "oneDNN, bfloat16"),
        ("int8", int8, panels, "panels, bfloat16"),
    ):
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        yield case(f"{name}, {tokens} tokens", [work / s for s in ours], "GOP/s", against, ratios)


def measure_largest(shape: Shape, tokens: int, passes: int) -> dict:
    """Of random tokens and weights, whose logits are spread as those of normal numbers."""
    weight = torch.randn(shape.vocabulary, shape.hidden).bfloat16()
    x = torch.randn(tokens, shape.hidden).bfloat16()
    about = (TokenRows(Meta.of(x.dtype, ("T", n))) for n in (shape.hidden, shape.vocabulary))
    head, logits = Head(*about, panels.plain([weight])), in_panels(x, weight)
    ways = (lambda: head.argmax(x), lambda: argmax(logits()))
    seconds = [[seconds_of(way) for way in ways] for _ in range(passes + 1)]
    ours, theirs = zip(*seconds[1:], strict=True)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    name = f"largest logit, {tokens} tokens"
    return case(name, [tokens / s for s in ours], "tokens/s", "a search of all logits", ratios)
