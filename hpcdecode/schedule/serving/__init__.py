"""Schedules of one device that serves requests with weights and KV cache in its own memory, by name: what the split is
compared with. They exist for the simulator. A new one is a file here and a line in SERVING."""

from __future__ import annotations

from hpcdecode.schedule.serving.base import Serving
from hpcdecode.schedule.serving.fluid import Fluid
from hpcdecode.schedule.serving.mlfq import Mlfq
from hpcdecode.schedule.serving.orca import Orca
from hpcdecode.schedule.serving.vllm import Vllm

SERVING: dict[str, type[Serving]] = {"vllm": Vllm, "orca": Orca, "mlfq": Mlfq, "fluid": Fluid}
