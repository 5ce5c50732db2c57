"""How a KV cache that is larger than its memory is cut into pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from hpcdecode import _attn_cpu
from hpcdecode.attention import cuda
from hpcdecode.attention.base import native_shapes
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import ALIGNMENT, aligned

PAGE_BYTES = 1 << 20  # at least, where memory has room for some pages a layer
_PER_LAYER, _LEAST_PER_LAYER = 16, 4  # pages of a layer that memory has room for: wished, and before pages shrink
_BLOCK_UNIT = 512  # bytes: blocks of every layer are padded to one size, a multiple of it
_WINDOW = (2, 16)  # pages that come in ahead of their use: least and most
_JOURNAL_SHARE = 4  # of a page's bytes: what its journal has


class PageSizes(msgspec.Struct, frozen=True):
    """The pages of a KV cache. A page has the blocks of one range at one layer.

    Attributes:
        layers: Number of layers.
        block_bytes: Bytes of a block at a layer.
        range_blocks: Blocks of a range.
        ranges: Number of ranges.
        frames: Number of pages that memory has room for.
        window: Pages that come in ahead of their use.
        journal_bytes: Room of a page in tiers for single tokens, behind its blocks.
        block_tokens: Tokens of a block.
    """

    layers: int
    block_bytes: int
    range_blocks: int
    ranges: int
    frames: int
    window: int
    journal_bytes: int
    block_tokens: int

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page."""
        return self.block_bytes * self.range_blocks

    @property
    def chunk_bytes(self) -> int:
        """Return the bytes of a page in tiers."""
        return self.page_bytes + self.journal_bytes

    @property
    def blocks_together(self) -> int:
        """Return how many blocks begin and end where tiers can begin and end to write; pages have a multiple."""
        return ALIGNMENT // math.gcd(ALIGNMENT, self.block_bytes)

    @property
    def resident_share(self) -> float:
        """Return the share of all pages that memory has room for."""
        return min(self.frames / (self.layers * self.ranges), 1.0)


def page_block_bytes(
    layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int, device: torch.device | None = None
) -> int:
    """Return the bytes of a block of pages, which have blocks of one size at all layers.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        block_tokens: Tokens of a block.
        device: Whose kernels attend, or None for CPUs.
    """
    if device is not None:
        most = max(cuda.block_bytes([shape], kv_dtype, block_tokens, device) for shape in layers)
    else:
        shapes = native_shapes(layers, _attn_cpu.LayerShape)
        most = max(_attn_cpu.block_bytes([shape], kv_dtype, block_tokens)[0] for shape in shapes)
    return -(-most // _BLOCK_UNIT) * _BLOCK_UNIT


def page_sizes(
    layers: Sequence[LayerShape],
    kv_dtype: str,
    block_tokens: int,
    memory: int,
    tiers: Sequence[int],
    device: torch.device | None = None,
) -> PageSizes:
    """Return the pages of a KV cache that has as many as its tiers hold.

    All pages of a layer fit in memory at once, so that any sequence can be attended to; that limits their number.

    Args:
        layers: Shapes of the layers.
        kv_dtype: Data type that K and V are stored as.
        block_tokens: Tokens of a block.
        memory: Bytes for pages in memory.
        tiers: Bytes of every tier.
        device: A GPU that attends, whose pages have no journals, or None for CPUs.

    Raises:
        UserError: If memory is too small, or larger than the tiers.
    """
    block, count = page_block_bytes(layers, kv_dtype, block_tokens, device), len(layers)
    range_blocks, frames, window = _frames(block, count, memory)
    page = range_blocks * block
    if count == 1:
        raise UserError(
            "--schedule fluid: expected a model of two layers or more, as memory holds all pages of a layer at once, "
            "got one; leave out --schedule fluid"
        )
    if frames < 2 * window + 2:
        raise UserError(
            f"--schedule fluid: expected --kv-memory of at least {(2 * window + 2) * page >> 10}K, "
            f"{2 * window + 2} pages of this model's KV cache, got {memory >> 10}K; raise it"
        )
    journal = 0 if device else aligned(page // _JOURNAL_SHARE)
    ranges = min(sum(tier // (page + journal) for tier in tiers) // count, frames - 2 * window)
    if ranges * count <= frames and not _rotates(frames, window, count):
        least = next(m for m in (memory << i for i in range(1, 64)) if _rotates(*_frames(block, count, m)[1:], count))
        raise UserError(
            f"--schedule fluid: expected --kv-memory of about {least >> 20}M, to hold all pages of one of {count} "
            f"layers at once and be smaller than the KV cache, got {memory >> 10}K; raise it, and --kv-swap to more "
            f"than {1 + journal / page:.2f} times that, or leave out --schedule fluid"
        )
    if ranges * count <= frames:
        raise UserError(
            f"--schedule fluid: expected --kv-swap of more than {1 + journal / page:.2f} times --kv-memory, "
            f"{memory >> 20}M, got {sum(tiers) >> 20}M: raise it, or leave out --schedule fluid, as all fits in memory"
        )
    return PageSizes(count, block, range_blocks, ranges, frames, window, journal, block_tokens)


def _frames(block: int, count: int, memory: int) -> tuple[int, int, int]:
    """Return the blocks of a page, the pages that memory has room for, and those that come in ahead of their use.

    Args:
        block: Bytes of a block.
        count: Number of layers.
        memory: Bytes.
    """
    unit = ALIGNMENT // math.gcd(ALIGNMENT, block)  # blocks
    wished = min(max(memory // (count * _PER_LAYER), PAGE_BYTES), memory // (count * _LEAST_PER_LAYER))
    range_blocks = max(wished // (block * unit), 1) * unit
    frames = memory // (range_blocks * block)
    return range_blocks, frames, min(max(frames // 8, _WINDOW[0]), _WINDOW[1])


def _rotates(frames: int, window: int, count: int) -> bool:
    """Return whether a KV cache of `count` layers, all pages of one of which fit, can be larger than its memory."""
    return (frames - 2 * window) * count > frames


def sizes_in_memory(layers: Sequence[LayerShape], kv_dtype: str, block_tokens: int, tokens: int) -> PageSizes:
    """Return pages of 1 MiB or more that hold so many tokens, all of them in memory."""
    block = page_block_bytes(layers, kv_dtype, block_tokens)
    unit = ALIGNMENT // math.gcd(ALIGNMENT, block)  # blocks
    range_blocks = max(PAGE_BYTES // (block * unit), 1) * unit
    ranges, window = -(-tokens // (range_blocks * block_tokens)), _WINDOW[0]
    frames = ranges * len(layers) + 2 * window + 2
    return PageSizes(len(layers), block, range_blocks, ranges, frames, window, ALIGNMENT, block_tokens)
