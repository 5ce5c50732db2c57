"""As run_parity.py, with S and R as on devices: plain graphs, staged links, prompts by torch; attn_cuda, emulated.

The last of three R-ranks stays on its CPUs.
"""

from __future__ import annotations

import sys

from hpcdecode import engine, launch
from hpcdecode.attention_torch import TorchPrompts
from hpcdecode.exchange.staging import Outbox, StagedLink
from hpcdecode.model import load
from hpcdecode.model.compile import compile_plain
from hpcdecode.roles import assign
from tests.late_copies import LateCopies
from tests.mpi.run_parity import main


def staged(links, _device):
    outbox = Outbox(LateCopies(2))
    return [StagedLink(link, outbox) for link in links]


def assigned(ranks, *options):
    assign(ranks, *options)
    r_ranks = [r for r in ranks if r.has_r]
    for rank in r_ranks[:2]:
        rank.kv_device = "cpu:0"


load.compile_graph = lambda graph, *_: compile_plain(graph)
engine.staged = staged
launch.assign = assigned
engine.Engine._prompt_attention = lambda self: TorchPrompts(self.model.attends, self.model.dtype, self.model.device)
sys.exit(main(*sys.argv[1:]))
