"""Attention to chosen tokens, or to compressed entries, against attention of the same layer to all tokens, in turn.

Of DeepSeek-V4 these are its two kinds of layers, without sinks, and latents are the keys of its one KV head. No
released config of Qwen4 was at hand: the widths of its indexer are assumed.
"""

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

_VERIFIED = 304  # tokens or entries that an indexer chooses of the sequences that are checked, or a few less


def _shape(heads: int, index_heads: int, qk_dim: int) -> LayerShape:
    return LayerShape(1, 576, 512, heads, qk_dim**-0.5, latent=True, indexer=IndexerShape(2048, index_heads, 128))


_ENTRIES = LayerShape(1, 512, 512, 64, 512**-0.5, 128, latent=True, compress_rate=128)
MODELS = {
    "deepseek-v3.2": _shape(128, 64, 192),
    "glm-5": _shape(64, 32, 256),
    "glm-5-next": LayerShape(1, 512, 512, 64, 256**-0.5, latent=True, indexer=IndexerShape(2048, 32, 128, 16)),
    "minimax-m3": LayerShape(4, 128, 128, 64, 128**-0.5, indexer=IndexerShape(1920, 4, 128, 128, 1)),
    "qwen4": LayerShape(2, 256, 256, 16, 256**-0.5, indexer=IndexerShape(2048, 4, 128, 16)),
    "deepseek-v4-sparse": replace(_ENTRIES, compress_rate=4, indexer=IndexerShape(512, 64, 128)),
    "deepseek-v4-heavy": _ENTRIES,
}


def _choosing(shape: LayerShape, topk: int | None) -> LayerShape:
    """Return a shape whose indexer, if it has one, chooses `topk`; None for its own."""
    own = shape.indexer
    if own is None or topk is None:
        return shape
    return replace(shape, indexer=replace(own, topk=topk // own.pool * own.pool))


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
        topk: Tokens, or entries, that are chosen; None for those of the model.
    """
    shape = MODELS[name]
    few = _choosing(shape, _VERIFIED)
    filled.verify(opened(few, kv_dtype, filled.LENGTHS, threads), few, kv_dtype)
    shape = _choosing(shape, topk)
    plain = replace(shape, indexer=None, compress_rate=0, window=None)
    for context in contexts:
        lengths = (context,) * max(1, round(nbytes / bytes_per_token([plain], kv_dtype) / context))
        ours, theirs = (prepared(each, kv_dtype, lengths, threads) for each in (shape, plain))
        seconds, speedups = [], []
        for _ in range(passes):
            seconds.append(seconds_of(ours.attend))
            speedups.append(seconds_of(theirs.attend) / seconds[-1])
        about = f"{kv_dtype} {name}, {len(lengths)} sequences of {context}, {threads} threads, chosen"
        yield result(about, [len(lengths) / s for s in seconds], "tokens/s of one layer", "all tokens", speedups)
