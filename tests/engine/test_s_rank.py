"""The S-rank's loop over real slices and the reference store: what it holds at every turn."""

from __future__ import annotations

import torch

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill import CpuPromptAttention
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.local import LocalLink
from hpcdecode.model import load_split
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.system.timeline import Timeline
from tests.support.samples import Sink
from tests.support.scheduling import ListFeed, prompts


def test_the_s_rank_holds_no_kv_of_decoding_sequences(checkpoint):
    model = load_split(checkpoint("llama3"), dtype="float32")
    shapes = model.attends
    store = open_kv_cache(shapes, kv_dtype="float32", capacity_tokens=4096, max_sequences=32, backend="reference")
    placement = Placement([4096], Footprint(store.block_tokens), 2)
    feed, sink = ListFeed(prompts([(5, 9), (90, 7), (3, 1), (200, 6), (40, 12)])), Sink()
    schedulers = [Scheduler(lane, feed, placement, LaneLimits(4, 3, 9, 32, 1024), Stops()) for lane in range(2)]
    part = AttentionWorker(store, [None] * len(shapes), Timeline())
    links = [LocalLink(part, i, 16 * i) for i in range(2)]
    prompts_attend = PromptKvCache(CpuPromptAttention(shapes, dtype="float32"))
    worker = SRank(model, links, schedulers, sink, Stops(), prompts_attend, Timeline())
    held = []

    def look():
        prefilling = {s.key for scheduler in schedulers for s in scheduler.prefilling}
        assert worker.prompt_kv.keys <= prefilling
        held.append((worker.prompt_kv.tokens, worker.tokens_in_flight))

    worker.run(look)
    assert sorted(len(s.generated) for s in sink.done) == [1, 6, 7, 9, 12]
    assert max(kept for kept, _ in held) > 0  # prompts in prefill were seen
    assert held[-1][0] == 0 and len(worker.prompt_kv._passing) == 0
    assert any(kept == 0 and flying > 200 for kept, flying in held)  # decoding with nothing held
    assert worker.tokens == 35
    assert worker.decode_tokens == 30  # each but the first of a row
    assert min(worker.prefill_seconds, worker.decode_seconds, worker.decode_tokens) > 0
    assert worker.prefill_seconds + worker.decode_seconds <= worker.seconds
    assert torch.is_inference_mode_enabled() is False
