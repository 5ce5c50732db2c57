"""`hpcdecode bench swap`: bytes a second that sequences move to a tier and back, against a plain copy of a file.

K and V of sequences leave a KV cache for a file, as with `--kv-swap nvme:DIRECTORY:SIZE`, and come back: with copies to
staging buffers and checksums. The reference writes and reads as many bytes from and to as much memory, in pieces of the
same size and with as many threads, past the page cache if the file system allows it. Both take turns. What comes back
is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter

import numpy as np

from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench import filled
from hpcdecode.bench.output import Case, Report
from hpcdecode.engine.kv_swap import KvSwap, chunk_bytes
from hpcdecode.errors import InvariantViolation, UserError, first_line
from hpcdecode.report.benchmark import case, machine
from hpcdecode.system.swap_tiers import FileTier, memory_for
from hpcdecode.system.tier import Chunk
from hpcdecode.system.tier_threads import THREADS

SHAPE = LayerShape(kv_heads=32, k_dim=128, v_dim=128, q_heads=32, scale=1.0)  # 1 MiB a block of bfloat16
SEQUENCE_TOKENS = 2048
_LANE = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--dir", default=".", metavar="DIRECTORY", help="where the files are (default: here)")
    parser.add_argument("--mebibytes", type=int, default=512, help="K and V that move in a pass (default: 512)")
    parser.add_argument("--passes", type=int, default=5, help="passes of each (default: 5)")


def run(options: argparse.Namespace) -> Report:
    """Run the benchmark.

    Raises:
        UserError: If there is no such directory, or it cannot be written to.
    """
    token = 2 * SHAPE.kv_columns
    count = max((options.mebibytes << 20) // (token * SEQUENCE_TOKENS), 1)
    lengths = (SEQUENCE_TOKENS,) * count
    kv_cache = open_kv_cache(
        [SHAPE], kv_dtype="bfloat16", capacity_tokens=filled.capacity(lengths), max_sequences=count
    )
    assert isinstance(kv_cache, CpuKvCache), "attn_cpu: expected a KV cache on CPUs"
    filled.fill(kv_cache, SHAPE, lengths)
    size, total = chunk_bytes(kv_cache.native.block_bytes), sum(lengths) * token
    try:
        tier, plain = (FileTier(options.dir, 2 * total + size, size) for _ in range(2))
    except OSError as error:
        expected = f"--dir {options.dir}: expected a directory that can be written to"
        raise UserError(f"{expected}, got: {first_line(error)}") from error
    swap = KvSwap(kv_cache, [tier])
    before = _content(kv_cache)
    moved, copied, memory = [], [], memory_for(total // size * size)
    memory[:] = 1
    for turn in range(options.passes):
        copied.append(_copy(plain, memory, size))
        moved.append(_move(swap, kv_cache, lengths, turn * count))
    if not np.array_equal(before, _content(kv_cache)) or swap.counts.failures:
        raise InvariantViolation("what comes back is what left", f"{swap.counts.failures} failures, or other bytes")
    swap.close()
    plain.close()
    how = "a plain copy past the page cache" if tier.direct else "a plain copy through the page cache"
    return {"bench": "swap", "machine": machine(), "cases": _cases(moved, copied, total, how)}


def _cases(moved: list[list[float]], copied: list[list[float]], total: int, how: str) -> list[Case]:
    return [
        case(
            name,
            [total / seconds[i] / 1e9 for seconds in moved],
            "GB/s",
            how,
            [plain[i] / seconds[i] for seconds, plain in zip(moved, copied, strict=True)],
        )
        for i, name in enumerate(("out", "back"))
    ]


def _content(kv_cache: CpuKvCache) -> Chunk:
    """Return the bytes of the first sequence."""
    out = np.empty(SEQUENCE_TOKENS // kv_cache.block_tokens * kv_cache.native.block_bytes, np.uint8)
    kv_cache.native.copy_out(0, 0, out)
    return out


def _move(swap: KvSwap, kv_cache: CpuKvCache, lengths: tuple[int, ...], ticket: int) -> list[float]:
    """Move all sequences out and back; return the seconds of each."""
    begin = perf_counter()
    for slot in range(len(lengths)):
        swap.out(_LANE, slot, ticket + slot)
    swap.wait()
    out = perf_counter()
    slots = np.arange(len(lengths), dtype=np.int32)
    kv_cache.release(slots)
    kv_cache.extend(slots, np.array(lengths, np.int32))
    for slot in range(len(lengths)):
        swap.bring(_LANE, slot, ticket + slot)
    swap.wait()
    swap.take_results(_LANE)
    return [out - begin, perf_counter() - out]


def _copy(tier: FileTier, memory: Chunk, size: int) -> list[float]:
    """Write and read memory in chunks with the threads of a tier; return the seconds of each."""
    seconds, pieces = [], memory.reshape(-1, size)
    with ThreadPoolExecutor(THREADS) as pool:
        for move in (tier.write, tier.read):
            begin = perf_counter()
            each = [pool.submit(partial(_some, move, pieces, range(i, len(pieces), THREADS))) for i in range(THREADS)]
            for one in each:
                one.result()
            seconds.append(perf_counter() - begin)
    return seconds


def _some(move: Callable[[int, Chunk], None], pieces: Chunk, chunks: range) -> None:
    """Move some chunks, each to or from its own memory."""
    for chunk in chunks:
        move(chunk, pieces[chunk])
