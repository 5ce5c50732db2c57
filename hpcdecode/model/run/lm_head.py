"""The largest logit of each token, without computing most of the others.

Logits of int8 numbers, which take half the time of those of bfloat16, are off by what rounding took from a token x and
a weight w, and that has a bound: |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'| (Cauchy-Schwarz). What may be the
largest within this bound, a few in a hundred, is computed as ever; so is every logit of a model whose numbers leave too
many. The token is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.attention.base import isa
from hpcdecode.model.lower import packed_weights as panels
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.chain import LINE, Chain
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.stage import TokenRows

FEWEST = 4096  # outputs that are worth it
WORTH = 0.3  # the most of all logits that may be left to compute
REST = 64  # calls that compute all of them after one that left more
ORDINARY = 1e15  # norms below it: no sum is infinite
aten = torch.ops.aten
_AT_ONCE = 64  # panels
_ROOM = 1 + 2**-10  # for the errors of norms
_TINY = 2**-50  # norms are at least this, so that numbers that round to zero stay within their bounds


class Head:
    """The product that ends a slice: x [L, in] by a weight [out, in] in panels, from which it makes an int8 one."""

    def __init__(self, x: TokenRows, y: TokenRows, weight: Tensor):
        """weight: in `panels.plain`, without a bias."""
        self.outputs, self.weight, self.resting = y.elements, weight, 0
        words = x.bytes // weight.element_size()
        self.native = _ops_cpu.Largest(TYPES[x.dtype], TYPES[y.dtype], words, self.outputs, isa())
        whole = torch.empty(len(weight) * panels.PANEL, x.elements, dtype=torch.int8)
        scales = torch.empty(len(whole))
        self.norms = torch.empty(len(weight), 2, panels.PANEL)
        for first in range(0, len(weight), _AT_ONCE):
            part = panels.rows_of(weight[first : first + _AT_ONCE], x.dtype).float()
            rounded = quantize.quantized(part)
            own = slice(first * panels.PANEL, first * panels.PANEL + len(part))
            whole[own], scales[own] = rounded, quantize.output_scales(part)
            lost = part - rounded * scales[own, None]
            norms = self.norms[first : first + _AT_ONCE]
            norms[:, 0], norms[:, 1] = (_norms(t).view(-1, panels.PANEL) for t in (part, lost))
        self.rounded = panels.int8(whole[: self.outputs], scales[: self.outputs])
        self.ordinary = bool(self.norms.max() < ORDINARY)  # not where one is no number

    @staticmethod
    def suits(x: TokenRows, y: TokenRows, weight: Tensor) -> bool:
        """Whether there are such products here, and they are worth it."""
        known = x.dtype in TYPES and y.dtype in TYPES and x.elements % 4 == 0 and y.elements >= FEWEST
        return known and _ops_cpu.Largest.offered(TYPES[x.dtype], TYPES[y.dtype], isa()) and not weight[:, 0].any()

    def rests(self) -> bool:
        """Whether all outputs are to be computed this time."""
        if self.resting:
            self.resting -= 1
            return True
        return not self.ordinary

    def argmax(self, x: Tensor) -> Tensor | None:
        """The first of the largest outputs of each row of x [..., in]: int64 [rows]; None where there are no bounds."""
        x = x.reshape(-1, x.shape[-1])
        scale = quantize.token_scale(x)
        rounded = _apart(quantize.to_int8(x, scale))
        kept = rounded * scale
        exact = x.float()
        lost = _norms(exact - kept) + _norms(exact) * (x.shape[1] + 8) * 2**-23  # and the errors of sums
        norms = torch.stack([scale.squeeze(1), lost, _norms(kept)])
        if not norms.max() < ORDINARY:
            return None
        ids = torch.empty(len(x), dtype=torch.int64)
        places = [(t.data_ptr(), t.stride(0) * t.element_size()) for t in (x, rounded)]
        weight = [t.data_ptr() for t in (self.weight, self.rounded, self.norms)]
        about = [row.data_ptr() for row in norms]
        share = self.native.run(len(x), *places, about, weight, ids.data_ptr(), torch.get_num_threads())
        if share > WORTH:
            self.resting = REST
        return ids


def head_of(graph: fx.Graph, weights: Sequence[Tensor]) -> tuple[fx.Graph, Head] | None:
    """What comes before the product that ends a slice, as a graph of the same inputs, and that product; None where
    the slice ends otherwise, or there is nothing to gain. weights: the slice's, the last of its inputs."""
    made = fx.Graph()
    (end,) = made.graph_copy(graph, {})
    if end.target is aten.select.int and end.args[1:] == (0, 0):
        end = end.args[0]
    steps = end.target.steps if isinstance(end.target, Chain) else []
    if len(steps) != 1 or not isinstance(steps[0].target.work, _ops_cpu.Product):
        return None
    before, weight = (end.args[end.target.given.index(n)] for n in steps[0].args)
    inputs = [n for n in made.nodes if n.op == "placeholder"]
    about = (steps[0].target.inputs[0], steps[0].target.outputs[0], weights[inputs.index(weight) - len(inputs)])
    if not Head.suits(*about):
        return None
    made.output((before,))
    made.eliminate_dead_code()
    return made, Head(*about)


def _norms(x: Tensor) -> Tensor:
    return x.norm(dim=1).mul_(_ROOM).clamp_(min=_TINY)


def _apart(rows: Tensor) -> Tensor:
    """The same rows an odd number of cache lines apart, so that those of a tile do not share sets of a cache."""
    count, size = rows.shape
    room = torch.empty(count, (-(-size // LINE) | 1) * LINE, dtype=rows.dtype)[:, :size]
    return room.copy_(rows)
