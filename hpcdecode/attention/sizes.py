"""What sequences take of an R-rank's memory: K and V that grow with each token, and recurrent state that does not.

Memory is counted in tokens of KV cache. A sequence's state counts as so many tokens as it takes bytes. In a model whose
layers all keep states a block has room for any number of tokens, and takes the bytes of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from hpcdecode import _attn_cpu
from hpcdecode.attention import cuda
from hpcdecode.attention.base import native_shapes
from hpcdecode.attention.cpu_states import reserved_bytes
from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.shapes import MixerShape, attention_shapes, recurrent_shapes

ENDLESS_BLOCK = 1 << 20  # tokens of a block that holds a state alone


def capacity_for(
    layers: Sequence[MixerShape],
    kv_dtype: str,
    nbytes: int,
    block_tokens: int | None = None,
    state_tokens: int = 0,
    windowed: bool = False,
) -> int:
    """Return the tokens, in whole blocks, that fit in `nbytes`.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        nbytes: Bytes for K, V and states.
        block_tokens: Tokens of a block, or None for the default.
        state_tokens: Tokens that a sequence's state counts as, of which layers that only keep states make use.
        windowed: Whether sequences give up what leaves windows. The tokens are those that all layers keep.
    """
    if not attention_shapes(layers):
        return nbytes // _reserved(layers) * (state_tokens + (block_tokens or ENDLESS_BLOCK))
    block, tokens = _block_bytes(layers, kv_dtype, block_tokens, windowed)
    return nbytes // block * tokens


def bytes_per_token(
    layers: Sequence[MixerShape], kv_dtype: str, block_tokens: int | None = None, windowed: bool = False
) -> float:
    """Return the stored bytes of one token over all layers, padding included; without attention those of a state."""
    if not attention_shapes(layers):
        return _reserved(layers) / (block_tokens or ENDLESS_BLOCK)
    block, tokens = _block_bytes(layers, kv_dtype, block_tokens, windowed)
    return block / tokens


def block_tokens_for(layers: Sequence[MixerShape], kv_dtype: str) -> int:
    """Return the tokens of a block where `block_tokens` is None."""
    return _block_bytes(layers, kv_dtype, None)[1] if attention_shapes(layers) else ENDLESS_BLOCK


def state_tokens_for(layers: Sequence[MixerShape], kv_dtype: str, block_tokens: int) -> int:
    """Return the tokens, in whole blocks, that a sequence's state counts as; 0 if blocks stand for states."""
    if block_tokens == ENDLESS_BLOCK or not attention_shapes(layers):
        return 0
    block, tokens = _block_bytes(layers, kv_dtype, block_tokens)
    return -(-_reserved(layers) // block) * tokens


def footprint_for(
    layers: Sequence[MixerShape],
    kv_dtype: str,
    block_tokens: int,
    state_tokens: int,
    windowed: bool = False,
    on_gpu: bool = False,
    lookahead: int = 0,
) -> Footprint:
    """Return what a sequence takes of a KV cache.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        block_tokens: Tokens of a block.
        state_tokens: Tokens that a sequence's state counts as.
        windowed: Whether sequences give up what leaves windows.
        on_gpu: Whether it is on a GPU, and kernels attend; else on CPUs.
        lookahead: Tokens by which sequences may be truncated.
    """
    attend = attention_shapes(layers)
    if not windowed or not attend:
        return Footprint(block_tokens, state_tokens)
    if on_gpu:
        _, groups = cuda.layer_groups(attend, kv_dtype, block_tokens)
    else:
        _, groups = _attn_cpu.layer_groups(_native(layers), kv_dtype, block_tokens)
    return Footprint.of_groups(groups, block_tokens, state_tokens, lookahead)


def _reserved(layers: Sequence[MixerShape]) -> int:
    """Return the bytes that a sequence's states take on a CPU, padding included."""
    return reserved_bytes(recurrent_shapes(layers))


def _block_bytes(
    layers: Sequence[MixerShape], kv_dtype: str, block_tokens: int | None, windowed: bool = False
) -> tuple[int, int]:
    """Return the bytes of a block over all layers that attend, and its tokens."""
    shapes = _native(layers)
    nbytes, tokens = _attn_cpu.block_bytes(shapes, kv_dtype, block_tokens)
    if not windowed:
        return nbytes, tokens
    each, groups = _attn_cpu.layer_groups(shapes, kv_dtype, tokens)
    return each * len(groups), tokens


def _native(layers: Sequence[MixerShape]) -> list[_attn_cpu.LayerShape]:
    """Return the layers that attend, in C++.

    Layers that take the choice of another store what layers without indexers do; that one need not be among `layers`.
    """
    shapes = [s if s.indexer and s.indexer.heads else replace(s, indexer=None) for s in attention_shapes(layers)]
    return native_shapes(shapes, _attn_cpu.LayerShape)
