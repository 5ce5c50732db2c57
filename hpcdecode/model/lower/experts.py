"""Layers of experts by packed weights: the GEMMs of native/ops_cpu, of rows that share an expert at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from hpcdecode._ops_cpu import Chain as NativeChain
from hpcdecode._ops_cpu import ExpertProduct, Op, Product
from hpcdecode.attention.base import isa
from hpcdecode.model.frontend.adapters import expert_lora_update
from hpcdecode.model.frontend.meta import Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node
from hpcdecode.model.frontend.whole_experts import first_expert
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.chain import Link, assemble
from hpcdecode.model.lower.few_bits import ALL_FORMS, form_of
from hpcdecode.model.lower.instruction import TYPES
from hpcdecode.model.lower.packed_weights import HALF, WORD, PackedSize
from hpcdecode.model.lower.projections import AdapterUpdate, Gate, Projection, expert_projection, gate_of
from hpcdecode.model.lower.recipe import Form, Recipe
from hpcdecode.model.lower.stage import Stage, TokenRows
from hpcdecode.model.lower.weight_graph import WeightGraph


class ExpertGemm(Stage):
    """A GEMM of rows by the weights of their experts, as the target of a call in a graph.

    Args:
        x: Activations [T, K, in], or [T, 1, in] for the same row for all choices.
        weight: Weights [E, out, in] before they are packed, or [E, in, out].
        y: Result [T, K, out].
        first: Number of the first expert that has weights here; rows of others become zeros.
        gate: With a gate, half of the weight's outputs gate the others, and y has half as many.
        bits: Form of the weights in few bits, one of ALL_FORMS, or None.
        of: What adapters (LoRA) have, or None: the weights, then `weight` is [adapters * E, out, in], and rows of
            tokens without an adapter become zeros; or what updates the result, before a gate.

    Attributes:
        packed: Size of the packed weights.
        bits: Their form in few bits, or None.
    """

    __module__ = __name__

    def __init__(
        self,
        x: Meta,
        weight: Meta,
        y: Meta,
        first: int,
        gate: Op | None = None,
        bits: str | None = None,
        of: OfAdapters | None = None,
    ):
        self.bits = bits
        weights, inputs = weight.one_token[0], x.one_token[-1]
        choices, outputs = y.one_token[-2], y.one_token[-1] * (1 if gate is None else 2)
        words = inputs * x.dtype.itemsize // WORD.itemsize
        added, by, adapters = None, 0, 0
        read: tuple[Meta, ...] = ()
        if of is not None and of.update is not None:
            low, b = of.update
            added, by, read = of.product(), b.one_token[0], (of.numbers, low, b)
        elif of is not None:
            adapters, read = weights // of.experts, (of.numbers,)
        product = Product(
            TYPES[x.dtype], TYPES[y.dtype], words, outputs, isa(), gate, *form_of(bits), update=added, adapters=by
        )
        heads = 2 if x.dtype == torch.int8 else 1
        self.packed = PackedSize(outputs, ALL_FORMS[bits].words(inputs) if bits else words, heads, weights)
        chosen = Meta.of(torch.int64, (*y.shape[:-1],))
        super().__init__(
            ExpertProduct(product, weights // max(adapters, 1), first, choices, x.one_token[-2] < choices, adapters),
            [TokenRows(each) for each in (x, chosen, weight, *read)],
            [TokenRows(y)],
            whole=True,
        )

    @functools.cached_property
    def _chain(self) -> NativeChain:
        names = ("x", "experts", "weight", "adapters", "h", "B")[: len(self.inputs)]
        return assemble([Link(self.work, names, {"y": 0})], [*names, "y"])

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return [T, K, out] by a chain of its own.

        Args:
            tensors: Activations [T, K, in] or [T, 1, in], the experts of each token, int64 [T, K], packed weights;
                with adapters those of each token, int64 [T], and with an update h [T, K, rank] and packed B.
        """
        count = len(tensors[1])
        rows = [layout.rows_of(x, count) for layout, x in zip(self.inputs, tensors, strict=True)]
        (layout,) = self.outputs
        rows.append(layout.fresh(count))
        addresses, apart = ([of(x, step) for x, step in rows] for of in (lambda x, _: x.data_ptr(), lambda _, n: n))
        self._chain.run(count, torch.get_num_threads(), addresses, apart)
        return layout.shaped(rows[-1][0], count)


class OfAdapters(NamedTuple):
    """What adapters have for experts.

    Attributes:
        numbers: The tokens' adapters, int64 [T].
        experts: Number of experts of each adapter.
        update: h = A x, [T, K, rank], and B, [adapters * experts, out, rank], of an update B h; or None.
    """

    numbers: Meta
    experts: int
    update: tuple[Meta, Meta] | None = None

    def product(self) -> Product:
        """Return the GEMM of h by one B."""
        assert self.update is not None, "asked for an update alone"
        low, b = self.update
        kind, words = TYPES[low.dtype], low.one_token[-1] * low.dtype.itemsize // WORD.itemsize
        return Product(kind, kind, words, b.one_token[1], isa())


class ExpertPacker:
    """Replaces the projections by experts of a graph, with their gates, by those of packed weights, if there are any.

    Args:
        made: The graph.
        quantised: Returns what the weights of a projection are quantised to, or None.
    """

    def __init__(self, made: WeightGraph, quantised: Callable[[Projection], str | None]):
        self._made, self._quantised = made, quantised

    def run(self) -> None:
        """Change the graph in place."""
        nodes = list(self._made.graph.nodes)
        experts = {p.node: p for node in nodes if (p := expert_projection(node, self._made.recipes)) is not None}
        as_int8 = [p for p in experts.values() if p.bias is None and self._quantised(p) == "int8"]
        for p in [p for p in as_int8 if self._pack_int8(p)]:
            del experts[p.node]
        experts = {p.node: p for p in map(self._with_update, experts.values())}
        gates = [gate for node in nodes if (gate := gate_of(node, experts)) is not None]
        gated = {gate.projections[0].node for gate in gates if len(gate.projections) == 1 and self._pack(gate)}
        for p in (p for node, p in experts.items() if node not in gated):
            self._pack(Gate(None, [p], p.calls))
        for node in [node for node in self._made.graph.nodes if node.target is expert_lora_update]:
            self._pack_update(node)

    def _with_update(self, p: Projection) -> Projection:
        """Return a projection with what adapters add to it, if there is a GEMM of both."""
        (reader, *others) = p.node.users or (p.node,)
        if others or reader.target is not expert_lora_update or reader.args[0] is not p.node:
            return p
        numbers, _, a, b = map(as_node, reader.args[2:6])
        if tensor_meta(p.x).dtype is not tensor_meta(reader).dtype or not self._offered(reader):
            return p
        return replace(p, node=reader, update=AdapterUpdate(numbers, a, b))

    def _low(self, update: fx.Node) -> Meta:
        """Return shape and dtype of A x of an update."""
        about = tensor_meta(update)
        return Meta.of(about.dtype, (*about.shape[:-1], tensor_meta(as_node(update.args[4])).one_token[1]))

    def _offered(self, update: fx.Node) -> bool:
        """Return whether there are GEMMs by the A and B of an update."""
        low = self._low(update)
        return has_gemm(tensor_meta(as_node(update.args[1])), low) and has_gemm(low, tensor_meta(update))

    def _pack(self, gate: Gate) -> bool:
        """Replace a projection, with its gate and update if it has any, and return whether that was possible."""
        (p,), result = gate.projections, gate.nodes[0]
        x, about, own = tensor_meta(p.x), tensor_meta(result), p.calls[-1]
        forms = [bits for bits in (self._quantised(p), None) if bits != "int8"]
        gemms = (gemm for bits in forms if (gemm := self._gemm(p, x, about, gate.op, bits)) is not None)
        gemm = next(gemms, None)
        if gemm is None:
            return False
        form: Form = "packed experts" if gate.op is None else "packed gated experts"
        with self._made.graph.inserting_before(result):
            added: tuple[fx.Node, ...] = ()
            if p.update is not None:
                b = Recipe(
                    self._made.sources([p.update.b]), form=form, packed=PackedSize.of_heads(tensor_meta(p.update.b))
                )
                added = (p.update.adapters, self._low_rank(p.node), self._made.input(b))
            result.replace_all_uses_with(self._call(gemm, p, own.args[0], form, about, added))
        for node in gate.nodes:
            self._made.graph.erase_node(node)
        return True

    def _gemm(
        self, p: Projection, x: Meta, y: Meta, gate: Op | None = None, bits: str | None = None
    ) -> ExpertGemm | None:
        """Return what computes a projection by experts, or None if native/ops_cpu has no such GEMM on this machine.

        Args:
            p: The projection.
            x: Its activations, which may have been rounded.
            y: Its result, or that of the gate.
            gate: Activation of the gate, or None.
            bits: Form of the weights in few bits, one of ALL_FORMS, or None.
        """
        if not has_gemm(x, y, gate, bits):
            return None
        of = None
        if p.update is not None:
            low, b = self._low(p.node), tensor_meta(p.update.b)
            of = OfAdapters(tensor_meta(p.update.adapters), as_int(p.node.args[6]), (low, b))
        return ExpertGemm(x, tensor_meta(p.weight), y, first_expert(p.calls[-1]), gate, bits, of)

    def _pack_int8(self, p: Projection) -> bool:
        """Replace a projection by one of int8 weights, if there is any: rotate and round x, multiply, scale."""
        x, about = tensor_meta(p.x), tensor_meta(p.node)
        wide, as_int8 = (Meta.of(dtype, x.shape) for dtype in (torch.float32, torch.int8))
        gemm = self._gemm(p, as_int8, about)
        if gemm is None:
            return False
        with self._made.graph.inserting_before(p.node):
            rows: Argument = p.node.args[0]
            if quantize.RotationShape.of(x.one_token[-1]):
                rows = self._made.call(quantize.rotated, (rows,), wide)
            scale = self._made.call(quantize.token_scale, (rows,), Meta.of(torch.float32, (*x.shape[:-1], 1)))
            rows = self._made.call(quantize.to_int8, (rows, scale), as_int8)
            whole = self._call(gemm, p, rows, "packed int8 experts", about)
            p.node.replace_all_uses_with(self._made.call(quantize.scaled, (whole, scale), about))
        self._made.graph.erase_node(p.node)
        return True

    def _pack_update(self, node: fx.Node) -> None:
        """Replace what adapters add to a projection of another form: products by experts' A and B, and a sum."""
        if not self._offered(node):
            return
        about = tensor_meta(node)
        with self._made.graph.inserting_before(node):
            added = self._by_adapters(node, self._low_rank(node), as_node(node.args[5]), about)
            node.replace_all_uses_with(self._made.call(torch.ops.aten.add.Tensor, (node.args[0], added), about))
        self._made.graph.erase_node(node)

    def _low_rank(self, update: fx.Node) -> fx.Node:
        """Add A x of an update, where the graph inserts."""
        return self._by_adapters(update, as_node(update.args[1]), as_node(update.args[4]), self._low(update))

    def _by_adapters(self, update: fx.Node, x: fx.Node, factor: fx.Node, about: Meta) -> fx.Node:
        """Add the product of rows by one of the factors of an update, where the graph inserts; about: of the result."""
        numbers, chosen = map(as_node, update.args[2:4])
        of, first = OfAdapters(tensor_meta(numbers), as_int(update.args[6])), as_int(update.args[7])
        gemm = ExpertGemm(tensor_meta(x), tensor_meta(factor), about, first, of=of)
        recipe = Recipe(self._made.sources([factor]), form="packed experts", packed=gemm.packed)
        return self._made.call(gemm, (x, self._as_int64(chosen), self._made.input(recipe), numbers), about)

    def _as_int64(self, chosen: fx.Node) -> fx.Node:
        about = tensor_meta(chosen)
        if about.dtype == torch.int64:
            return chosen
        return self._made.call(torch.Tensor.long, (chosen,), Meta.of(torch.int64, about.shape))

    def _call(
        self, gemm: ExpertGemm, p: Projection, x: Argument, form: Form, about: Meta, added: tuple[fx.Node, ...] = ()
    ) -> fx.Node:
        recipe = Recipe(
            self._made.sources([p.weight]), p.transposed, form, self._made.biases([p]), gemm.packed, gemm.bits
        )
        chosen = self._as_int64(as_node(p.calls[-1].args[1]))
        return self._made.call(gemm, (x, chosen, self._made.input(recipe), *added), about)


def has_gemm(x: Meta, y: Meta, gate: Op | None = None, bits: str | None = None) -> bool:
    """Return whether native/ops_cpu has a GEMM by experts on this machine.

    Args:
        x: Activations [T, K, in].
        y: Result [T, K, out].
        gate: Activation of a gate, or None.
        bits: Form of the weights in few bits, one of ALL_FORMS, or None.
    """
    inputs = x.one_token[-1]
    if x.token_dim != 0 or y.token_dim != 0:
        return False
    odd = inputs * x.dtype.itemsize % WORD.itemsize or (gate is not None and y.one_token[-1] % HALF)
    if odd or x.dtype not in TYPES or y.dtype not in TYPES or (bits is not None and inputs % ALL_FORMS[bits].multiple):
        return False
    return Product.offered(TYPES[x.dtype], TYPES[y.dtype], isa(), gate, *form_of(bits))
