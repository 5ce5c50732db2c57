"""Attention on a device: the KV cache of an R-rank with a GPU, or of the emulation of one."""

from collections.abc import Sequence
from typing import TypeAlias

from numpy import float32, int32, uint8
from numpy.typing import NDArray
from torch import Tensor

_Ints: TypeAlias = list[int] | tuple[int, ...] | NDArray[int32] | Tensor  # int32, one dimension
_Floats: TypeAlias = NDArray[float32] | Tensor  # float32, one dimension, on the host
_Matrix: TypeAlias = NDArray[float32] | Tensor  # float32 or bfloat16, rows of contiguous elements
_Bytes: TypeAlias = NDArray[uint8] | Tensor  # uint8, one dimension, contiguous

class CapacityError(RuntimeError):
    """The KV cache has too few free blocks; nothing was changed."""

class LayerShape:
    """The shape of one attention layer."""

    def __init__(
        self,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        q_heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: bool,
        latent: bool = False,
        index_heads: int = 0,
        index_dim: int = 0,
        index_topk: int = 0,
        chunked: bool = False,
        compress_rate: int = 0,
        index_pool: int = 1,
        index_local: int = 0,
        bias_dim: int = 0,
        bias_profiles: _Floats | None = None,
        row_sinks: bool = False,
    ) -> None:
        """Describe an attention layer.

        Args:
            kv_heads: Number of key and value heads.
            k_dim: Elements of a query head and of a key head.
            v_dim: Elements of a value head.
            q_heads: Number of query heads, a multiple of kv_heads.
            scale: Factor of every score q.k.
            window: Positions that a query sees, its own included, or None for all.
            softcap: Bound c of scores, which become c * tanh(score / c), or None.
            sinks: True if every head has one more logit in the softmax's denominator.
            latent: True if the values are the first v_dim elements of K, which rows and the KV cache have once.
            index_heads: Heads of the layer's indexer; 0 if it has none.
            index_dim: Elements of an index query head and of an index key; 0 without an indexer.
            index_topk: Tokens that a token attends to at most, chosen by the indexer or by that of the layer before; 0
                for all.
            chunked: True if a query sees the positions of its own chunk of `window` positions alone.
            compress_rate: Tokens of which each compressed entry is made; 0 for none. A query sees those that are
                complete, or index_topk of them, beside its window. A row has an entry behind k, then the index key.
            index_pool: Tokens that are chosen together, by the index key of the last one. Those behind the last
                whole pool are attended to as well. index_topk is whole pools.
            index_local: If positive, pools are blocks, of which every KV head attends to as many of the last ones,
                and to those that its own index head chooses by the largest q.k; every token has an index key.
            bias_dim: Numbers that a row has for each query head, behind the queries; 0 for none. Their products with
                the profiles are added to the scores.
            bias_profiles: float32 [bias_dim * extent], by distance between query and key; None for profiles that
                are minus the distance.
            row_sinks: True if rows have a sink for each query head, behind the numbers of biases.

        Raises:
            ValueError: If window or softcap is not positive, a chunk has no window, or profiles are not bias_dim alike.
        """

class RecurrentShape:
    """The shape of one recurrent layer."""

    def __init__(
        self,
        heads: int,
        k_heads: int,
        k_dim: int,
        v_dim: int,
        taps: int,
        silu: bool,
        delta: bool,
        normalised: bool,
        scale: float,
        decay_dim: int,
        has_beta: bool,
        has_rate: bool,
        compress_rate: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Describe a recurrent layer.

        The channels of q, k and v go through the convolution. Then a token changes the state S [k_dim, v_dim] of each
        head: S = exp(decay) * S; e = v - S^T k if delta, else v; e = beta * e; S = S + k e^T; o = S^T q + skip * v.
        Arithmetic is in float32, and o is rounded once.

        Args:
            heads: Number of heads of v, decay, beta and the state.
            k_heads: Number of heads of q and k; head h uses k head h // (heads // k_heads).
            k_dim: Elements of a head of q and k; 0 for a layer without a state, whose output is v.
            v_dim: Elements of a head of v.
            taps: Taps of a causal convolution of each channel of q, k and v; 0 for none.
            silu: True if its result goes through SiLU.
            delta: True for the delta rule.
            normalised: True if q and k of each head become x / sqrt(sum(x^2) + 1e-6) after the convolution.
            scale: Factor of q, after that.
            decay_dim: Log decays of a head: 1, or k_dim for one of each row of the state.
            has_beta: True if each head has a factor of what is written.
            has_rate: True if the log decay is beta * rate, and not in the rows.
            compress_rate: Tokens of a window of a compressor, whose rows are [values | gates in float32] and whose
                heads are channels; 0 for none.
            overlaps: True if each of its means is over the window before, too, for which rows then have values and
                gates in front of the others.

        Raises:
            ValueError: If the numbers make no sense together.
        """

    def row_columns(self, dtype: str) -> int:
        """Return the columns of a row [q | k | v | decay | beta] in float32 or bfloat16.

        q, k and v are of this dtype. Decays [heads * decay_dim], left out with has_rate or k_dim 0, and betas [heads],
        if has_beta, are float32; each takes two columns of bfloat16.
        """

    @property
    def out_columns(self) -> int:
        """Columns of the output: heads * v_dim."""

class Recurrence:
    """A recurrent layer whose states are on a device.

    It keeps nothing itself: memory is given by addresses on the device, 0 for none, and must stay while it lives.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        state_dtype: str,
        convolution: int,
        bias: int,
        rate: int,
        skip: int,
        windows: int,
        states: int,
        device: int,
    ) -> None:
        """Describe a layer.

        Args:
            shape: Shape of the layer, which serves_states.
            state_dtype: float32, or bfloat16: states are rounded to it after every token.
            convolution: float32 [taps, channels].
            bias: float32 [channels].
            rate: float32 [heads, decay_dim]; where v_dim is 1 [decay_dim, heads].
            skip: float32 [heads].
            windows: float32 [places, taps - 1, channels].
            states: [places, heads, k_dim, v_dim]; where v_dim is 1 [places, k_dim, heads].
            device: Number of the device.

        Raises:
            ValueError: If the shape has no kernels, or memory is missing.
        """

    def advance(
        self, sequences: int, count: int, longest: int, rows: _Matrix, out: _Matrix, inputs: int, stream: int
    ) -> None:
        """Take tokens through the layer. A token's result does not depend on what else is in the call.

        Args:
            sequences: Address on the device of int32 [3, count]: places, numbers of tokens, first rows.
            count: Number of sequences.
            longest: Most tokens of one.
            rows: Rows [q | k | v | decay | beta] of the tokens on the device, those of a sequence in order.
            out: Result on the device, [rows, out_columns], of the same dtype; overwritten.
            inputs: Address on the device for float32 [rows, channels], of layers with a convolution and states.
            stream: Address of the CUDA stream, or 0 for the default one.

        Raises:
            ValueError: If matrices have other sizes.
        """

def serves_states(shape: RecurrentShape) -> bool:
    """Return whether there are kernels for a recurrent layer."""

class KvCache:
    """A paged KV cache in a device's memory, with the kernels that attend to it.

    A slot is a small int that the caller chooses for a sequence.
    Calls put their work on a CUDA stream and return before it is done; tensors must stay until then.
    Bad arguments raise ValueError or TypeError before anything changes.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int,
        device: int,
        batches: int = 18,
        range_blocks: int = 0,
        frames: int = 0,
        windowed: bool = False,
        lookahead: int = 0,
    ) -> None:
        """Allocate a KV cache on a device.

        Args:
            layers: Shapes of the model's attention layers.
            kv_dtype: float32, float16, bfloat16, int8, k8v4 or int4.
            capacity_tokens: Tokens to hold, rounded up to whole blocks.
            max_sequences: Slots are 0 to max_sequences - 1.
            block_tokens: Tokens of a block.
            device: Number of the device.
            batches: Calls whose sequences stay on the device; with 2 a lane and 2 more none waits for another.
            range_blocks: Blocks of a page, or 0 if every block has a place of its own.
            frames: Number of pages of any layer that memory has room for.
            windowed: Whether sequences give up the blocks that left a layer's window (see layer_groups).
            lookahead: Tokens by which they may be truncated all the same.

        Raises:
            MemoryError: If the device has no room.
        """

    def extend(self, slots: _Ints, counts: _Ints, stream: int) -> None:
        """Make room for counts[i] more tokens in slots[i]; open slots that are new.

        Raises:
            CapacityError: If there are too few free blocks; nothing changes.
        """

    def append(self, layer: int, slots: _Ints, counts: _Ints, kv: _Matrix, stream: int) -> None:
        """Write K and V of the last counts[i] positions of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n] on the host, each slot once.
            counts: int32 [n] on the host.
            kv: Rows [k | v], [sum(counts), kv_heads * (k_dim + v_dim)], or [k] of a latent layer, on the device.
            stream: Address of the CUDA stream, or 0 for the default one.
        """

    def attend(
        self, layer: int, slots: _Ints, counts: _Ints, qkv: _Matrix, out: _Matrix, sinks: _Floats | None, stream: int
    ) -> None:
        """Append, then attend causally from the last counts[i] positions over all of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n] on the host, each slot once.
            counts: int32 [n] on the host.
            qkv: Rows [q | k | v], or [q | k] of a latent layer, [sum(counts), q_columns + kv_columns], on the device.
            out: Result, [sum(counts), q_heads * v_dim], of the dtype of qkv, on the device; overwritten.
            sinks: float32 [q_heads] on the host, or None for a layer without sinks.
            stream: Address of the CUDA stream, or 0 for the default one.
        """

    def release(self, slots: _Ints) -> None:
        """Free the blocks of sequences and close their slots."""

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with the blocks of slot src; a shared block is copied before it is written."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the positions of a slot from length on."""

    def length(self, slot: int) -> int:
        """Return the number of positions that an open slot holds."""

    def blocks(self, slot: int) -> list[int]:
        """Return the ids of an open slot's blocks, in order, group by group."""

    def memory(self) -> list[object]:
        """Return blocks of each layer, or of all groups, torch.uint8 [blocks, bytes]; layers share those of frames."""

    def check(self) -> None:
        """Check that every block is free or referenced, and counted right.

        Raises:
            RuntimeError: With the equation that does not hold.
        """

    @property
    def used_tokens(self) -> int:
        """Tokens of the blocks in use."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all blocks."""

    @property
    def free_blocks(self) -> int:
        """Number of free blocks over all layers."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def bytes(self) -> int:
        """Bytes of the arena on the device."""

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V that attend has read so far."""

    def place_pages(self, frames: _Ints) -> None:
        """Say in which frame each page of a layer lies for the calls to come, or -1."""

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies of blocks, (from, to) in every layer, that extend left to be made since the last call."""

    def mark_ranges(self, slots: _Ints, counts: _Ints, all: bool, marks: _Bytes) -> None:
        """Mark the ranges in which slots have blocks.

        Args:
            slots: int32 [n], each slot once.
            counts: int32 [n].
            all: True for all blocks, False for those of the last counts[i] positions.
            marks: uint8 [n * ranges], 1 or 0.
        """

    def written_blocks(self, slots: _Ints, counts: _Ints) -> list[int]:
        """Return the blocks of the last counts[i] positions of slots[i]."""

    def mark_used(self, marks: _Bytes) -> None:
        """Set marks, uint8 [blocks], to 1 for every block that a slot holds, to 0 for others."""

    @property
    def ranges(self) -> int:
        """Number of ranges of blocks."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of a page, and of a frame."""

def serves(layers: Sequence[LayerShape], kv_dtype: str, device: int) -> bool:
    """Return whether there are kernels for these layers, and room for them in a device's shared memory."""

def expand_weights(
    form: int, packed: int, out: int, dtype: str, experts: int, outputs: int, inputs: int, device: int, stream: int
) -> None:
    """Expand weights in few bits to matrices.

    Args:
        form: Value of a WeightForm of _ops_cpu.
        packed: Address on the device of what _ops_cpu packs, one expert after the other.
        out: Address on the device of the result, [experts, outputs, inputs], a multiple of 16.
        dtype: float32 or bfloat16, of the result.
        experts: Number of weights.
        outputs: Outputs of each.
        inputs: Inputs, a multiple of what the form's must be.
        device: Number of the device.
        stream: Address of the CUDA stream, or 0 for the default one.

    Raises:
        ValueError: If the form is none in few bits, or the dtype another.
    """

def device_count() -> int:
    """Return the number of devices that the driver shows, 0 without a driver. Throw RuntimeError if it fails."""

def block_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int) -> int:
    """Return the bytes of a block over all layers."""

def layer_groups(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int) -> tuple[int, list[tuple[int, bool]]]:
    """Return (bytes of a block, (window or 0, chunked) of each group of layers) of windowed KV caches."""
