"""Schedules of one device that serves requests with weights and KV cache in its own memory, by name: what the split is
compared with. They exist for the simulator. A new one is a file here and a line in SERVING."""

from __future__ import annotations

from hpcdecode.planning.servers.base import Serving
from hpcdecode.planning.servers.fluid import Fluid
from hpcdecode.planning.servers.mlfq import Mlfq
from hpcdecode.planning.servers.orca import Orca
from hpcdecode.planning.servers.vllm import VllmServer

SERVING: dict[str, type[Serving]] = {"vllm": VllmServer, "orca": Orca, "mlfq": Mlfq, "fluid": Fluid}
