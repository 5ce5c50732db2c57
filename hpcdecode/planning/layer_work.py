"""What a token costs at the layers at which a model is cut: bytes and FLOP on an R-rank, and columns on the wire.

A layer that attends reads K and V of every cached token; one that keeps a state reads and writes it, however many
tokens there were. Attention over latents has one KV head for all query heads, so that its FLOP count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, MixerShape, attention_shapes
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.planning.hardware import COMPUTE_EFFICIENCY

_CHUNK = 512  # tokens of `attention.torch_reads`
_KV_PASSES = 4  # torch's operations gather K and V, which reads and writes them, and read them for two products
_SCORE_PASSES = 9  # through float32 scores, from their product to that of weights and values
_RESULT_PASSES = 4  # through float32 results of chunks
_INDEX_PASSES = 4  # through float32 products of index heads
_CHOICE_BYTES = 40  # of a score, as a key of 64 bits that is sorted
_LATENT_EFFICIENCY = 0.085  # of a GPU's peak FLOP/s, of kernels over latents: 128 heads of DeepSeek-V3 on an H100
_CODE_READS = {"int8": 1.8, "k8v4": 2.8, "int4": 3.2}  # bytes of bfloat16 that take as long as one, on an H100
_STATE_PASSES = 14  # of torch's operations through float32 states: gathered, decayed, summed twice, added to, put back
_PROMPT_STATE_PASSES = 10  # of these for every token of a prompt


def device_kv_bytes(layers: Sequence[MixerShape], kv_dtype: str, *, kernels: bool) -> float:
    """Return the bytes that a GPU moves for a query and one token that it attends to, of those layers that attend.

    Kernels read K and V once. Codes take them longer than as many bytes of bfloat16, which is counted as bytes
    (measured, docs/gpu.md). Torch's operations also go through scores and results of chunks in memory.
    """
    plain = without_indexers(layers)
    if kernels:
        return kv_bytes(plain, kv_dtype) * _CODE_READS.get(kv_dtype, 1.0)
    each = ((s, _SCORE_PASSES + _RESULT_PASSES * (s.v_dim + 2) / _CHUNK) for s in attention_shapes(plain))
    of_heads = sum(4 * s.q_heads * own / max(s.compress_rate, 1) for s, own in each)
    return _KV_PASSES * read_bytes(plain, kv_dtype) + of_heads


def device_score_bytes(layers: Sequence[MixerShape], kv_dtype: str) -> float:
    """Return the bytes that torch's operations move on a GPU to score one cached token, and to choose."""
    of_heads = sum(
        (4 * _INDEX_PASSES * s.indexer.heads + _CHOICE_BYTES * bool(s.indexer.heads)) / s.key_tokens
        for s in indexed(layers)
        if s.indexer
    )
    return _KV_PASSES * key_bytes(layers, kv_dtype) + of_heads


def on_kernels(layers: Sequence[MixerShape], kv_dtype: str) -> bool:
    """Return whether kernels attend at these layers on GPUs, which give up what leaves windows then, as CPUs do."""
    from hpcdecode.attention.open import by_kernels

    return by_kernels(attention_shapes(layers), kv_dtype)


def device_attend_flop(layers: Sequence[MixerShape], *, kernels: bool) -> float:
    """Return the FLOP of attention on a GPU as at COMPUTE_EFFICIENCY, which kernels over latents do not reach."""
    latents = attend_flop(s for s in attention_shapes(layers) if s.latent and kernels)
    return attend_flop(layers) + latents * (COMPUTE_EFFICIENCY / _LATENT_EFFICIENCY - 1)


def device_state_bytes(layers: Iterable[MixerShape]) -> tuple[float, float]:
    """Return the bytes of states that a GPU moves for a token of a sequence that decodes, and for one of a prompt.

    Kernels read and write states once a call. Torch's operations, which advance what has no kernels, go through them
    several times for every token.
    """
    from hpcdecode.attention.cuda import serves_states

    states = [s for s in layers if isinstance(s, RecurrentShape)]
    by_torch = [s for s in states if not serves_states(s)]
    floats = sum(4.0 * s.numbers for s in by_torch)
    moved = state_bytes_moved(s for s in states if s not in by_torch)
    return moved + _STATE_PASSES * floats, _PROMPT_STATE_PASSES * floats


def kv_bytes(layers: Sequence[MixerShape], kv_dtype: str) -> float:
    """Return the stored bytes of a token of those layers that attend, scales and padding included."""
    attend = attention_shapes(layers)
    return bytes_per_token(attend, kv_dtype) if attend else 0.0


def key_bytes(layers: Sequence[MixerShape], kv_dtype: str) -> float:
    """Return the stored bytes of a token's index keys."""
    return kv_bytes(layers, kv_dtype) - kv_bytes(without_indexers(layers), kv_dtype)


def read_bytes(layers: Iterable[MixerShape], kv_dtype: str) -> float:
    """Return the bytes that a query reads for a cached token: what is stored of it, or its part of an entry."""
    rows = [(s, replace(s, compress_rate=0)) for s in layers if isinstance(s, LayerShape)]
    return sum(kv_bytes([row], kv_dtype) / max(s.compress_rate, 1) for s, row in rows)


def window_bytes(layers: Iterable[MixerShape], kv_dtype: str) -> float:
    """Return the bytes that a query reads of its window at layers with compressed entries, beside these."""
    rows = (replace(s, compress_rate=0, indexer=None) for s in _with_entries(layers))
    return sum(kv_bytes([row], kv_dtype) * (row.window or 0) for row in rows)


def window_flop(layers: Iterable[MixerShape]) -> int:
    """Return the FLOP of a query and its window at layers with compressed entries."""
    return sum(2 * s.q_heads * (s.k_dim + s.v_dim) * (s.window or 0) for s in _with_entries(layers))


def _with_entries(layers: Iterable[MixerShape]) -> list[LayerShape]:
    return [s for s in layers if isinstance(s, LayerShape) and s.compress_rate]


def attend_flop(layers: Iterable[MixerShape]) -> float:
    """Return the FLOP of one query and one cached token: q.k and its part of o, all query heads.

    Of compressed entries there is one for so many tokens.
    """
    attend = (s for s in layers if isinstance(s, LayerShape))
    return sum(2 * s.q_heads * (s.k_dim + s.v_dim) / max(s.compress_rate, 1) for s in attend)


def without_indexers(layers: Iterable[MixerShape]) -> list[MixerShape]:
    """Return the layers as if they attended to all tokens."""
    return [replace(s, indexer=None) if isinstance(s, LayerShape) else s for s in layers]


def indexed(layers: Iterable[MixerShape]) -> list[LayerShape]:
    """Return those layers that attend to the tokens that an indexer chooses, theirs or the one of a layer before."""
    return [s for s in layers if isinstance(s, LayerShape) and s.indexer is not None]


def score_flop(layers: Iterable[MixerShape]) -> float:
    """Return the FLOP of the index scores of one query and one cached token: q.k and its weight, all index heads."""
    return sum(2 * s.indexer.heads * (s.indexer.dim + 1) / s.key_tokens for s in indexed(layers) if s.indexer)


def most_chosen(layers: Iterable[MixerShape]) -> int:
    """Return the cached tokens of which indexers choose all, as tokens or in entries."""
    return max(s.indexer.most_seen * max(s.compress_rate, 1) for s in indexed(layers) if s.indexer)


def by_window(layers: Iterable[MixerShape]) -> dict[int, list[LayerShape]]:
    """Return the layers that see the last tokens alone, by how many; without those with compressed entries."""
    found: dict[int, list[LayerShape]] = {}
    for s in layers:
        if isinstance(s, LayerShape) and s.kept_tokens is not None:
            found.setdefault(s.kept_tokens, []).append(s)
    return dict(sorted(found.items()))


def recurrence_flop(shape: RecurrentShape) -> int:
    """Return the FLOP of a token's pass through the states of a layer, exp and convolution aside.

    An element is decayed and added to (3), and takes part in one product with q (2), and one with k for the delta
    rule (2).
    """
    return (7 if shape.delta else 5) * shape.heads * shape.k_dim * shape.v_dim


def state_flop(layers: Iterable[MixerShape]) -> int:
    """Return the FLOP of a token at those layers that keep states, convolutions included."""
    return sum(recurrence_flop(s) + 2 * s.taps * s.channels for s in layers if isinstance(s, RecurrentShape))


def state_bytes_moved(layers: Iterable[MixerShape]) -> int:
    """Return the bytes of states that one token of a sequence reads and writes.

    A state is read and written. Of a convolution's window the earlier inputs are read, and the new one is written.
    """
    states = (s for s in layers if isinstance(s, RecurrentShape))
    return sum(2 * s.number_bytes * s.numbers + s.taps * s.channels * s.element_bytes for s in states)


def wire_columns(layers: Iterable[MixerShape]) -> int:
    """Return the columns of a token's rows to R-ranks, and of what comes back."""
    return sum(shape.row_columns + shape.out_columns for shape in layers)


def dealt_heads(layers: Iterable[MixerShape]) -> list[int]:
    """Return what members share evenly: KV heads, heads that share a latent, and those of states.

    Of a state these are the value heads, and the heads of q and k unless all value heads share one.
    """
    found = []
    for s in layers:
        if isinstance(s, LayerShape):
            found.append(s.q_heads if s.latent else s.kv_heads)
        else:
            found += [s.heads] if s.k_heads == 1 else [s.heads, s.k_heads]
    return found


def of_member(layers: Sequence[MixerShape], tp: int) -> list[MixerShape]:
    """Return what a member of `tp`, which share the heads evenly, has of the layers: its heads; a latent whole."""
    return [_of_member(layer, tp) for layer in layers]


def _of_member(s: MixerShape, tp: int) -> MixerShape:
    if isinstance(s, LayerShape):
        indexer = s.indexer
        if indexer and indexer.local:
            indexer = replace(indexer, heads=indexer.heads // tp)
        return replace(s, q_heads=s.q_heads // tp, kv_heads=1 if s.latent else s.kv_heads // tp, indexer=indexer)
    return replace(s, heads=s.heads // tp, k_heads=max(s.k_heads // tp, 1))
