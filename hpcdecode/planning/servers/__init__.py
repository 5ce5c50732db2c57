"""Simulated servers: schedules of one device with weights and KV cache in its own memory, by name.

The split is compared with them, and only the simulator has them. A new one is a module here and a line in SERVING.
"""

from __future__ import annotations

from hpcdecode.planning.servers.base import Serving
from hpcdecode.planning.servers.fluid import Fluid
from hpcdecode.planning.servers.mlfq import Mlfq
from hpcdecode.planning.servers.orca import Orca
from hpcdecode.planning.servers.vllm import VllmServer

SERVING: dict[str, type[Serving]] = {"vllm": VllmServer, "orca": Orca, "mlfq": Mlfq, "fluid": Fluid}
