"""What a rank has counted, from its S-rank and its R-part."""

from __future__ import annotations

import resource

from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.s_rank import SRank
from hpcdecode.report.account import Account
from hpcdecode.report.metrics import Metrics


def metrics_of(account: Account, worker: SRank | None, attention: AttentionWorker | None) -> Metrics:
    """Return the counters of a rank that has these roles, None for one that it has not."""
    metrics = Metrics(account=account, peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    if worker is not None:
        metrics.s_role = True
        metrics.s_seconds, metrics.steps = worker.seconds, worker.steps
        metrics.peak_prefill_tokens, metrics.peak_load = worker.peak_prefill_tokens, worker.peak_load
        metrics.prefill_seconds, metrics.decode_seconds = worker.prefill_seconds, worker.decode_seconds
        metrics.decode_tokens, metrics.shared_tokens = worker.decode_tokens, worker.shared_tokens
    if attention is not None:
        metrics.r_role = True
        metrics.peak_tokens, metrics.kv_left = attention.peak_tokens, attention.kv_cache.used_tokens
        metrics.bytes_read, metrics.attend_seconds = attention.kv_cache.bytes_read, attention.kv_cache.attend_seconds
    return metrics
