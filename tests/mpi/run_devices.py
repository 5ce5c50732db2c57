"""As run_parity.py, with S and R as on devices: recorded slices, prompts by torch; attn_cuda, emulated, or torch.

usage: run_devices.py LINKS ...

LINKS: staged, where the last of three R-ranks stays on its CPUs; direct, the same with MPI that takes memory of
devices, so that R-rank gets its rows from a device's; or torch, as staged, but with all attention by torch.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

from hpcdecode.attention import open as attention_open
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.engine import choice, engine, kv, links
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.exchange.device import PlainMemory
from hpcdecode.exchange.staging import Outbox
from hpcdecode.model.lower.compile import compile_merged
from hpcdecode.model.run import bound_slice, recorded_slices
from hpcdecode.model.run.recorded_slices import RecordedSlices
from hpcdecode.ranks import team
from hpcdecode.ranks.roles import assign_devices
from tests.mpi.run_parity import main
from tests.support.late_device import EmulatedLink, LateDevice, LateMemory
from tests.support.recorders import EagerRecorder

DIRECT = sys.argv[1] == "direct"
PLACE = "cpu:0"  # of an emulated device
DEVICE = LateDevice()
lane_spec, local_links = links.lane_spec, links.local_links


def linked(links, _device):
    outbox = Outbox()
    return [EmulatedLink(link, outbox, DEVICE) for link in links]


def on_device(rank):
    return rank.has_s or rank.kv_device == PLACE


def direct(options, team, rank=None):
    takes = DIRECT and options.exchange != "collective" and team.comm is not None
    return takes and on_device(team.me if rank is None else rank)


def spec_of(options, team, *others):
    DEVICE.strict = True
    memory = LateMemory(DEVICE, direct(options, team)) if on_device(team.me) else PlainMemory()
    return dataclasses.replace(lane_spec(options, team, *others), memory=memory)


def links_of_one_process(*about):
    DEVICE.strict = False  # rows of slices on CPUs are where torch has them
    return local_links(*about)


def recorded(model):
    model.recorder, recorded_slices.RECORDED_FROM = model.recorder or EagerRecorder(), 1
    return RecordedSlices.of(model)


def assigned(ranks, *options):
    assign_devices(ranks, *options)
    for rank in [r for r in ranks if r.has_r][:2]:
        rank.kv_device = PLACE


if sys.argv[1] == "torch":
    attention_open.by_kernels = lambda *_: False
choice.RecordedSlices = SimpleNamespace(of=recorded)
bound_slice.compile_graph = lambda graph, *_, rows=0, **__: compile_merged(graph, rows)
engine.staged = linked
engine.direct = links.direct = direct
engine.lane_spec = links.lane_spec = spec_of
engine.local_links = links_of_one_process
kv.CudaDevice = lambda _device: DEVICE
team.assign_devices = assigned
engine.open_prompts = lambda _team, _setup, model, _kv: PromptKvCache(
    TorchPromptAttention(attention_shapes(model.attends), model.dtype, model.device)
)
sys.exit(main(*sys.argv[2:]))
