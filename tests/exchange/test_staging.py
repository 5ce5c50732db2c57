"""The path of an S-rank on a device, on the CPU: plain graphs, staged links and prompts by torch."""

from __future__ import annotations

import json

import pytest

from hpcdecode.attention.footprint import Footprint
from hpcdecode.attention.host import HostKvCache
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.engine.attention_worker import AttentionWorker
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.engine.s_rank import SRank
from hpcdecode.exchange.local import LocalLink
from hpcdecode.exchange.staging import Outbox
from hpcdecode.model import load_split
from hpcdecode.model.run import recorded_slices
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.requests.stops import Stops
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.scheduler import Scheduler
from hpcdecode.system.timeline import Timeline
from tests.support.late_device import EmulatedLink, LateDevice, LateMemory
from tests.support.parity import make_case
from tests.support.recorders import EagerRecorder, as_on_a_device
from tests.support.scheduling import ListFeed


class Sink:
    def __init__(self):
        self.tokens = {}

    def finish(self, request):
        self.tokens[request.prompt.line] = request.sequences[0].generated


@pytest.mark.parametrize(
    ("name", "patience", "backend"),
    [("llama3", 0, "attn_cpu"), ("gemma2", 3, "attn_cpu"), ("gpt_oss", 3, "attn_cpu"), ("gemma2", None, "attn_cuda")],
)
def test_tokens_equal_those_of_transformers(name, patience, backend, tmp_path, monkeypatch):
    """patience: of the device; None: one device has both roles, and nothing is copied."""

    def open_part(shapes, sinks):
        size = {"kv_dtype": "float32", "capacity_tokens": 8192, "max_sequences": 32}
        return AttentionWorker(open_kv_cache(shapes, **size, backend=backend), sinks, Timeline())

    device = None if patience is None else LateDevice(patience=patience)
    assert_parity(name, open_part, device, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["llama3", "gpt_oss"])
def test_an_r_part_on_a_device_beside_an_s_part_that_is_not(name, tmp_path, monkeypatch):
    """Rows are copied, attended to and copied back late, and that is waited for."""
    late = LateDevice()
    late.strict = False

    def open_part(shapes, sinks):
        size = {"kv_dtype": "float32", "capacity_tokens": 8192, "max_sequences": 32}
        device = open_kv_cache(shapes, **size, backend="attn_cuda")
        return AttentionWorker(HostKvCache(device, "cpu"), sinks, Timeline(), late)

    assert_parity(name, open_part, None, tmp_path, monkeypatch)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_recorded_slices_give_the_same_tokens(name, late, tmp_path, monkeypatch):
    """Two lanes are in flight, over links that read late what slices have written."""

    def open_part(shapes, sinks):
        size = {"kv_dtype": "float32", "capacity_tokens": 8192, "max_sequences": 32}
        return AttentionWorker(open_kv_cache(shapes, **size, backend="attn_cuda"), sinks, Timeline())

    monkeypatch.setattr(recorded_slices, "RECORDED_FROM", 1)
    recorder, device = EagerRecorder(), LateDevice() if late else None
    assert_parity(name, open_part, device, tmp_path, monkeypatch, recorder)
    assert recorder.replayed > 2 * recorder.recorded > 0


def assert_parity(name, open_part, device, tmp_path, monkeypatch, recorder=None):
    case = make_case(name, tmp_path, rows=5, new_tokens=6)
    rows = [json.loads(line) for line in (case / "prompts.jsonl").read_text().splitlines()]
    as_on_a_device(monkeypatch)
    model = load_split(case / "model", dtype="float32")
    model.recorder = recorder
    shapes, lanes = model.attends, 2
    part = open_part(shapes, [model.sinks(i) for i in range(len(shapes))])
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    feed = ListFeed([Prompt(i, str(i), row["prompt_token_ids"], params) for i, row in enumerate(rows)])
    placement, sink = Placement([8192], Footprint(part.kv_cache.block_tokens), lanes), Sink()
    schedulers = [Scheduler(i, feed, placement, LaneLimits(4, 3, 6, 256, 1024), Stops()) for i in range(lanes)]
    memory, outbox = LateMemory(device) if device else None, Outbox()
    links = [LocalLink(part, i, 16 * i, memory) for i in range(lanes)]
    if device:
        links = [EmulatedLink(link, outbox, device) for link in links]
    prompts = PromptKvCache(TorchPromptAttention(shapes, model.dtype, model.device))
    SRank(model, links, schedulers, sink, Stops(), prompts, Timeline()).run(lambda: None)
    assert [sink.tokens[i] for i in range(len(rows))] == json.loads((case / "reference.json").read_text())
