"""Both roles in one process: the S-rank's rows go straight to the R-part, no message passing."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdecode.exchange.base import Part, Share
from hpcdecode.schedule.plan import Plan


class LocalLink:
    """A lane whose only R-rank is this process."""

    def __init__(self, part: Part, lane: int, first_slot: int):
        self.part, self.lane, self.first_slot = part, lane, first_slot

    def begin(self, plan: Plan) -> None:
        self.share = Share(plan, 0, self.first_slot)
        self.part.begin(self.lane, self.share)

    def post(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        decodes = len(self.share.decode_rows)
        rows = _joined(q[:decodes], k[:decodes], v[:decodes])
        prompts = _joined(k[decodes:], v[decodes:])
        self.part.attend(self.lane, layer, self.share, rows, prompts, o[:decodes])

    def wait(self) -> None:
        pass

    def take(self) -> None:
        pass


def _joined(*parts: Tensor) -> Tensor:
    """The columns of `parts` as one matrix; a view where they lie side by side, as slices leave them."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.stride() != first.stride():
            return torch.cat(parts, dim=1)
        end += part.shape[1] * part.element_size()
    return first.as_strided((len(first), sum(part.shape[1] for part in parts)), first.stride())
