"""Embeddings of several tokens together (PLE, of Qwen4) while a model is traced.

Such a layer hashes the ids of a token and of the `ngram_size` - 1 before it, looks up rows of a table by the hashes,
gates them by the residual streams, and adds a causal convolution of what comes of it with `ngram_size` as dilation.

Both go over earlier tokens, so both are states: `hpcdecode::causal_conv`. The dilated convolution has taps of zero
between its own. The ids come of a convolution of bytes whose only tap is one, once for all layers. A byte is exact in
every data type that rows have. What a token brings is its id XOR that of the end of a sequence (EOS): zero, which a
state has before the first token, is EOS, and stands for all tokens before the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hpcdecode.model.frontend.indexers import EVERY_TOKEN
from hpcdecode.model.frontend.replaced_names import replaced_methods

if TYPE_CHECKING:
    import torch

BYTE = 8  # bits
TABLE = ".ngram_embedding."  # in keys of a checkpoint: rows that are looked up
MOST_TAPS = 64  # of a convolution: kMaxTaps of native/kv/types.h
_DECODER, _HASHES, _LAYER = "Qwen4ExpTextModel", "Qwen4ExpTextNGramEmbedding", "Qwen4ExpTextPLELayer"


@contextlib.contextmanager
def tracing_ngrams(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let layers with embeddings of several tokens of `model`, of transformers, be traced inside the block.

    Args:
        model: Model of transformers.
        dtype: Dtype of its activations, in which rows are exchanged.
    """
    modules = list(model.modules())
    if not any(type(m).__name__ == _LAYER for m in modules):
        yield
        return

    def decoder(forward: Callable[..., Any]) -> Callable[..., Any]:
        return _with_earlier_ids(forward, dtype)

    forwards = replaced_methods(modules, {_DECODER: decoder, _HASHES: lambda _: _embedded})
    with forwards, replaced_methods(modules, {_LAYER: lambda _: _convolution(dtype)}, "_short_conv"):
        yield


def ngrams_problem(config: Any) -> str | None:
    """Return why the embeddings of several tokens of the language model `config` cannot be run, or None if they can."""
    if not getattr(config, "ple_layer_ids", None):
        return None
    size, kernel = int(config.ngram_size), int(config.ple_conv_kernel_size)
    if (taps := (kernel - 1) * size + 1) > MOST_TAPS:
        return (
            f"its convolutions go over {taps} tokens (ple_conv_kernel_size {kernel}, ngram_size {size}); expected at "
            f"most {MOST_TAPS}"
        )
    if (eos := end_of_sequence(config)) < 0:
        return f"its embeddings of several tokens begin behind eos_token_id {eos}; expected the id of a token"
    return None


def end_of_sequence(config: Any) -> int:
    """Return the id of the token that ends a sequence for embeddings of several tokens: the first, of several."""
    stated = config.eos_token_id
    return int(stated[0] if isinstance(stated, list) else stated)


def _with_earlier_ids(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """Return the forward of a decoder that hands its layers the ids of earlier tokens, too."""

    def decode(self: Any, input_ids: Any = None, ple_input_ids: Any = None, **kwargs: Any) -> Any:
        ids = input_ids if ple_input_ids is None else ple_input_ids
        masks = {"indexed_attention": EVERY_TOKEN, "linear_attention": None}
        several = _earlier_ids(ids[0], self.config, dtype)[None]
        return forward(self, input_ids=input_ids, **{**kwargs, "attention_mask": masks, "ple_input_ids": several})

    return decode


def _earlier_ids(ids: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the ids of tokens and of those before, newest first, int64 [T, ngram_size].

    Those before the last EOS, and before the first token, are EOS.

    Args:
        ids: Ids of the tokens, int64 [T].
        config: Config of the language model.
        dtype: Dtype in which rows are exchanged.
    """
    import torch

    eos, before = end_of_sequence(config), config.ngram_size - 1
    count = -(-max(config.vocab_size - 1, eos).bit_length() // BYTE)
    code = torch.bitwise_xor(ids, eos)
    parts = torch.stack([torch.bitwise_and(code >> i * BYTE, 255) for i in range(count)], 1)
    rows = parts.to(dtype).repeat(1, before)
    oldest_first = torch.eye(before, before + 1).repeat_interleave(count, 0)
    moved = torch.ops.hpcdecode.causal_conv(rows, oldest_first, None, False).unflatten(1, (before, count)).long()
    earlier, newer = [ids], None
    for shift in range(1, before + 1):
        own = moved[:, before - shift]
        found = sum((own[:, i] << i * BYTE for i in range(1, count)), own[:, 0])
        newer = found if newer is None else torch.where(newer == 0, 0, found)
        earlier.append(torch.bitwise_xor(newer, eos))
    return torch.stack(earlier, 1)


def _embedded(self: Any, several: torch.Tensor, _: object) -> torch.Tensor:
    """Return the embeddings of tokens with those before, side by side by number of tokens and head.

    Args:
        self: Module of transformers.
        several: Result of `_earlier_ids`, [1, T, ngram_size].

    Returns:
        [1, T, heads * dim].
    """
    import torch

    products = several * self.layer_multipliers
    hashes = [products[..., 0]]
    for i in range(1, self.ngram_size):
        hashes.append(torch.bitwise_xor(hashes[-1], products[..., i]))
    by_head = torch.stack(hashes[1:], -1)[..., None].expand(-1, -1, -1, self.heads_per_ngram).flatten(2)
    rows = torch.remainder(by_head, self.ngram_heads_vocab_sizes) + self.ngram_heads_offsets
    embedded: torch.Tensor = self.ngram_embedding(rows)
    return embedded.flatten(2)


def _convolution(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return the dilated convolution of a layer, with SiLU, of activations of `dtype`."""

    def convolve(self: Any, x: torch.Tensor, _: object) -> torch.Tensor:
        import torch

        taps, (dilation,) = self.conv1d.weight[:, 0], self.conv1d.dilation
        spread = torch.nn.functional.pad(taps[..., None], (0, dilation - 1)).flatten(1)
        spread = spread[:, : (taps.shape[1] - 1) * dilation + 1]
        convolved: torch.Tensor = torch.ops.hpcdecode.causal_conv(x[0].to(dtype), spread, None, True)
        return convolved[None].to(x.dtype)

    return convolve
