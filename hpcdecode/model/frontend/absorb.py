"""Let attention run over the latent that K and V are projections of (multi-head latent attention).

With K = [c W_UK | r] and V = c W_UV for every head, and r the same for all heads, q.k is (q_c W_UK^T).c + q_r.r, and
the output is (the weighted mean of c) W_UV. So attention over the rows [c | r], with one KV head, and c as values gives
the same: q is projected before it, and its output after it. The KV cache then holds rank + shared columns a token.

Where K of one head is V, too, as in DeepSeek-V4, it is such a latent as it is.

No model is named. The graph says which columns of K and V are outputs of projections of one tensor, and which columns
of K all heads share. The rewrite is one of exact arithmetic; rounding differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, Target

from hpcdecode.model.frontend.clean import remove_dead
from hpcdecode.model.frontend.head_linear import HEAD_LINEAR
from hpcdecode.model.frontend.meta import TOKENS, Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.origins import Origins, Untraceable
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten
LEAST_SAVING = 2  # times fewer stored columns than those of K and V


class NotLatent(Exception):
    """K and V are not linear in a smaller latent."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of a projection's weight, those of every head.

    Attributes:
        weight: Placeholder of the weight, [out, rank].
        index: Rows of it, int64 [heads, rows].
    """

    weight: fx.Node
    index: Tensor

    def repeated(self, group: int) -> HeadRows:
        """Return the rows of the query heads, `group` of which share each head."""
        return HeadRows(self.weight, self.index.repeat_interleave(group, 0))


@dataclass(frozen=True)
class Latent:
    """What K and V of an attention are made of.

    Attributes:
        node: The latent, whose last dimension is the rank.
        keys: Weight rows of the columns of K that are projections of it.
        values: Weight rows of V.
        projected: Those columns of a head of K.
        shared: Columns of a head of K that all heads share.
        source: Tensor of the shared columns, or None if there are none.
    """

    node: fx.Node
    keys: HeadRows
    values: HeadRows
    projected: range
    shared: range
    source: fx.Node | None

    @property
    def rank(self) -> int:
        """Return the elements of the latent."""
        return tensor_meta(self.node).one_token[-1]


def absorb(trace: Trace) -> list[bool]:
    """Rewrite in place the attentions of `trace` whose stored columns at least halve.

    Those of one KV head whose values are its keys are then over latents, too.

    The trace may be that of a member of a group: its heads share the latent as all do.

    Returns:
        For each attention whether it was rewritten.
    """
    done = []
    for i, attend in enumerate(trace.attends):
        found = find_latent(trace, attend) if attend.target is ATTEND else None
        if found is not None:
            trace.attends[i] = Rewriter(trace, attend, found).run()
        elif attend.target is ATTEND:
            take_values_from_keys(trace, attend)
        done.append(found is not None)
    if any(done):
        remove_dead(trace.graph)
    return done


def take_values_from_keys(trace: Trace, attend: fx.Node) -> None:
    """Let an attention of one KV head bring no values where they are its keys."""
    call = AttendArguments.of(attend)
    if call.v is not call.k or call.kv_heads > 1:
        return
    with trace.graph.inserting_before(attend):
        none = trace.graph.call_function(aten.slice.Tensor, (call.k, 1, 0, 0))
    none.meta["about"] = Meta.of(tensor_meta(call.k).dtype, (TOKENS, 0))
    attend.update_arg(2, none)


def find_latent(trace: Trace, attend: fx.Node) -> Latent | None:
    """Return what K and V of an attention are made of, or None if attention over it would not halve what is stored."""
    call, origins = AttendArguments.of(attend), Origins()
    if call.profiles is not None or call.row_sinks:  # which kernels of latents do not add
        return None
    try:
        k, v = (origins.of(node).reshape(call.kv_heads, -1) for node in (call.k, call.v))
        shared, projected = sorted_columns(k)
        node, values = projection_of(trace, origins, v)
        other, keys = projection_of(trace, origins, k[:, projected.start : projected.stop])
        source = origins.source(k[0, shared.start : shared.stop]) if shared else None
    except (NotLatent, Untraceable):
        return None
    about = tensor_meta(node)
    rank = about.one_token[-1]
    if other is not node or about.numel_per_token != rank or (shared and source is None):
        return None
    if (rank + len(shared)) * LEAST_SAVING > k.numel() + v.numel():
        return None
    group = call.q_heads // call.kv_heads
    return Latent(node, keys.repeated(group), values.repeated(group), projected, shared, source)


def projection_of(trace: Trace, origins: Origins, numbers: Tensor) -> tuple[fx.Node, HeadRows]:
    """Return the input of the projection that computes some elements, and the rows of its weight.

    Args:
        trace: The trace.
        origins: Origins of the elements.
        numbers: Numbers of the elements, [kv_heads, columns].

    Raises:
        NotLatent: If no projection does, if more than one does, or if it has a bias.
    """
    found = origins.places(numbers)
    if found is None:
        raise NotLatent
    node, places = found
    if node.target is not aten.linear.default or len(node.args) != 2 or node.args[1] not in trace.weights:
        raise NotLatent
    return as_node(node.args[0]), HeadRows(as_node(node.args[1]), places)


def sorted_columns(k: Tensor) -> tuple[range, range]:
    """Return the columns of a head of K that all heads share, and the others.

    Args:
        k: Numbers of the elements of one token, int64 [kv_heads, columns].

    Raises:
        NotLatent: If either are not neighbours, or if there are no others.
    """
    same = (k == k[0]).all(0) if len(k) > 1 else torch.zeros(k.shape[1], dtype=torch.bool)
    shared, other = (torch.nonzero(chosen).flatten().tolist() for chosen in (same, ~same))
    if not other or any(part != list(range(part[0], part[-1] + 1)) for part in (shared, other) if part):
        raise NotLatent
    return range(shared[0], shared[-1] + 1) if shared else range(0), range(other[0], other[-1] + 1)


class Rewriter:
    """Replaces an attention by one over the latent.

    Args:
        trace: Trace, changed in place.
        attend: The attention.
        latent: What its K and V are made of.
    """

    def __init__(self, trace: Trace, attend: fx.Node, latent: Latent):
        self._trace, self._attend, self._latent = trace, attend, latent
        self._graph, self._call = trace.graph, AttendArguments.of(attend)
        self._dtype = tensor_meta(self._call.q).dtype

    def run(self) -> fx.Node:
        """Return the new attention; nothing reads the old one any more."""
        latent, heads = self._latent, self._call.q_heads
        first = next(n for n in self._graph.nodes if n.op == "call_function")
        with self._graph.inserting_before(first):
            keys, values = self._folded(latent.keys, transposed=True), self._folded(latent.values)
        with self._graph.inserting_before(self._attend):
            q, k = self._queries(keys), self._stored()
            v = self._emit(aten.slice.Tensor, (k, 1, 0, 0), (0,))  # the values are in K
            over = (q, k, v, heads, 1, *self._attend.args[5:])
            attend = self._emit(ATTEND, over, (heads * latent.rank,))
            width = latent.values.index.shape[1]
            o = self._emit(HEAD_LINEAR, (attend, values), (heads * width,))
        self._attend.replace_all_uses_with(o)
        self._graph.erase_node(self._attend)
        return attend

    def _folded(self, rows: HeadRows, *, transposed: bool = False) -> fx.Node:
        """Return the weights of the heads, [q_heads, rows, rank], or transposed [q_heads, rank, rows]."""
        (heads, count), rank, dtype = rows.index.shape, self._latent.rank, tensor_meta(rows.weight).dtype
        index = self._graph.placeholder(f"head_rows_{len(self._trace.constants)}")
        index.meta["about"] = Meta.of(torch.int64, (heads * count,))
        self._trace.constants[index] = rows.index.flatten()
        picked = self._static(aten.index_select.default, (rows.weight, 0, index), (heads * count, rank), dtype)
        made = self._static(aten.view.default, (picked, [heads, count, rank]), (heads, count, rank), dtype)
        if not transposed:
            return made
        return self._static(aten.transpose.int, (made, 1, 2), (heads, rank, count), dtype)

    def _queries(self, keys: fx.Node) -> fx.Node:
        """Return the queries of the latent and of the shared columns, [T, q_heads * (rank + shared)]."""
        latent, heads, rank = self._latent, self._call.q_heads, self._latent.rank
        dims = tensor_meta(self._call.q).one_token[1] // heads
        q = self._emit(aten.view.default, (self._call.q, [-1, heads, dims]), (heads, dims))
        own = self._flat(self._columns(q, latent.projected), heads * len(latent.projected))
        q_latent = self._emit(HEAD_LINEAR, (own, keys), (heads * rank,))
        if not latent.shared:
            return q_latent
        by_head = self._emit(aten.view.default, (q_latent, [-1, heads, rank]), (heads, rank))
        parts = [by_head, self._columns(q, latent.shared)]
        width = rank + len(latent.shared)
        return self._flat(self._emit(aten.cat.default, (parts, 2), (heads, width)), heads * width)

    def _stored(self) -> fx.Node:
        """Return what is stored of a token: [T, rank + shared]."""
        latent = self._latent
        made = self._flat(latent.node, latent.rank)
        if latent.source is None:
            return made
        shared = self._flat(latent.source, len(latent.shared))
        return self._emit(aten.cat.default, ([made, shared], 1), (latent.rank + len(latent.shared),))

    def _columns(self, q: fx.Node, columns: range) -> fx.Node:
        return self._emit(aten.slice.Tensor, (q, 2, columns.start, columns.stop), (self._call.q_heads, len(columns)))

    def _flat(self, node: fx.Node, columns: int) -> fx.Node:
        return self._emit(aten.reshape.default, (node, [-1, columns]), (columns,))

    def _emit(self, target: Target, args: tuple[Argument, ...], per_token: tuple[int, ...]) -> fx.Node:
        node = self._graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["about"] = Meta.of(self._dtype, (TOKENS, *per_token))
        return node

    def _static(
        self, target: Target, args: tuple[Argument, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        node = self._graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["about"] = Meta.of(dtype, shape)
        return node
