"""What copies between a GPU and its host add to the slices of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcdecode.bench.device_clock import seconds_of_all
from hpcdecode.bench.gpu.slices import step_of
from hpcdecode.bench.output import Case
from hpcdecode.exchange.device import Copies
from hpcdecode.model import SplitModel
from hpcdecode.mpi.wait import Waitable
from hpcdecode.report.benchmark import case


def transfers(model: SplitModel, copies: Copies, batch: int, passes: int) -> Iterator[Case]:
    """Yield what the copies of one lane add to the slices of another; both are told to the device at once."""
    s = max(model.attends, key=lambda s: s.row_columns)
    there = torch.zeros(batch, s.row_columns, dtype=model.dtype, device=model.device)
    back = torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device)
    hosts = [copies.pinned(batch, x.shape[1], x.dtype) for x in (there, back)]
    last: list[Waitable] = []

    def copy(*_: Tensor) -> None:
        if last:  # o of the other lane comes back while this one's slice runs
            copies.into([(back, hosts[1])], last.pop())
        last.append(copies.out([(hosts[0], there)]))

    def only_copies() -> None:
        for _ in model.attends:
            copy()

    alone, beside, added, ratios = step_of(model, batch), step_of(model, batch, copy), [], []
    with torch.inference_mode():
        for _ in range(passes + 1):
            own, step, both = (seconds_of_all(work, model.device) for work in (only_copies, alone, beside))
            added.append(max(both - step, 0.0))
            ratios.append(added[-1] / own)
    name = f"transfers, {batch} sequences: what they add to a step"
    yield case(name, [t * 1e3 for t in added[1:]], "ms a step", "the copies alone", ratios[1:])
