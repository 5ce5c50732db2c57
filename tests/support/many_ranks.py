"""Attributes of results as a job of many ranks would leave them: topology, and accounts with histories of KV load."""

from __future__ import annotations

import numpy as np

CAPACITY = 200_000


def attributes_of(s_ranks, r_ranks, seconds=1800.0, samples=256, capacity=CAPACITY):
    """Return the attributes `topology` and `summary`; R-rank loads rise, stay near 70 % of the capacity, and fall."""
    random = np.random.default_rng(s_ranks * 10_007 + r_ranks)
    ranks, accounts = [], []
    for rank in range(s_ranks + r_ranks):
        role, host = "S" if rank < s_ranks else "R", f"node{rank // 8:03}"
        cpus = list(range(8))
        one = {"rank": rank, "host": host, "cpus": cpus, "role": role, "threads": 8, "numa": "0", "isa": "avx512"}
        ranks.append(one | ({"kv_tokens": capacity} if role == "R" else {"home": 0, "member": rank}))
        accounts.append(_account(rank, host, role, seconds, samples, random, capacity))
    summary = {"seconds": seconds, "rows": 0, "errors": 0, "generated_tokens": 0, "accounts": accounts}
    return {"topology": ranks, "summary": summary}


def _account(rank, host, role, seconds, samples, random, capacity):
    busy, wait = random.uniform(0.55, 0.85), random.uniform(0.02, 0.15)
    left = 1 - busy - wait
    if role == "S":
        shares = {"slice": busy, "wait": wait, "plan": left / 2, "sample": left / 2}
        load = []
    else:
        shares = {"attend": busy, "wait": wait, "idle": left * 0.7, "post": left * 0.3}
        times = np.sort(random.uniform(2, seconds, samples))
        shape = np.clip(np.minimum(times / (0.2 * seconds), (seconds - times) / (0.1 * seconds)), 0, 1)
        loads = shape * capacity * random.normal(0.7, 0.05, samples).clip(0, 1) * random.uniform(0.85, 1.1)
        load = [[round(float(t), 3), int(min(v, capacity))] for t, v in zip(times, loads, strict=True)]
    return {
        "rank": rank,
        "host": host,
        "role": role,
        "seconds": {name: round(share * seconds, 3) for name, share in shares.items()},
        "load": load,
    }
