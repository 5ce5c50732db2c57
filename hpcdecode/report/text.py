"""The topology and the summary as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpcdecode.ranks.roles import Rank


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose columns are aligned to the left, two spaces apart."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def topology(ranks: Sequence[Rank]) -> str:
    """Return a table of all ranks."""
    differ = any(r.speed != 1 for r in ranks)
    header = ("rank", "host", "role", "device", "NUMA", "threads", "ISA", "KV capacity")
    rows = (
        (
            r.rank,
            r.host,
            r.role,
            " + ".join(dict.fromkeys([r.device] * r.has_s + [r.kv_device] * r.has_r)),
            r.numa,
            f"{r.threads}{'' if r.pinned else ' (unpinned)'}",
            r.isa or "-",
            f"{r.kv_tokens:,} tokens{f', speed {r.speed:.1f}' if differ else ''}" if r.has_r else "-",
        )
        for r in ranks
    )
    return table(header, rows)


def summary(figures: dict[str, Any]) -> str:
    """Return the closing lines of a job from `figures`, the `summary` attribute of its results."""
    f = figures
    shared = f" ({f['shared_prompt_tokens']:,} shared)" if f["shared_prompt_tokens"] else ""
    lost = [f"rank {r['rank']} on {r['host']}" for r in f["lost"]]
    return "\n".join(
        (
            *([f"lost while the job went on: {', '.join(lost)}"] if lost else []),
            f"rows {f['rows']:,}, errors {f['errors']:,}, tokens {f['generated_tokens']:,} generated"
            f" and {f['prompt_tokens']:,} of prompts{shared}, in {f['seconds']:.1f} s",
            f"{f['tokens_per_second']:,.1f} tokens/s, S busy {f['s_busy']:.0%}, R busy {f['r_busy']:.0%},"
            f" R-part {f['r_gigabytes_per_second']:.1f} GB/s, peak KV {f['peak_kv_tokens']:,} tokens,"
            f" peak load {f['peak_load_tokens']:,}",
            f"peak memory of ranks 0.. (MiB): {', '.join(str(b >> 20) for b in f['peak_rss_bytes'])}",
        )
    )
