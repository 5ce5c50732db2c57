"""As run_parity.py, with S and R as on devices: plain graphs, staged links, prompts by torch; attn_cuda, emulated."""

from __future__ import annotations

import sys

from hpcdecode import engine
from hpcdecode.attention_torch import TorchPrompts
from hpcdecode.exchange.staging import Outbox, StagedLink
from hpcdecode.model import load
from hpcdecode.model.compile import compile_plain
from tests.late_copies import LateCopies
from tests.mpi.run_parity import main


def staged(links, _device):
    outbox = Outbox(LateCopies(2))
    return [StagedLink(link, outbox) for link in links]


load.compile_graph = lambda graph, *_: compile_plain(graph)
engine.staged = staged
engine.kv_device_of = lambda _options, team: "cpu:0" if team.me.has_r else "cpu"
engine.Engine._prompt_attention = lambda self: TorchPrompts(self.model.attends, self.model.dtype, self.model.device)
sys.exit(main(*sys.argv[1:]))
