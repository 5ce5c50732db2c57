"""The argmax of every token's logits, without computing most of them.

int8 logits take half the time of bfloat16 logits. They are off by what rounding took from a token x and a weight w, and
that has a bound: |x w - x' w'| <= |x - x'| |w| + |x'| |w - w'| (Cauchy-Schwarz). Only logits that may be the largest
within this bound, a few in a hundred, are computed in full. A model whose numbers leave too many has all of its logits
computed. The token is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.nodes import as_node, results
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.chain import Chain, odd_lines
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.packed_weights import GROUP, PRIVATE, WORD, PackedSize
from hpcdecode.model.lower.recipe import Recipe
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.system.shared_memory import WeightMemory
from hpcdecode.system.threads import ELEMENTS_AT_ONCE, on_threads

MIN_OUTPUTS = 4096  # outputs that are worth it
MAX_SHARE = 0.3  # the most of all logits that may be left to compute
PAUSE = 64  # calls that compute all logits after one that left more
MAX_NORM = 1e15  # norms below it: no sum is infinite
aten = torch.ops.aten
_NORM_SLACK = 1 + 2**-10  # for the errors of norms
_MIN_NORM = 2**-50  # so that numbers that round to zero stay within their bounds


class Largest(NamedTuple):
    """The largest logit of every token.

    Attributes:
        ids: int64 [L], the first token that has it.
        values: float32 [L].
    """

    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> Largest:
        """Return those of logits [L, vocab]."""
        ids = logits.argmax(dim=1)
        return cls(ids, logits.gather(1, ids[:, None]).squeeze(1).float())


class LmHead:
    """The GEMM that ends a slice, with a search for its argmax.

    Args:
        x: Layout of the activations [L, in].
        y: Layout of the logits [L, out].
        weight: Weight [out, in] from `packed_weights.pack`, without a bias.
        memory: Where to put what is made of it.
        like: Another one, which has made it already if it is of the same weight.

    Attributes:
        outputs: Number of logits of a token.
        weight: The weight.
        rounded: The weight as int8, packed.
        norms: float32 [groups, 2, 32]: norms of every output's weights, and of what rounding took from them.
        native: The native search.
    """

    def __init__(
        self, x: TokenRows, y: TokenRows, weight: Tensor, memory: WeightMemory = PRIVATE, like: LmHead | None = None
    ):
        self.outputs, self.weight = y.elements, weight
        words = x.bytes // weight.element_size()
        self.native = _ops_cpu.Argmax(TYPES[x.dtype], TYPES[y.dtype], words, self.outputs, isa())
        self._paused_calls = 0
        same = like if like is not None and like.weight is weight else None
        made = (same.rounded, same.norms) if same else self._made(x, memory)
        self.rounded: Tensor = made[0]
        self.norms: Tensor = made[1]

    def _made(self, x: TokenRows, memory: WeightMemory) -> tuple[Tensor, Tensor]:
        """Return the weight as int8, packed, and its norms."""
        weight = self.weight
        size = PackedSize(self.outputs, x.elements // WORD.itemsize, 2)
        norms = torch.Size((len(weight), 2, GROUP))

        def fill(made: Tensor) -> None:
            rows = self._rounded(x, made[size.bytes :].view(torch.float32).view(norms))
            packed_weights.pack_into(made[: size.bytes], rows)

        made = memory.filled(size.bytes + norms.numel() * 4, fill, beside=weight)
        return made[: size.bytes].view(WORD), made[size.bytes :].view(torch.float32).view(norms)

    def _rounded(self, x: TokenRows, norms: Tensor) -> packed_weights.WeightRows:
        """Return the weight as int8, and set the norms of its outputs."""
        weight, groups = self.weight, max(ELEMENTS_AT_ONCE // (GROUP * x.elements), 1)
        whole = torch.empty(len(weight) * GROUP, x.elements, dtype=torch.int8)
        scales = torch.empty(len(whole))

        def fill(first: int) -> None:
            own = slice(first, first + groups)
            part = packed_weights.unpack(weight[own], x.dtype).float()
            scale = quantize.output_scales(part)
            rounded = quantize.rounded(part, scale)
            rows = slice(first * GROUP, first * GROUP + len(part))
            whole[rows], scales[rows], norms[own, 0] = rounded, scale, _norms(part).view(-1, GROUP)
            norms[own, 1] = _norms(part - rounded.mul_(scale[:, None])).view(-1, GROUP)

        on_threads(fill, range(0, len(weight), groups))
        return packed_weights.int8_rows(whole[: self.outputs], scales[: self.outputs])

    @staticmethod
    def suits(x: TokenRows, y: TokenRows) -> bool:
        """Return True if the machine has such GEMMs, and the search is worth it."""
        known = x.dtype in TYPES and y.dtype in TYPES and x.elements % 4 == 0 and y.elements >= MIN_OUTPUTS
        return known and _ops_cpu.Argmax.offered(TYPES[x.dtype], TYPES[y.dtype], isa())

    @functools.cached_property
    def _bounded(self) -> bool:
        """True if all norms are numbers that are not too large. Asked once all processes have loaded."""
        return bool(self.norms.max() < MAX_NORM)  # False if a weight is NaN

    def pauses(self) -> bool:
        """Return True if all logits are to be computed this time, and count the call."""
        if self._paused_calls:
            self._paused_calls -= 1
            return True
        return not self._bounded

    def largest(self, x: Tensor) -> Largest | None:
        """Return the first of each row's largest outputs, or None if a number of `x` has no bound.

        Args:
            x: Activations [..., in].
        """
        x = x.reshape(-1, x.shape[-1])
        scale = quantize.token_scale(x)
        rounded = _spread(quantize.to_int8(x, scale))
        kept = rounded * scale
        exact = x.float()
        lost = _norms(exact - kept) + _norms(exact) * (x.shape[1] + 8) * 2**-23  # and the errors of sums
        norms = torch.stack([scale.squeeze(1), lost, _norms(kept)])
        if not norms.max() < MAX_NORM:
            return None
        ids, values = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
        x_rows, rounded_rows = ((t.data_ptr(), t.stride(0) * t.element_size()) for t in (x, rounded))
        weight = [t.data_ptr() for t in (self.weight, self.rounded, self.norms)]
        about = [row.data_ptr() for row in norms]
        threads = torch.get_num_threads()
        share = self.native.run(len(x), x_rows, rounded_rows, about, weight, ids.data_ptr(), values.data_ptr(), threads)
        if share > MAX_SHARE:
            self._paused_calls = PAUSE
        return Largest(ids, values)


class Cut(NamedTuple):
    """A slice in two: what comes before the GEMM that ends it, as a graph of the same inputs, and that GEMM.

    The graph returns what the GEMM takes, and what else the slice returns beside the logits.
    """

    before: fx.Graph
    head: LmHead


def cut_head(
    graph: fx.Graph,
    weights: Sequence[Tensor | Stack],
    recipes: Sequence[Recipe],
    memory: WeightMemory = PRIVATE,
    like: LmHead | None = None,
) -> Cut | None:
    """Return a slice in two, or None if it does not end in a GEMM or there is nothing to gain.

    Args:
        graph: What the slice runs.
        weights: Its weights, the last of the graph's inputs.
        recipes: How they were made.
        memory: Where to put what is made of them.
        like: The head of another model, which may have the same weight.
    """
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    end, *others = results(made)
    if end.target is aten.select.int and end.args[1:] == (0, 0):
        end = as_node(end.args[0])
    if not isinstance(end.target, Chain) or len(end.target.calls) != 1:
        return None
    (call,) = end.target.calls
    if not isinstance(call.stage.work, _ops_cpu.Product) or len(call.node.args) != 2:  # adapters may update it
        return None
    before, weight_node = (as_node(end.args[end.target.given.index(as_node(n))]) for n in call.node.args)
    inputs = [n for n in made.nodes if n.op == "placeholder"]
    place = inputs.index(weight_node) - len(inputs)
    weight, x, y = weights[place], call.stage.inputs[0], call.stage.outputs[0]
    if isinstance(weight, Stack) or recipes[place].biases or recipes[place].bits or not LmHead.suits(x, y):
        return None
    made.erase_node(made.output_node())
    made.output((before, *others))
    made.eliminate_dead_code()
    return Cut(made, LmHead(x, y, weight, memory, like))


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = x.norm(dim=1)
    return norms.mul_(_NORM_SLACK).clamp_(min=_MIN_NORM)


def _spread(rows: Tensor) -> Tensor:
    """Copy rows an odd number of cache lines apart, so that those of a tile do not share sets of a cache."""
    count, size = rows.shape
    room = torch.empty(count, odd_lines(size), dtype=rows.dtype)[:, :size]
    return room.copy_(rows)
