"""As run_parity.py, with S and R as on devices: plain graphs, prompts by torch; attn_cuda, emulated, or torch.

usage: run_devices.py LINKS ...

LINKS: staged, where the last of three R-ranks stays on its CPUs; direct, with wires on the devices; or torch, as
staged, but with all attention by torch's operations.
"""

from __future__ import annotations

import sys

from hpcdecode.attention import open as attention_open
from hpcdecode.attention.prefill_torch import TorchPromptAttention
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.engine import engine, kv, links
from hpcdecode.engine.prefill import PromptKvCache
from hpcdecode.exchange.staging import DirectLink, Outbox, StagedLink
from hpcdecode.model.lower.compile import compile_plain
from hpcdecode.model.run import bound_slice
from hpcdecode.ranks import team
from hpcdecode.ranks.roles import assign_devices
from tests.mpi.run_parity import main
from tests.support.late_copies import LateCopies, LateQueue

DIRECT = sys.argv[1] == "direct"


def staged(links, _device):
    outbox = Outbox()
    return [StagedLink(link, outbox, LateCopies(2)) for link in links]


def direct(links, _device):
    outbox = Outbox()
    return [DirectLink(link, outbox, LateQueue()) for link in links]


def assigned(ranks, *options):
    assign_devices(ranks, *options)
    r_ranks = [r for r in ranks if r.has_r]
    for rank in r_ranks if DIRECT else r_ranks[:2]:
        rank.kv_device = "cpu:0"


if sys.argv[1] == "torch":
    attention_open.by_kernels = lambda *_: False
bound_slice.compile_graph = lambda graph, *_, **__: compile_plain(graph)
engine.staged_links, engine.direct_links = staged, direct
engine.direct = links.direct = lambda _options, team: DIRECT and team.comm is not None
kv.CudaQueue = LateQueue
team.assign_devices = assigned
engine.open_prompts = lambda _team, _setup, model, _kv: PromptKvCache(
    TorchPromptAttention(attention_shapes(model.attends), model.dtype, model.device)
)
sys.exit(main(*sys.argv[2:]))
