"""`hpcdecode bench prefill`: GFLOP/s of the prompts' attention against the GEMM rate measured in the same run.

Every case is verified against float64 first. Passes of attention, of a GEMM and of torch's
scaled_dot_product_attention alternate, so that all see the same machine; ratios are medians of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch

from hpcdecode.attention.plain import attend_one
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.bench.attention import label
from hpcdecode.bench.output import Case, Report
from hpcdecode.report.benchmark import case as result
from hpcdecode.report.benchmark import machine, seconds_of

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # share of max |v|
GEMM = (512, 1024, 3072)


@dataclass(frozen=True)
class PrefillCase:
    """The last chunk of a prompt, one layer.

    Attributes:
        shape: Of the layer.
        dtype: Of q, k, v and o.
        queries: Tokens of the chunk.
        keys: Tokens of the prompt.
        threads: That attend.
    """

    shape: LayerShape
    dtype: str
    queries: int
    keys: int
    threads: int

    @property
    def name(self) -> str:
        """Return the name as printed."""
        return f"{self.dtype} {label(self.shape)} {self.queries} of {self.keys} tokens, {self.threads} threads"

    @property
    def flops(self) -> int:
        """Return the FLOP of two products over the visible keys of every query."""
        visible = sum(range(self.keys - self.queries + 1, self.keys + 1))
        return 2 * (self.shape.k_dim + self.shape.v_dim) * self.shape.q_heads * visible


class PackedPrompt:
    """A prompt whose first tokens are packed, so that its last chunk can be measured.

    Attributes:
        q, k, v: Of all tokens of the prompt.
        out: Attention output of all tokens.
    """

    def __init__(self, case: PrefillCase):
        s, generator = case.shape, torch.Generator().manual_seed(0)
        columns = (s.q_columns, s.kv_heads * s.k_dim, s.kv_heads * s.v_dim)
        dtype = getattr(torch, case.dtype)
        self.case = case
        self.mask = torch.ones(case.queries, case.keys, dtype=torch.bool).tril(case.keys - case.queries)
        self.q, self.k, self.v = (torch.randn(case.keys, n, generator=generator).to(dtype) for n in columns)
        self.out = torch.empty(case.keys, s.out_columns, dtype=dtype)
        self.attention = CpuPromptAttention([s], dtype=case.dtype, threads=case.threads)
        self.packed = torch.empty(self.attention.packed_bytes(0, case.keys), dtype=torch.uint8)
        if case.keys > case.queries:
            self._run(0, case.keys - case.queries)

    def attend(self) -> None:
        """Attend from the last chunk."""
        self._run(self.case.keys - self.case.queries, self.case.queries)

    def verify(self) -> None:
        """Attend from the last chunk; raise RuntimeError if the output differs from float64."""
        s, last = self.case.shape, slice(self.case.keys - self.case.queries, None)
        self.attend()
        q = self.q[last].double().view(-1, s.q_heads, s.k_dim)
        k, v = (x.double().view(-1, s.kv_heads, x.shape[1] // s.kv_heads) for x in (self.k, self.v))
        error = (attend_one(q, k, v, s).flatten(1) - self.out[last].double()).abs().max().item()
        if not error <= TOLERANCE[self.case.dtype] * v.abs().max().item():
            raise RuntimeError(f"bench prefill: {self.case.name}: error {error:.3g} is out of bounds")

    def sdpa(self) -> None:
        """Attend from the last chunk by torch, with a mask made beforehand."""
        s, last = self.case.shape, slice(self.case.keys - self.case.queries, None)
        q, k, v = (
            x.view(len(x), heads, -1).transpose(0, 1)[None]
            for x, heads in ((self.q[last], s.q_heads), (self.k, s.kv_heads), (self.v, s.kv_heads))
        )
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=s.group > 1)

    def _run(self, start: int, count: int) -> None:
        r = slice(start, start + count)
        q, k, v, out = self.q[r], self.k[r], self.v[r], self.out[r]
        self.attention.attend(0, [self.packed], [start], [count], q, k, v, out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=tuple(TOLERANCE))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--group", type=int, nargs="+", default=[1, 4], help="query heads per KV head, of 16")
    parser.add_argument("--queries", type=int, default=512, help="tokens of the chunk")
    parser.add_argument("--keys", type=int, default=1024, help="tokens of the prompt at its end")
    parser.add_argument("--passes", type=int, default=15)


def run(args: argparse.Namespace) -> Report:
    """Verify, then measure every case."""
    cases: list[Case] = []
    for threads in args.threads:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for dtype in args.dtype:
                for dim in args.head_dim:
                    for group in args.group:
                        shape = LayerShape(16 // group, dim, dim, 16 // group * group, dim**-0.5)
                        cases += measure(PrefillCase(shape, dtype, args.queries, args.keys, threads), args.passes)
        finally:
            torch.set_num_threads(before)
    return {"bench": "prefill", "machine": machine(), "cases": cases}


def measure(case: PrefillCase, passes: int) -> list[Case]:
    """Return GFLOP/s against the GEMM rate, and against torch's attention."""
    prompt = PackedPrompt(case)
    prompt.verify()
    m, k, n = GEMM
    dtype = getattr(torch, case.dtype)
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    calls = prompt.attend, lambda: torch.nn.functional.linear(a, b), prompt.sdpa
    for call in calls:
        call()
    rows = [[seconds_of(call) for call in calls] for _ in range(passes)]
    rates = [case.flops / ours / 1e9 for ours, _, _ in rows]
    to_gemm = [rate * 1e9 / (2 * m * k * n / gemm) for rate, (_, gemm, _) in zip(rates, rows, strict=True)]
    to_sdpa = [sdpa / ours for ours, _, sdpa in rows]
    gemm = statistics.median(2 * m * k * n / seconds / 1e9 for _, seconds, _ in rows)
    return [
        result(case.name, rates, "GFLOP/s", f"torch GEMM, same threads: {gemm:.0f} GFLOP/s", to_gemm),
        result(case.name, rates, "GFLOP/s", "torch scaled_dot_product_attention", to_sdpa),
    ]
