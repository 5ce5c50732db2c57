"""The KV cache in torch on any device: the host keeps the block table, torch's operations attend.

It serves what `attn_cuda` has no kernels for: int8 latents, and V heads of more than 256 dims. On the CPU it runs as
on a GPU.
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
from hpcdecode.attention.shapes import LayerShape, adds_to_scores, chooses_tokens
from hpcdecode.attention.torch_attend import Heads, attend_wave
from hpcdecode.attention.torch_reads import CHUNK, RowPlaces, Wave, to_device, waves
from hpcdecode.attention.torch_rows import RowStore, k_spans, layer_bytes, open_rows, turned, v_spans

_GROUP_BYTES = 1 << 25  # of the rows that are read for a group of items on a GPU
_CPU_GROUP_BYTES = 1 << 20
_PARTIAL_BYTES = 1 << 27  # of the results of a wave
_MOST_TOKENS = 2**31 - 1  # places are int32


def check_layers(layers: Sequence[LayerShape], kv_dtype: str) -> None:
    """Raise ValueError if the KV cache in torch does not take layers of these shapes, or the data type."""
    latent = any(shape.latent for shape in layers)
    if kv_dtype not in (known := LATENT_KV_DTYPES if latent else KV_DTYPES):
        raise ValueError(f"kv_dtype: expected one of {', '.join(known)}{' for latents' * latent}, got {kv_dtype!r}")
    if chooses_tokens(layers):
        raise ValueError("expected layers that attend to all tokens on a device, got one with an indexer or entries")
    if adds_to_scores(layers):
        raise ValueError("expected layers whose scores are q.k alone on a device, got one with biases or sinks of rows")


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
        if table.capacity_tokens > _MOST_TOKENS:
            raise ValueError(f"capacity_tokens: expected at most {_MOST_TOKENS:,}, got {table.capacity_tokens:,}")
        self.block_tokens, self.capacity_tokens = table.block_tokens, table.capacity_tokens
        self.release, self.fork, self.truncate = table.release, table.fork, table.truncate
        self.length, self.check = table.length, table.check
        self._rows = [self._open(shape) for shape in self.layers]
        self.bytes = sum(rows.bytes for pair in self._rows for rows in pair)
        self.bytes_read = 0
        self._clock = clock_of(self.device)
        self._calls: dict[tuple[bytes, bytes], _CallSequences] = {}
        self._sinks: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, on the host and on the device
        self._version = table.version

    def _open(self, shape: LayerShape) -> tuple[RowStore, ...]:
        tokens, heads = self.capacity_tokens, shape.kv_heads
        k = open_rows(tokens, heads, shape.k_dim, k_spans(shape, self.kv_dtype), self.kv_dtype, self.device)
        if shape.latent:
            return (k,)
        v = open_rows(tokens, heads, shape.v_dim, v_spans(shape, self.kv_dtype), self.kv_dtype, self.device)
        return k, v

    def tensors(self) -> list[Tensor]:
        """Return all that is stored of all layers, each [capacity_tokens, ...] in the order of blocks."""
        return [tensor for pair in self._rows for rows in pair for tensor in rows.tensors]

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
            of_block = (slice(b * self.block_tokens, (b + 1) * self.block_tokens) for b in (old, new))
            source, target = of_block
            for rows in (rows for pair in self._rows for rows in pair):
                rows.copy(source, target)

    @torch.inference_mode()
    def append(self, layer: int, slots: IntArray, counts: IntArray, kv: Matrix) -> None:
        """Write K and V, as `KvCache.append`."""
        shape, rows = self._layer(layer), self._matrix("kv", kv)
        call = self._call(slots, counts)
        self._require("kv", rows, call.tokens, shape.kv_columns)
        self._put(layer, call, rows)

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
            self._put(layer, call, rows[:, shape.q_columns :])
            self._attend(layer, call, rows[:, : shape.q_columns], result, own)
        self.bytes_read += call.tokens_read(shape) * layer_bytes(shape, self.kv_dtype)

    def _put(self, layer: int, call: _CallSequences, kv: Tensor) -> None:
        shape = self.layers[layer]
        for rows, part in zip(self._rows[layer], kv.split([shape.k_columns, shape.v_columns], 1), strict=False):
            rows.put(call.written, part.unflatten(1, (shape.kv_heads, -1)))

    def _attend(self, layer: int, call: _CallSequences, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        shape, (k, *v) = self.layers[layer], self._rows[layer]
        heads = Heads(shape, k, v[0] if v else None, self._products(q.dtype))
        queries = q.unflatten(1, (shape.q_heads, shape.k_dim))
        if spans := k_spans(shape, self.kv_dtype):
            queries = turned(queries.float(), spans)
        queries = queries.to(heads.dtype)
        for wave in call.waves(shape, self._group(shape, heads.dtype)):
            o = attend_wave(heads, queries[wave.rows], wave, sinks)
            out[wave.rows] = turned(o, v_spans(shape, self.kv_dtype)).flatten(1).to(out.dtype)

    def _products(self, activations: torch.dtype) -> torch.dtype:
        """Return the dtype of products: bfloat16 if nothing is lost that activations or codes have."""
        narrow = activations == torch.bfloat16 and (self.kv_dtype == "bfloat16" or self.kv_dtype in CODES)
        return torch.bfloat16 if narrow else torch.float32

    def _group(self, shape: LayerShape, dtype: torch.dtype) -> int:
        """Return the items of a group, which depend on nothing but the layer."""
        columns = shape.own_k_columns + shape.v_columns
        most = _CPU_GROUP_BYTES if self.device.type == "cpu" else _GROUP_BYTES
        return max(most // (CHUNK * columns * dtype.itemsize), 1)

    def _call(self, slots: IntArray, counts: IntArray) -> _CallSequences:
        """Return the call of these sequences, which stays on the device until the block table changes."""
        if self._version != self.table.version:
            self._calls.clear()
            self._version = self.table.version
        key = np.asarray(slots).tobytes(), np.asarray(counts).tobytes()
        if key not in self._calls:
            self._calls[key] = _CallSequences(self.table, slots, counts, self.device)
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


class _CallSequences:
    """The sequences of a call. What kernels need of them is made when it is asked for first, and kept.

    Args:
        table: Which blocks they hold.
        slots: int32 [n].
        counts: int32 [n].
        device: Of the tensors.

    Attributes:
        tokens: Number of rows.
        written: Places of the rows, int64 [tokens].
    """

    def __init__(self, table: BlockTable, slots: IntArray, counts: IntArray, device: torch.device) -> None:
        own, new = table.written(slots, counts)
        self._device = device
        firsts = np.repeat(np.cumsum(new) - new, new)
        sequences = np.repeat(np.arange(len(own)), new)
        self.tokens = len(sequences)
        positions = (table.lengths[own] - new)[sequences] + np.arange(self.tokens) - firsts
        blocks = table.held(own)
        self._rows = RowPlaces(sequences, positions, blocks, table.block_tokens)
        ids = blocks[sequences, positions // table.block_tokens].astype(np.int64)
        (written,) = to_device([ids * table.block_tokens + positions % table.block_tokens], device)
        self.written = written.long()
        self._first, self._lengths = table.lengths[own] - new, table.lengths[own]
        self._waves: dict[tuple[int | None, bool, int, int], list[Wave]] = {}

    def waves(self, shape: LayerShape, group: int) -> list[Wave]:
        """Return what the rows read at a layer."""
        most = max(_PARTIAL_BYTES // (4 * shape.q_heads * (shape.v_dim + 2)), group)
        key = shape.window, shape.chunked, group, most
        if key not in self._waves:
            self._waves[key] = waves(self._rows, shape, group, most, self._device)
        return self._waves[key]

    def tokens_read(self, shape: LayerShape) -> int:
        """Return the tokens of which K and V are read at a layer, those of a sequence once."""
        low = shape.first_seen(self._first)
        some = self._lengths > self._first
        return int((self._lengths - low)[some].sum())
