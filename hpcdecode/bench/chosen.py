"""Attention to the tokens that an indexer chooses, against attention over the same latents to all tokens, in turn."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench import filled
from hpcdecode.bench.latent import opened, prepared
from hpcdecode.bench.output import Case
from hpcdecode.report.benchmark import case as result
from hpcdecode.report.benchmark import seconds_of

_VERIFIED = 300  # tokens that an indexer chooses of the sequences that are checked


def _shape(heads: int, index_heads: int, qk_dim: int) -> LayerShape:
    return LayerShape(1, 576, 512, heads, qk_dim**-0.5, latent=True, indexer=IndexerShape(2048, index_heads, 128))


MODELS = {"deepseek-v3.2": _shape(128, 64, 192), "glm-5": _shape(64, 32, 256)}


def measure(
    name: str, kv_dtype: str, contexts: list[int], nbytes: int, threads: int, passes: int, topk: int | None = None
) -> Iterator[Case]:
    """Verify a model's attention to chosen tokens, then yield tokens/s against attention to all, by context.

    Args:
        name: One of MODELS.
        kv_dtype: Data type of both KV caches.
        contexts: Tokens of every sequence.
        nbytes: Bytes of latents of all sequences, at least one.
        threads: Threads that attend.
        passes: Number of measurements.
        topk: Tokens that are chosen, or None for those of the model.
    """
    shape = MODELS[name]
    assert shape.indexer is not None
    few = replace(shape, indexer=replace(shape.indexer, topk=_VERIFIED))
    filled.verify(opened(few, kv_dtype, filled.LENGTHS, threads), few, kv_dtype)
    shape = replace(shape, indexer=replace(shape.indexer, topk=topk or shape.indexer.topk))
    plain = replace(shape, indexer=None)
    for context in contexts:
        lengths = (context,) * max(1, round(nbytes / bytes_per_token([plain], kv_dtype) / context))
        ours, theirs = (prepared(each, kv_dtype, lengths, threads) for each in (shape, plain))
        seconds, speedups = [], []
        for _ in range(passes):
            seconds.append(seconds_of(ours.attend))
            speedups.append(seconds_of(theirs.attend) / seconds[-1])
        about = f"{kv_dtype} {name}, {len(lengths)} sequences of {context}, {threads} threads, chosen tokens"
        yield result(about, [len(lengths) / s for s in seconds], "tokens/s of one layer", "all tokens", speedups)
