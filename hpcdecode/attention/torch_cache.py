"""The KV cache in torch on any device: the host keeps the block table, torch's operations attend.

It serves what `attn_cuda` has no kernels for: tokens that indexers choose, compressed entries, biases of scores and
sinks of tokens, int8 latents, and V heads of more than 256 dims. On the CPU it runs as on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcdecode.attention.base import DEFAULT_BLOCK_TOKENS, KV_DTYPES, LATENT_KV_DTYPES, FloatArray, IntArray, Matrix
from hpcdecode.attention.block_table import BlockTable
from hpcdecode.attention.clocks import clock_of
from hpcdecode.attention.quantized import CODES
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.torch_attend import Heads, attend_wave, biases_of
from hpcdecode.attention.torch_calls import CallSequences
from hpcdecode.attention.torch_choice import RowLists, list_rows, list_waves
from hpcdecode.attention.torch_layer import StoredLayer, rows_of_block
from hpcdecode.attention.torch_reads import CHUNK
from hpcdecode.attention.torch_rows import k_spans, layer_bytes, turned, v_spans

_GROUP_BYTES = 1 << 25  # of the rows that are read for a group of items on a GPU
_CPU_GROUP_BYTES = 1 << 20
_SCORED_GROUPS = 4  # as many that are scored at once: each has a dozen launches, for little work
_PARTIAL_BYTES = 1 << 27  # of the results of a wave
_MOST_ROWS = 2**31 - 1  # places are int32


def check_layers(layers: Sequence[LayerShape], kv_dtype: str) -> None:
    """Raise ValueError if the KV cache in torch does not take layers of these shapes, or the data type."""
    latent = any(shape.latent for shape in layers)
    if kv_dtype not in (known := LATENT_KV_DTYPES if latent else KV_DTYPES):
        raise ValueError(f"kv_dtype: expected one of {', '.join(known)}{' for latents' * latent}, got {kv_dtype!r}")
    for i, shape in enumerate(layers):
        if shape.bias is not None and shape.chooses_from is not None:
            raise ValueError(f"layer {i}: expected biases where all tokens are attended to, got an indexer or entries")


class TorchKvCache:
    """A `KvCache` in torch. Tensors are on the device; calls put their work on its current stream and return.

    A row's result depends on nothing else in a call as far as the device multiplies matrices of one shape alike.
    Activations and K and V of 16 bits or less are multiplied in bfloat16 if activations are bfloat16, else in float32.

    Args:
        layers: Shapes of the attention layers.
        kv_dtype: One of KV_DTYPES; for latents one of LATENT_KV_DTYPES.
        capacity_tokens: Tokens to hold, rounded up to whole blocks.
        max_sequences: Slots are 0 to max_sequences - 1.
        block_tokens: Tokens of a block, or None for the default.
        device: Any device of torch.

    Raises:
        torch.OutOfMemoryError: If the device has no room.
        ValueError: If an argument is bad.
    """

    @torch.inference_mode()
    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        check_layers(layers, kv_dtype)
        self.layers, self.kv_dtype, self.device = tuple(layers), kv_dtype, torch.device(device)
        block_tokens = DEFAULT_BLOCK_TOKENS if block_tokens is None else block_tokens
        self.table = table = BlockTable(block_tokens, capacity_tokens, max_sequences)
        rows = table.blocks * max(rows_of_block(shape, table.block_tokens) for shape in layers)
        if rows > _MOST_ROWS:
            raise ValueError(f"capacity_tokens: expected at most {_MOST_ROWS:,} with entries, got {rows:,}")
        self.block_tokens, self.capacity_tokens = table.block_tokens, table.capacity_tokens
        self.release, self.fork, self.truncate = table.release, table.fork, table.truncate
        self.length, self.check = table.length, table.check
        self._rows = [StoredLayer(shape, kv_dtype, table.blocks, table.block_tokens, self.device) for shape in layers]
        self.bytes = sum(rows.bytes for rows in self._rows)
        self.bytes_read = 0
        self._clock = clock_of(self.device)
        self._calls: dict[tuple[bytes, bytes], CallSequences] = {}
        self._choice: tuple[CallSequences, RowLists] | None = None  # of the last indexer, and in which call
        self._profiles: dict[int, Tensor] = {}  # of biases, by layer
        self._sinks: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, on the host and on the device
        self._version = table.version

    def tensors(self) -> list[Tensor]:
        """Return all that is stored of all layers, each in the order of blocks."""
        return [tensor for rows in self._rows for tensor in rows.tensors]

    @property
    def used_tokens(self) -> int:
        """Return the tokens of the blocks that slots hold."""
        return self.table.used_tokens

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.table.free_blocks

    @property
    def attend_seconds(self) -> float:
        """Return the seconds that the device took for `attend`; wait for it."""
        return self._clock.seconds()

    @torch.inference_mode()
    def extend(self, slots: IntArray, counts: IntArray) -> None:
        """Make room for new tokens, as `KvCache.extend`."""
        for old, new in self.table.extend(slots, counts):
            for rows in self._rows:
                rows.copy(old, new)

    @torch.inference_mode()
    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        shape, rows = self._layer(layer), self._matrix("kv", kv)
        call = self._call(slots, counts)
        self._require("kv", rows, call.tokens, shape.kv_columns)
        self._rows[layer].put(call, rows)

    @torch.inference_mode()
    def attend(
        self, layer: int, slots: IntArray, counts: IntArray, qkv: Matrix, out: Matrix, sinks: FloatArray | None = None
    ) -> None:
        """Append and attend, as `KvCache.attend`."""
        shape, rows, result = self._layer(layer), self._matrix("qkv", qkv), self._matrix("out", out)
        call = self._call(slots, counts)
        self._require("qkv", rows, call.tokens, shape.row_columns)
        self._require("out", result, call.tokens, shape.out_columns)
        if rows.dtype != result.dtype:
            raise ValueError(f"qkv and out: expected the same dtype, got {rows.dtype} and {result.dtype}")
        own = self._sinks_of(layer, sinks)
        with self._clock:
            self._rows[layer].put(call, rows[:, shape.q_columns :])
            q, by = rows[:, : shape.own_q_columns], rows[:, shape.own_q_columns : shape.q_columns]
            if shape.chooses_from is None:
                tokens = call.tokens_read(shape)
                self._attend(layer, call, q, by, result, own)
            else:
                listed = self._listed(layer, call, by)
                tokens = int(listed.counts.sum()) * call.tokens // max(len(listed.counts), 1)  # of all heads
                self._attend_listed(layer, call, listed, q, result, own)
        self.bytes_read += tokens * layer_bytes(shape, self.kv_dtype)

    def _attend(
        self, layer: int, call: CallSequences, q: Tensor, by: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        shape, rows = self.layers[layer], self._rows[layer]
        heads = Heads(shape, rows.k, rows.v, self._products(q.dtype))
        queries, mixes, logits = self._queries(heads, q), by[:, : shape.bias_columns], by[:, shape.bias_columns :]
        for wave in call.waves(shape, *self._sizes(heads)):
            own = logits[wave.rows].float() if shape.row_sinks else sinks
            biases = None if shape.bias is None else biases_of(mixes[wave.rows], shape, self._profiles_of(layer))
            o = attend_wave(heads, queries[wave.rows], wave, own, biases)
            out[wave.rows] = turned(o, v_spans(shape, self.kv_dtype)).flatten(1).to(out.dtype)

    def _listed(self, layer: int, call: CallSequences, by: Tensor) -> RowLists:
        """Return what rows attend to at a layer where not all tokens are seen."""
        shape = self.layers[layer]
        if not shape.compress_rate and shape.indexer and not shape.indexer.heads:
            if self._choice is None or self._choice[0] is not call:
                raise ValueError("expected the layers whose choice this one takes to attend before it")
            return self._choice[1]
        columns = shape.indexer.heads + shape.indexer.dim if shape.indexer else 1
        group = _SCORED_GROUPS * self._group(columns, torch.float32)
        listed = list_rows(self._rows[layer], call, by, self._products(by.dtype), group)
        if not shape.compress_rate:
            self._choice = call, listed
        return listed

    def _attend_listed(
        self, layer: int, call: CallSequences, listed: RowLists, q: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        shape, rows = self.layers[layer], self._rows[layer]
        heads, places = Heads(shape, rows.k, rows.v, self._products(q.dtype)), listed.places
        queries, lists = self._queries(heads, q), len(places) // max(call.tokens, 1)
        if lists > 1:
            heads = heads.by_head()
            queries = queries.unflatten(1, (lists, -1)).flatten(0, 1)
            sinks = None if sinks is None else sinks.view(1, lists, -1).expand(call.tokens, -1, -1).flatten(0, 1)
            places = places.long() * lists + torch.arange(lists, device=self.device).repeat(call.tokens)[:, None]
        result = torch.empty(len(places), heads.shape.out_columns, dtype=out.dtype, device=self.device)
        for wave in list_waves(call, listed._replace(places=places), *self._sizes(heads)):
            own = sinks[wave.rows] if sinks is not None and lists > 1 else sinks
            o = attend_wave(heads, queries[wave.rows], wave, own)
            result[wave.rows] = turned(o, v_spans(shape, self.kv_dtype)).flatten(1).to(out.dtype)
        out.copy_(result.view(call.tokens, shape.out_columns))

    def _queries(self, heads: Heads, q: Tensor) -> Tensor:
        """Return queries, [tokens, q_heads, k_dim], as products with stored rows take them."""
        queries: Tensor = q.unflatten(1, (heads.shape.q_heads, heads.shape.k_dim))
        if spans := k_spans(heads.shape, self.kv_dtype):
            queries = turned(queries.float(), spans)
        return queries.to(heads.dtype)

    def _profiles_of(self, layer: int) -> Tensor:
        """Return the profiles of a layer's biases on the device, to which they are sent once."""
        bias = self.layers[layer].bias
        assert bias is not None, "expected a layer with biases"
        if layer not in self._profiles:
            self._profiles[layer] = torch.from_numpy(bias.values().copy()).to(self.device)
        return self._profiles[layer]

    def _products(self, activations: torch.dtype) -> torch.dtype:
        """Return the dtype of products: bfloat16 if nothing is lost that activations, codes or index keys have."""
        narrow = activations == torch.bfloat16 and (self.kv_dtype == "bfloat16" or self.kv_dtype in CODES)
        return torch.bfloat16 if narrow else torch.float32

    def _sizes(self, heads: Heads) -> tuple[int, int]:
        """Return the items of a group and of a wave, which depend on nothing but the layer."""
        shape = heads.shape
        group = self._group(shape.own_k_columns + shape.v_columns, heads.dtype)
        columns = shape.v_dim + 2 + (shape.bias.extent if shape.bias else 0)
        return group, max(_PARTIAL_BYTES // (4 * shape.q_heads * columns), group)

    def _group(self, columns: int, dtype: torch.dtype) -> int:
        """Return the items of a group whose chunks have so many columns."""
        most = _CPU_GROUP_BYTES if self.device.type == "cpu" else _GROUP_BYTES
        return max(most // (CHUNK * columns * dtype.itemsize), 1)

    def _call(self, slots: IntArray, counts: IntArray) -> CallSequences:
        """Return the call of these sequences, which stays on the device until the block table changes."""
        if self._version != self.table.version:
            self._calls.clear()
            self._version = self.table.version
        key = np.asarray(slots).tobytes(), np.asarray(counts).tobytes()
        if key not in self._calls:
            self._calls[key] = CallSequences(self.table, slots, counts, self.device)
        return self._calls[key]

    def _layer(self, layer: int) -> LayerShape:
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layer {layer} is out of range: expected 0 to {len(self.layers) - 1}")
        return self.layers[layer]

    def _matrix(self, name: str, given: Matrix) -> Tensor:
        matrix = torch.as_tensor(given)
        if matrix.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name}: expected float32 or bfloat16, got {str(matrix.dtype).removeprefix('torch.')}")
        if matrix.device.type != self.device.type:
            raise ValueError(f"{name}: expected a tensor on {self.device}, got one on {matrix.device}")
        return matrix

    @staticmethod
    def _require(name: str, x: Tensor, rows: int, columns: int) -> None:
        if tuple(x.shape) != (rows, columns):
            raise ValueError(f"{name}: expected shape [{rows}, {columns}], got {list(x.shape)}")

    def _sinks_of(self, layer: int, sinks: FloatArray | None) -> Tensor | None:
        """Return a layer's sinks on the device, to which they are sent once."""
        shape = self.layers[layer]
        if shape.sinks != (sinks is not None):
            raise ValueError(f"sinks: expected {'[q_heads] float32' if shape.sinks else 'None'} for layer {layer}")
        if sinks is None:
            return None
        values = torch.as_tensor(sinks).float()
        known = self._sinks.get(layer)
        if known is None or not torch.equal(known[0], values):
            self._sinks[layer] = known = (values, values.to(self.device))
        return known[1]
