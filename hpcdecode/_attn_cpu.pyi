"""Attention on this machine's cores: the KV cache of an R-rank, and the prompt attention of an S-rank."""

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

class KvCache:
    """A paged KV cache in this machine's memory, with its threads and kernels.

    A slot is a small int that the caller chooses for a sequence. Calls exclude each other and release the GIL.
    Bad arguments raise ValueError or TypeError before anything changes.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        kv_dtype: str,
        capacity_tokens: int,
        max_sequences: int,
        block_tokens: int | None,
        threads: int,
        cpus: Sequence[int],
        isa: str,
        nodes: Sequence[int],
        team: bool,
        range_blocks: int = 0,
        frames: int = 0,
        windowed: bool = False,
        lookahead: int = 0,
    ) -> None:
        """Reserve the address space of a KV cache; memory is touched when it is used.

        Args:
            layers: Shapes of the model's attention layers.
            kv_dtype: float32, float16, bfloat16, int8, k8v4 or int4.
            capacity_tokens: Tokens to hold, rounded up to whole blocks.
            max_sequences: Slots are 0 to max_sequences - 1.
            block_tokens: Tokens of a block, or None for the default.
            threads: Number of threads, the calling one included.
            cpus: One CPU per thread to pin workers to, or an empty list.
            isa: Instruction set to use, or an empty string for the best.
            nodes: NUMA node of each of cpus, or an empty list.
            team: True to run on the process's OpenMP threads.
            range_blocks: Blocks of a page, or 0 if every block has a place of its own.
            frames: Number of pages of any layer that memory has room for.
            windowed: Whether sequences give up the blocks that left a layer's window (see layer_groups).
            lookahead: Tokens by which they may be truncated all the same.

        Raises:
            RuntimeError: If the system maps no more memory.
        """

    def extend(self, slots: _Ints, counts: _Ints) -> None:
        """Make room for counts[i] more tokens in slots[i]; open slots that are new.

        Raises:
            CapacityError: If there are too few free blocks; nothing changes.
        """

    def append(self, layer: int, slots: _Ints, counts: _Ints, kv: _Matrix) -> None:
        """Write K and V of the last counts[i] positions of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n], each slot once.
            counts: int32 [n].
            kv: Rows [k | v], [sum(counts), kv_heads * (k_dim + v_dim)].
        """

    def attend(
        self, layer: int, slots: _Ints, counts: _Ints, qkv: _Matrix, out: _Matrix, sinks: _Floats | None = None
    ) -> None:
        """Append, then attend causally from the last counts[i] positions over all of slots[i].

        Args:
            layer: Index of the attention layer.
            slots: int32 [n], each slot once.
            counts: int32 [n].
            qkv: Rows [q | k | v], [sum(counts), q_heads * k_dim + kv_heads * (k_dim + v_dim)].
            out: Result, [sum(counts), q_heads * v_dim], of the dtype of qkv; overwritten.
            sinks: float32 [q_heads], or None for a layer without sinks.
        """

    def release(self, slots: _Ints) -> None:
        """Free the blocks of sequences and close their slots."""

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with the blocks of slot src; a shared block is copied before it is written."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the positions of a slot from length on."""

    def length(self, slot: int) -> int:
        """Return the number of positions that an open slot holds."""

    def check(self) -> None:
        """Check that every block is free or referenced, and counted right.

        Raises:
            RuntimeError: With the equation that does not hold.
        """

    def read_seconds(self) -> float:
        """Return the seconds in which the threads read the whole arena once: the floor of attending to all of it."""

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
    def node_free_blocks(self) -> list[int]:
        """Number of free blocks of each NUMA node, in the order of the nodes' numbers."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def bytes(self) -> int:
        """Bytes of the arena, touched or not."""

    @property
    def threads(self) -> int:
        """Number of threads."""

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""

    @property
    def bytes_read(self) -> int:
        """Bytes of K and V that attend has read so far."""

    @property
    def attend_seconds(self) -> float:
        """Seconds spent in attend so far."""

    @property
    def thread_seconds(self) -> float:
        """Seconds of append and attend so far, times the number of threads."""

    @property
    def busy_seconds(self) -> float:
        """Seconds of these in which threads had work."""

    def copy_out(self, slot: int, first_block: int, blocks: _Bytes) -> int:
        """Copy whole blocks of a slot, from first_block on, to blocks, layer by layer; return their CRC-32C."""

    def copy_in(self, slot: int, first_block: int, blocks: _Bytes) -> None:
        """Copy what copy_out has given into the blocks of a slot."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, or those of its group."""

    def held_blocks(self, slot: int) -> int:
        """Return how many blocks a slot holds."""

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

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of the layer whose pages were placed last."""

    def row_bytes(self, layer: int) -> int:
        """Return the bytes of a token at a layer."""

    def save_tokens(self, layer: int, frame: int, items: _Ints, rows: _Bytes) -> None:
        """Copy tokens of blocks that lie in a frame to rows; other calls may run that leave this frame alone.

        Args:
            layer: Of the page in the frame.
            frame: Its number.
            items: int32 [n * 4]: a block of the page, its first token, how many, and the byte of rows where they begin.
            rows: uint8, row_bytes a token.
        """

    def restore_tokens(self, layer: int, frame: int, items: _Ints, rows: _Bytes) -> None:
        """Copy tokens back, as save_tokens has them, in order."""

    @property
    def address(self) -> int:
        """Address of the arena, where frames lie one behind the other."""

    def seal(self, move: PageMove, journal: _Bytes) -> None:
        """Take the checksums of what a move writes, and copy its tokens to the journal of its page.

        Other calls may run that leave this frame alone.
        """

    def unseal(self, move: PageMove, journal: _Bytes) -> bool:
        """Copy the tokens of a page's journal to the frame; False if something is not what was written.

        Other calls may run that leave this frame alone.
        """

def crc32c(data: _Bytes) -> int:
    """Return the CRC-32C of data."""

def crc32c_by_table(data: _Bytes) -> int:
    """Return the same without instructions for it."""

class PageMove:
    """What moves of a page of a KV cache with frames, in or out."""

    @property
    def writes(self) -> bool:
        """True if it goes out."""

    @property
    def page(self) -> tuple[int, int]:
        """Layer and range of the page."""

    @property
    def frame(self) -> int:
        """Number of the frame that it lies in."""

    @property
    def blocks(self) -> list[int]:
        """The page's blocks that move as a whole."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Begin and end of these in the page, in bytes, as tiers can move them."""

    @property
    def journal(self) -> tuple[int, int]:
        """Begin and end of what moves of the page's journal, in bytes."""

    @property
    def items(self) -> list[list[int]]:
        """Tokens in the journal: block, first token, how many, byte of the journal."""

    @property
    def nbytes(self) -> int:
        """Bytes that move."""

    def seal(self, page: _Bytes, block_bytes: int) -> None:
        """Take the checksums of its blocks, of a page without a journal that was copied to memory, uint8."""

    def unseal(self, page: _Bytes, block_bytes: int) -> bool:
        """Return whether a page without a journal that was read into memory, uint8, has the checksums of its blocks."""

class PageTable:
    """Which pages of a KV cache with frames lie in memory, and which of them move next.

    It decides; others move what it returns, in order, and say so. Calls must exclude each other.
    Marks are uint8, 1 or 0, one a range, unless said otherwise.
    """

    def __init__(
        self,
        ranges: int,
        range_blocks: int,
        block_tokens: int,
        block_bytes: int,
        journal_bytes: int,
        alignment: int,
        row_bytes: Sequence[int],
        frames: int,
        window: int,
    ) -> None:
        """Begin with all pages absent.

        Args:
            ranges: Number of ranges of blocks.
            range_blocks: Blocks of a page, in one range at one layer.
            block_tokens: Tokens of a block.
            block_bytes: Bytes of a block at a layer.
            journal_bytes: Room for single tokens behind the blocks of a page in a tier.
            alignment: Of what tiers read and write, in bytes.
            row_bytes: Bytes of a token at every layer.
            frames: Pages that memory has room for.
            window: Pages that come in ahead of their use.
        """

    def set_live(self, live: _Bytes) -> None:
        """Say which blocks sequences hold, uint8 [ranges * range_blocks]; what others held is forgotten."""

    def pin(self, layer: int, parts: _Bytes) -> list[PageMove]:
        """Have pages of a layer come in, and stay until unpin; return the moves that begin."""

    def unpin(self, layer: int, parts: _Bytes) -> list[PageMove]:
        """Let pages of a layer go, which are needed again when all others have been; return the moves that begin."""

    def pump(self) -> list[PageMove]:
        """Return the moves that begin now."""

    def find_able(self, layer: int, needs: _Bytes, able: _Bytes) -> int:
        """Find the rows that have all their pages; return their number.

        Args:
            layer: Of the pages.
            needs: uint8 [n * ranges], the ranges that each row needs.
            able: uint8 [n], set to 1 or 0.
        """

    def place(self, kv_cache: KvCache, layer: int) -> None:
        """Tell a KV cache in which frame each page of a layer lies for the calls to come."""

    def frames(self, layer: int) -> list[int]:
        """Return the frame of each page of a layer, or -1."""

    def wrote(self, layer: int, blocks: _Ints) -> None:
        """Note that blocks of pinned pages changed, whatever of them."""

    def grew(self, layer: int, blocks: _Ints, tokens: _Ints) -> None:
        """Note that blocks of pinned pages grew by one token each, tokens of the blocks."""

    def was_moved(self, move: PageMove) -> None:
        """Note that a move has come to its end; some of its blocks may be others' by now."""

    def broken(self) -> str:
        """Return what does not hold of: frames are free or have one page, blocks are somewhere; empty if all does."""

    @property
    def any_pinned(self) -> bool:
        """True if any page has to stay."""

class Prefill:
    """Causal attention of prompts over their own K and V, which the caller holds packed.

    Calls exclude each other and release the GIL.
    Bad arguments raise ValueError or TypeError before anything is written.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        dtype: str,
        threads: int,
        cpus: Sequence[int],
        isa: str,
        beside: KvCache | None,
    ) -> None:
        """Prepare the attention of prompts.

        Args:
            layers: Shapes of the model's attention layers.
            dtype: float32 or bfloat16, of all activations.
            threads: Number of threads, the calling one included.
            cpus: One CPU per thread to pin workers to, or an empty list.
            isa: Instruction set to use, or an empty string for the best.
            beside: KV cache whose threads are used, or None for the OpenMP threads.
        """

    def packed_bytes(self, layer: int, tokens: int) -> int:
        """Return the bytes that hold the packed K and V of a prompt's tokens at a layer."""

    def attend(
        self,
        layer: int,
        packed: Sequence[_Bytes],
        starts: _Ints,
        counts: _Ints,
        q: _Matrix,
        k: _Matrix,
        v: _Matrix,
        out: _Matrix,
        sinks: _Floats | None = None,
        skipped_queries: _Ints | None = None,
        beside: tuple[KvCache, int, _Ints, _Ints, _Matrix, _Ints, _Ints, _Matrix, _Matrix, _Floats | None]
        | None = None,
    ) -> tuple[float, float, float]:
        """Pack k and v of the chunks, then attend causally from the chunks' tokens.

        The threads do the work of a KV cache beside it: each takes the longest item left of either.

        Args:
            layer: Index of the attention layer.
            packed: For every chunk uint8 memory of its prompt, with the tokens before starts[i].
            starts: int32 [n], position of the chunk's first token in its prompt.
            counts: int32 [n], tokens of the chunk.
            q: Queries of the chunks' tokens in order, [sum(counts), q_heads * k_dim].
            k: Keys, [sum(counts), kv_heads * k_dim].
            v: Values, [sum(counts), kv_heads * v_dim].
            out: Result, [sum(counts), q_heads * v_dim].
            sinks: float32 [q_heads], or None for a layer without sinks.
            skipped_queries: int32 [n], how many of a chunk's first tokens need no result, or None.
            beside: None, or what a KV cache is to do: (KV cache, layer, slots, counts and kv as its append takes them,
                slots, counts, qkv, out and sinks as its attend takes them). A slot is in one of the two lists.
                The KV cache is the one whose threads are used.

        Returns:
            The seconds of the call, dealt out by what threads spent: attend and append of the KV cache, and prompts.
        """

    @property
    def traces(self) -> bool:
        """True to let the calling thread run all items of attend, and note what each took."""

    @traces.setter
    def traces(self, value: bool) -> None: ...
    @property
    def items(self) -> list[tuple[str, int, int, float, float]]:
        """The items of the last call, as they were taken, if it was traced.

        Each is (kind, group, token, estimated seconds, seconds); kind is attend, append, pack or prompt.
        All but attend have the group of their sequence and head.
        """

    @property
    def thread_seconds(self) -> float:
        """Seconds of attend so far, times the number of threads."""

    @property
    def busy_seconds(self) -> float:
        """Seconds of these in which threads had work."""

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""

    @property
    def threads(self) -> int:
        """Number of threads."""

def play_region(
    shape: LayerShape,
    kv_dtype: str,
    block_tokens: int,
    lengths: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    threads: int,
    seconds_per_byte: float,
    seconds_per_product: float,
    seconds_per_token: float,
    together: bool,
) -> list[tuple[str, int, float, float]]:
    """Return what attention of a layer would take, without K and V.

    Its items are cut, and threads take them, as Prefill.attend has it.

    Args:
        shape: Of the layer.
        kv_dtype: Of the KV cache.
        block_tokens: Tokens of a block.
        lengths: Of sequences that decode, their new tokens included.
        chunks: First token and tokens of every chunk of a prompt.
        threads: Number of threads.
        seconds_per_byte: Of a thread that attends to a byte of the KV cache.
        seconds_per_product: Of a thread that multiplies for prompts.
        seconds_per_token: Of a thread that packs or appends a token of a KV head.
        together: True for one region; False if what is appended, what attends, and prompts follow each other.

    Returns:
        Every item as (kind, thread, begin, end), as they are taken; kind is attend, append, pack or prompt.
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

class StateStore:
    """The recurrent states of sequences in this machine's memory.

    A slot is a small int that the caller chooses for a sequence. Calls exclude each other and release the GIL.
    Bad arguments raise ValueError or TypeError before anything changes.
    """

    def __init__(
        self,
        layers: Sequence[RecurrentShape],
        weights: Sequence[tuple[_Matrix | None, _Floats | None, _Floats | None, _Floats | None]],
        dtype: str,
        state_dtype: str,
        max_sequences: int,
        threads: int,
        cpus: Sequence[int],
        isa: str,
        nodes: Sequence[int],
        team: bool,
        beside: KvCache | None,
        lookahead: int,
    ) -> None:
        """Reserve the address space of the states; memory is touched when a slot opens.

        Args:
            layers: Shapes of the model's recurrent layers.
            weights: Of each layer (conv_weight [channels, taps], conv_bias [channels], rate [heads * decay_dim],
                skip [heads]), float32, or None in place of one that the layer has not; copied.
            dtype: float32 or bfloat16, of rows and outputs.
            state_dtype: float32, or bfloat16: states are rounded to it after every token.
            max_sequences: Slots are 0 to max_sequences - 1.
            threads: Number of threads, the calling one included.
            cpus: One CPU per thread to pin workers to, or an empty list.
            isa: Instruction set to use, or an empty string for the best.
            nodes: NUMA node of each of cpus, or an empty list.
            team: True to run on the process's OpenMP threads.
            beside: KV cache whose threads and nodes are used in place of threads, cpus, nodes and team, or None.
            lookahead: Tokens by which slots may be truncated after a call of one token more at most.

        Raises:
            RuntimeError: If the system maps no more memory.
        """

    def extend(self, slots: _Ints, counts: _Ints) -> None:
        """Let slots[i] have counts[i] more tokens; open slots that are new, with states of zero."""

    def run(self, layer: int, slots: _Ints, counts: _Ints, rows: _Matrix, out: _Matrix) -> None:
        """Take the last counts[i] tokens of slots[i] through a layer's states.

        Every layer runs once after each extend, with the same counts. A token's result does not depend on the other
        sequences of the call, on how many tokens come at once, nor on the number of threads.

        Args:
            layer: Index of the recurrent layer.
            slots: int32 [n], each slot once.
            counts: int32 [n].
            rows: Rows of the tokens in order, [sum(counts), row_columns].
            out: Result, [sum(counts), out_columns], of the same dtype; overwritten.
        """

    def release(self, slots: _Ints) -> None:
        """Close slots and give their memory back to the system."""

    def fork(self, src: int, dst: int) -> None:
        """Open slot dst with a copy of all that slot src has."""

    def truncate(self, slot: int, length: int) -> None:
        """Drop the last tokens of a slot, which came with a call of 1 + `lookahead` at most, but not its first.

        Raises:
            ValueError: If one of them is in the slot's states.
        """

    def length(self, slot: int) -> int:
        """Return the number of tokens that an open slot has had."""

    def check(self) -> None:
        """Check that every place is free or held by one slot.

        Raises:
            RuntimeError: With the equation that does not hold.
        """

    def rewrite_seconds(self) -> float:
        """Return the seconds in which the threads read and write the open slots' memory: the floor of run."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence in all layers, as reserved."""

    @property
    def open_slots(self) -> int:
        """Number of open slots."""

    @property
    def bytes_moved(self) -> int:
        """Bytes of states that run has read and written so far."""

    @property
    def run_seconds(self) -> float:
        """Seconds spent in run so far."""

    @property
    def threads(self) -> int:
        """Number of threads."""

    @property
    def nodes(self) -> int:
        """Number of NUMA nodes that its threads are on."""

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""

def state_bytes(layers: Sequence[RecurrentShape], dtype: str, state_dtype: str, isa: str, lookahead: int) -> int:
    """Return the bytes that a StateStore reserves for a sequence."""

class StepAttention:
    """Attention of new tokens of sequences, for a Chain to call."""

    def __init__(
        self, kv_cache: KvCache, slots: _Ints, counts: _Ints, dtype: str, sinks: Sequence[_Floats | None]
    ) -> None:
        """Prepare a step of sequences that have been extended.

        Args:
            kv_cache: The KV cache of the sequences.
            slots: int32 [n], in the order of the rows.
            counts: int32 [n], by how many tokens each has been extended, with a row of each: at least 1, and no more
                where layers choose tokens.
            dtype: float32 or bfloat16, of the rows of qkv and of the output.
            sinks: For every layer float32 [q_heads], or None.
        """

    @property
    def address(self) -> int:
        """Address that Chain.run takes as attention."""

    @property
    def seconds(self) -> float:
        """Seconds that a thread spent in attention, on average."""

class StepStates:
    """One new token per sequence through the states of recurrent layers."""

    def __init__(self, store: StateStore, slots: _Ints) -> None:
        """Prepare a step of sequences that have been extended by one token each.

        Args:
            store: The states of the sequences.
            slots: int32 [n], in the order of the rows.
        """

class StepLayers:
    """What a decode step does at layers of both kinds, for a Chain to call."""

    def __init__(
        self, attention: StepAttention | None, states: StepStates | None, layers: Sequence[tuple[bool, int]]
    ) -> None:
        """Put together a step of layers that attend and layers that keep states.

        Args:
            attention: Of the layers that attend, or None.
            states: Of the layers that keep states, for the same slots, or None.
            layers: For every layer whether it attends, and its index among those of its kind.

        Raises:
            ValueError: If a layer is of a kind that is None.
        """

    @property
    def address(self) -> int:
        """Address that Chain.run takes as attention."""

    @property
    def seconds(self) -> float:
        """Seconds that a thread spent at these layers, on average."""

def built_isas() -> list[str]:
    """Return the instruction sets of this build, worst first."""

def untested_isas() -> list[str]:
    """Return the instruction sets of this build that were tested under an emulator only."""

def supported_isas() -> list[str]:
    """Return the instruction sets of this build that CPU and system allow, worst first."""

def select_isa(forced: str) -> str:
    """Return the instruction set to use: forced, or the best for an empty string.

    Raises:
        ValueError: If forced is unknown or unsupported here.
    """

def block_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int | None) -> tuple[int, int]:
    """Return (bytes of a block over all layers, tokens of a block)."""

def layer_groups(
    layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int | None
) -> tuple[int, list[tuple[int, bool]]]:
    """Return (bytes of a block, (window or 0, chunked) of each group of layers) of windowed KV caches."""

class ReadProbe:
    """A buffer of huge pages and the threads that read it."""

    def __init__(self, bytes: int, threads: int, cpus: Sequence[int], isa: str, nodes: Sequence[int] = []) -> None:
        """Allocate and touch the buffer.

        Args:
            bytes: Size of the buffer.
            threads: Number of threads, the calling one included.
            cpus: One CPU per thread to pin workers to, or an empty list.
            isa: Instruction set to use, or an empty string for the best.
            nodes: NUMA node of each of cpus, or an empty list.
        """

    def seconds(self) -> float:
        """Return the seconds in which the threads read the buffer once."""

    @property
    def bytes(self) -> int:
        """Bytes of the buffer."""

    @property
    def address(self) -> int:
        """Address of the buffer."""
