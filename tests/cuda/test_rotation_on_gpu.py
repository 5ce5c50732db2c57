"""On a GPU: a KV cache larger than its memory gives the bits, and jobs the tokens, of one that has all in memory."""

from __future__ import annotations

import json

import h5py
import pytest
import torch

from hpcdecode.attention.frame_copies import PinnedMemory, link_rate
from hpcdecode.attention.streamed_cuda import StreamedCudaKvCache
from hpcdecode.system.swap_tiers import HostTier
from tests.support.parity import generated, make_case
from tests.support.rotating import BLOCK_TOKENS, file, sizes_of
from tests.support.streamed import SHAPES, SLOTS, CachePair

GPU = torch.device("cuda")


@pytest.mark.parametrize("kind", ["host", "file"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_rows_are_those_of_a_cache_in_memory(tmp_path, kv_dtype, kind):
    sizes = sizes_of(SHAPES, kv_dtype, ranges=12, frames=18, blocks=6, device=True)
    room = sizes.layers * sizes.ranges * sizes.chunk_bytes, sizes.chunk_bytes
    tiers = [HostTier(*room, PinnedMemory(GPU).take)] if kind == "host" else file(sizes, tmp_path)
    cache = StreamedCudaKvCache(SHAPES, kv_dtype, sizes, tiers, SLOTS, BLOCK_TOKENS, GPU)
    dtype = torch.bfloat16 if kv_dtype == "bfloat16" else torch.float32
    pair = CachePair(cache, kv_dtype, dtype, backend="attn_cuda", device=GPU)
    for _ in range(60):
        pair.random_step()
    assert cache.pages.counts.bytes_in > sizes.frames * sizes.page_bytes
    assert link_rate(GPU, 1 << 20) > 1e9


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_jobs(hpcdecode, tmp_path, ranks):
    case = make_case("llama3", tmp_path, rows=24, new_tokens=40, ignore_eos=True, max_tokens=40)
    flags = ("--model", case / "model", "--dtype", "float32", "--batch", 24, "--overwrite", "--no-prefix-sharing")
    where = ("--device", "cuda", "--r-device", "cuda", *(("--s-ranks", 1) if ranks > 1 else ()))
    rotates = ("--schedule", "fluid", "--kv-memory", "256K", "--kv-swap", "host:8M")
    result = hpcdecode("generate", case / "prompts.jsonl", "-o", case / "out.h5", *flags, *where, *rotates, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert generated(case / "out.h5") == json.loads((case / "reference.json").read_text())
    with h5py.File(case / "out.h5") as made:
        assert json.loads(made.attrs["summary"])["swap_in_bytes"] > 0
