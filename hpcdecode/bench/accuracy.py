"""`hpcdecode bench accuracy`: what the data types of the KV cache and of the weights cost in quality.

The model is teacher-forced over stretches of a text. The R-part attends out of a KV cache of each data type. Quantised
weights run with a float32 cache. Perplexity and logits are compared with those of a float32 cache and the model's own
weights in the same run. Spreads are quartiles.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import KV_DTYPES, KvCache
from hpcdecode.attention.open import open_layers
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.sizes import block_tokens_for, state_tokens_for
from hpcdecode.bench.output import Case, Report
from hpcdecode.config import ACTIVATIONS, DTYPES, QUANTISED
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.lower import quantize
from hpcdecode.report.benchmark import entry, machine
from hpcdecode.system.model_path import find_model

EXACT = "float32"


class Way(NamedTuple):
    """A model, and a KV cache for its attention."""

    model: SplitModel
    kv_cache: KvCache


@dataclass
class Losses:
    """What one data type costs, a value for each stretch.

    Attributes:
        nats: Mean of -log p(next token).
        same_choice: Share of tokens with the same most likely successor as in float32.
        errors: Root mean square of the logits' errors over the logits' standard deviation.
    """

    nats: list[float] = field(default_factory=list)
    same_choice: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Return exp of the mean of all stretches' nats."""
        return math.exp(statistics.fmean(self.nats))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", metavar="DIR", help="model directory, or demo (as for generate, else demo)")
    parser.add_argument("--text", metavar="FILE", help="what to read (the Python language reference, as pydoc has it)")
    parser.add_argument("--dtype", choices=DTYPES, default=EXACT, help="of weights and activations (%(default)s)")
    parser.add_argument("--kv-dtype", nargs="+", default=list(KV_DTYPES[1:]), choices=KV_DTYPES)
    help = "(default: int8, where this CPU has its products)"
    parser.add_argument("--weights", nargs="*", choices=QUANTISED, help=help)
    parser.add_argument("--activations", choices=ACTIVATIONS, default="auto", help="for these weights (%(default)s)")
    parser.add_argument("--stretches", type=int, default=16, help="taken evenly from the text (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of each stretch (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure every data type against float32.

    Raises:
        UserError: If the text is too short, or the model has too few positions.
    """
    path = find_model(args.model or os.environ.get("HPCDECODE_MODEL") or "demo", {})
    text = stretches(Tokenizer.load(path), _read(args.text), args.stretches, args.tokens)
    model = load_split(path, dtype=args.dtype)
    if args.tokens > (model.max_positions or args.tokens):
        raise UserError(f"--tokens {args.tokens}: the model has {model.max_positions} positions; give at most that")
    ways = {name: Way(model, _kv_cache(model, name, args.tokens)) for name in (EXACT, *args.kv_dtype)}
    by_int8 = args.activations == "int8"
    for weights in (["int8"] if quantize.exact() else []) if args.weights is None else args.weights:
        own = load_split(path, dtype=args.dtype, quantised=weights, int8_activations=by_int8)
        ways[f"{weights} weights" + " by int8" * by_int8] = Way(own, ways[EXACT].kv_cache)
    losses = measure(ways, text)
    exact = losses.pop(EXACT)
    return {
        "bench": "accuracy",
        "machine": machine(),
        "cases": [case for name, loss in losses.items() for case in _cases(name, loss, exact)],
    }


def stretches(tokenizer: Tokenizer, text: str, count: int, tokens: int) -> list[list[int]]:
    """Return `count` stretches of `tokens` token ids, evenly spaced, each begun as the tokenizer begins a text.

    Raises:
        UserError: If the text is too short.
    """
    ids = tokenizer.encode_texts([text], add_special_tokens=False)[0]
    whole = tokenizer.encode_texts([text])[0]
    begin = whole[: len(whole) - len(ids)]
    own = tokens - len(begin)
    if own < 2 or len(ids) < own:
        raise UserError(f"--tokens {tokens}: expected 3 or more, and a text as long; the text has {len(ids)} tokens")
    starts = np.linspace(0, len(ids) - own, count).astype(int)
    return [begin + ids[start : start + own] for start in starts]


def _kv_cache(model: SplitModel, kv_dtype: str, tokens: int) -> KvCache:
    weights = [model.recurrent_weights(i) for i, s in enumerate(model.attends) if isinstance(s, RecurrentShape)]
    state = state_tokens_for(model.attends, kv_dtype, block_tokens_for(model.attends, kv_dtype))
    capacity = max(tokens, block_tokens_for(model.attends, kv_dtype)) + state
    return open_layers(model.attends, weights, kv_dtype=kv_dtype, capacity_tokens=capacity, max_sequences=1)


def measure(ways: dict[str, Way], text: Sequence[Sequence[int]]) -> dict[str, Losses]:
    """Teacher-force every stretch in every way, and compare with the first way."""
    losses = {name: Losses() for name in ways}
    for ids in text:
        following = torch.tensor(ids[1:])
        exact = None
        for name, way in ways.items():
            logits = forward(way.model, way.kv_cache, ids)[:-1].float()
            exact = logits if exact is None else exact
            loss = losses[name]
            loss.nats.append(torch.nn.functional.cross_entropy(logits, following).item())
            loss.same_choice.append((logits.argmax(-1) == exact.argmax(-1)).float().mean().item())
            loss.errors.append(((logits - exact).square().mean().sqrt() / exact.std(-1).mean()).item())
    return losses


@torch.inference_mode()
def forward(model: SplitModel, kv_cache: KvCache, ids: Sequence[int]) -> Tensor:
    """Run one sequence with every attention out of an empty KV cache, and empty that again.

    Returns:
        Logits, [T, vocabulary].
    """
    slots, counts = np.array([0], np.int32), np.array([len(ids)], np.int32)
    positions = torch.arange(len(ids))
    kv_cache.extend(slots, counts)
    o: Tensor | None = None
    context: tuple[Tensor, ...] = torch.tensor(ids), positions, positions
    for layer, shape in enumerate(model.attends):
        rows, context = model.slice(layer, o, context)
        o = rows[0].new_empty(len(ids), shape.out_columns)
        kv_cache.attend(layer, slots, counts, torch.cat(rows, dim=1), o, model.sinks(layer))
    kv_cache.release(slots)
    assert o is not None, "a model has layers"
    return model.logits(o, context)


def _read(path: str | None) -> str:
    """Return the text of a file, or the Python language reference of pydoc."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {path}: expected a readable text in UTF-8: {error}") from error


def _cases(name: str, loss: Losses, exact: Losses) -> list[Case]:
    ratios = [math.exp(a - b) for a, b in zip(loss.nats, exact.nats, strict=True)]
    error, same = (statistics.fmean(x) for x in (loss.errors, loss.same_choice))
    reference = f"float32 KV, perplexity {exact.perplexity:.4g}"
    return [
        entry(
            f"{name} perplexity", loss.perplexity, "per token", reference, loss.perplexity / exact.perplexity, ratios
        ),
        entry(f"{name} logit error", error, "RMS", "deviation of float32 KV's logits", error, loss.errors),
        entry(f"{name} same first choice", same, "share", "float32 KV", same, loss.same_choice),
    ]
