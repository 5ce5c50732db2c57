"""The fused decode step: from the first attention to the last in one native call, for a process of both roles.

Threads take blocks of tokens through all layers, attention and recurrent states included, each at its own pace. So none
waits for another, and the attention of one thread, which is bound by memory, meets the GEMMs of others, which are not.
Every slice between two attentions or states must be chains alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu_step import StepKvCache, fusable, moved_bytes, step_of, takes_several, threads_of
from hpcdecode.model.frontend.meta import meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_int, as_node, results
from hpcdecode.model.lower.chain import Chain, ChainOutput, Link, SharedRows, assemble, source
from hpcdecode.model.lower.recipe import as_tensor
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.model.run.split_model import SplitModel

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.view_as_real.default)
MAX_UNEVEN = 1.25  # the most that a thread's sequences may hold of the mean
LAYER_BYTES = 1 << 20  # what a thread reads while layers that are called one by one cost more than a fused step


class Unfusable(Exception):
    """A slice is more than chains."""


class Name(NamedTuple):
    """The name of a tensor of the step.

    Attributes:
        kind: What the tensor is.
        number: Its place in the context after slice 0, the layer of an attention, or the slice of a weight, of a result
            or of rows that results share.
        of: Which weight or result of the slice.
    """

    kind: Literal["qkv", "context", "attention", "weight", "result", "rows"]
    number: int = 0
    of: int | ChainOutput | None = None


QKV = Name("qkv")  # of slice 0


class NamedRows(NamedTuple):
    """The name of a result of a slice, and the layout of its rows."""

    name: Name
    rows: TokenRows


class StepLinks:
    """The links of the step so far, and the tensors that they name.

    Attributes:
        links: The native work.
        weights: The weights that it reads, by name.
        rows: The layouts of tensors of the context, by name.
        shared: Rows of a layer's inputs that several results make up.
    """

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.weights: dict[Name, Tensor] = {}
        self.rows: dict[Name, TokenRows] = {}
        self.shared: list[SharedRows] = []

    def attend(self, model: SplitModel, layer: int, qkv: Name) -> Name:
        """Append the attention or the states of a layer and return the name of its output."""
        output = Name("attention", layer)
        size = model.attends[layer].out_columns * model.dtype.itemsize
        self.links.append(Link(_ops_cpu.Attention(layer), (qkv,), {output: size}))
        return output


class FusedStep:
    """The layers of `model` between its first slice and its last, and the attention and states of `kv_cache`.

    Args:
        model: Model on the CPU.
        kv_cache: KV cache in the same process that is `fusable`.

    Attributes:
        native: The native chain.

    Raises:
        Unfusable: If a slice between two attentions is more than chains.
    """

    def __init__(self, model: SplitModel, kv_cache: StepKvCache):
        self.model, self.kv_cache, self._moved = model, kv_cache, moved_bytes(kv_cache)
        layers = len(model.attends)
        self.sinks = [model.sinks(i) for i in range(layers)]
        step = StepLinks()
        qkv, names = QKV, [Name("context", i) for i in range(len(model.split.slices[0].context))]
        for layer in range(layers - 1):
            o = step.attend(model, layer, qkv)
            qkv, names = MiddleSlice(model, layer + 1).join(step, o, names)
        last = step.attend(model, layers - 1, qkv)
        read = {name for link in step.links for name in link.reads}
        self._context = names  # after the last slice but one
        self._rows = step.rows
        self._taken = [name for name in step.rows if name.kind == "context" and name in read]
        self._made = list(dict.fromkeys(name for name in names if name.kind != "context"))
        if any(name in self._made for rows in step.shared for name in rows.begins):
            raise Unfusable
        self.native = assemble(step.links, [QKV, *self._taken, *self._made, last, *step.weights], step.shared)
        self._weights = list(step.weights.values())  # whose memory must live as long as the step
        self._weight_addresses = [tensor.data_ptr() for tensor in self._weights]

    @staticmethod
    def of(model: SplitModel, kv_cache: KvCache) -> FusedStep | None:
        """Return the fused step, or None if the model or the KV cache does not allow it."""
        if model.device.type != "cpu" or not model.whole or not fusable(kv_cache):
            return None
        try:
            return FusedStep(model, kv_cache)
        except Unfusable:
            return None

    def suits(self, lengths: Sequence[int], tokens: int | None = None) -> bool:
        """Return True if a step is worth it: threads have about as much to attend to, or little more than others.

        Args:
            lengths: Tokens of the step's sequences. One thread attends for all of a sequence, and takes it through its
                states.
            tokens: New tokens of all sequences; None for one of each.
        """
        threads = torch.get_num_threads()
        if threads > threads_of(self.kv_cache):
            return False
        if not self.takes(len(lengths), tokens or len(lengths), threads):
            return False
        held = np.array([self._moved.of(lengths[i::threads]) for i in range(threads)])
        most = max(MAX_UNEVEN * held.mean(), held.mean() + LAYER_BYTES * len(self.sinks))
        return bool(held.max() <= most)

    def takes(self, sequences: int, tokens: int, threads: int) -> bool:
        """Return whether a step may have so many new tokens of so many sequences."""
        return tokens == sequences or (takes_several(self.kv_cache) and self.native.together(tokens, threads))

    def run(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], qkv: Tensor, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...], float]:
        """Run the step from the results of the first slice to what the last slice takes.

        Args:
            slots: Slots of the sequences in the KV cache, int32 [n], extended by the step.
            counts: Tokens by which each was extended, int32 [n], T together.
            qkv: Rows of the first slice, [T, row_columns].
            context: Context of the first slice.

        Returns:
            The output of the last attention [T, out_columns], the context of the last slice, and the seconds of
            attention and states.
        """
        count, dtype = len(qkv), str(self.model.dtype).removeprefix("torch.")
        o = self.model.empty_output(len(self.sinks) - 1, count)
        taken = [self._rows[name].rows_of(context[name.number], count) for name in self._taken]
        made = [self._rows[name].fresh(count) for name in self._made]
        rows = [(qkv, qkv.stride(0) * qkv.element_size()), *taken, *made, (o, o.stride(0) * o.element_size())]
        pointers = [x.data_ptr() for x, _ in rows] + self._weight_addresses
        steps = [step for _, step in rows] + [0] * len(self._weight_addresses)
        attention = step_of(self.kv_cache, slots, counts, dtype, self.sinks)
        self.native.run(count, torch.get_num_threads(), pointers, steps, attention.address)
        new = {name: self._rows[name].shaped(x, count) for name, (x, _) in zip(self._made, made, strict=True)}
        after = tuple(new[name] if name in new else context[name.number] for name in self._context)
        return o, after, attention.seconds


class MiddleSlice:
    """A slice between two attentions, as links of a chain.

    Raises:
        Unfusable: If it is more than chains.
    """

    def __init__(self, model: SplitModel, i: int):
        self.i, self.slice = i, model.split.slices[i]
        graph, weights = model.compiled(i).graph, model.weights(i)
        self.chains = {n: n.target for n in graph.nodes if isinstance(n.target, Chain)}
        if not self.chains or not all(isinstance(w, Tensor) for w in weights):
            raise Unfusable
        self.inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.weights = [as_tensor(w).contiguous() for w in weights]
        self.results = results(graph)
        self.row_count = model.row_counts[i]
        self.row_bytes = model.attends[i].row_columns * model.dtype.itemsize

    def join(self, step: StepLinks, o: Name, context: Sequence[Name]) -> tuple[Name, list[Name]]:
        """Append the links of this slice.

        Args:
            step: The step so far.
            o: Name of the output of the attention before the slice.
            context: Names of the context before the slice.

        Returns:
            The names of the rows for the layer after it, and of the context.
        """
        own = [Name("weight", self.i, j) for j in range(len(self.weights))]
        step.weights.update(zip(own, self.weights, strict=True))
        taken = [context[j] for j in self.slice.take]
        inputs = dict(zip(self.inputs, [o, *taken, *own], strict=True))
        for call, chain in self.chains.items():
            inside: dict[object, Name] = {}
            for inner, argument in zip(chain.given, call.args, strict=True):
                node = self._seen_through(as_node(argument))
                inside[inner] = inputs[node] if node in inputs else self._output(node).name
                if inside[inner].kind == "context":
                    step.rows[inside[inner]] = TokenRows(tensor_meta(node))
            for link in chain.links:
                reads = [inside[name] if name in inside else self._result(name) for name in link.reads]
                step.links.append(Link(link.work, reads, {self._result(name): n for name, n in link.writes.items()}))
        new = [inputs[n] if n in inputs else self._handed_on(step, n) for n in self.results[self.row_count :]]
        after = [context[j] if j >= 0 else new[~j] for j in self.slice.give]
        return self._joined(step), after

    def _handed_on(self, step: StepLinks, node: fx.Node) -> Name:
        """Return the name of a result that is part of the context, and note its layout."""
        name, step.rows[name] = self._output(node)
        return name

    def _result(self, name: object) -> Name:
        """Return the name in the step of a result that links of the slice hand on."""
        assert isinstance(name, ChainOutput), "expected a result of the slice"
        return Name("result", self.i, name)

    def _seen_through(self, node: fx.Node) -> fx.Node:
        """Return the input, or the result of a chain, of which `node` is a view with the same rows."""
        while node.target in VIEWS:
            viewed = as_node(node.args[0])
            before, about = meta(viewed), meta(node)
            if before is None or about is None or not (TokenRows(before).leads and TokenRows(about).leads):
                raise Unfusable
            node = viewed
        return node

    def _output(self, node: fx.Node) -> NamedRows:
        """Return the name and the layout of a result of a chain that is a node."""
        call, number = source(node)
        if call not in self.chains:
            raise Unfusable
        chain = self.chains[call]
        return NamedRows(self._result(chain.made[number]), chain.outputs[number])

    def _joined(self, step: StepLinks) -> Name:
        """Return the name of the rows that the first results make up, from first to last.

        These are columns of one result; else results share the rows.
        """
        columns: dict[fx.Node, int] = {}  # of each result so far
        for part in self.results[: self.row_count]:
            if part.target is not aten.narrow.default:
                columns[part] = self._output(part).rows.elements
                continue
            whole, begin = as_node(part.args[0]), columns.get(as_node(part.args[0]), 0)
            if part.args[1:3] != (1, begin) or (begin and whole is not list(columns)[-1]):
                raise Unfusable
            columns[whole] = begin + as_int(part.args[3])
        parts: list[Name] = []
        begins: dict[Hashable, int] = {}
        size = 0
        for node, width in columns.items():
            name, layout = self._output(node)
            if layout.elements != width or size % layout.dtype.itemsize:
                raise Unfusable
            parts.append(name)
            begins[name] = size
            size += layout.bytes
        if size != self.row_bytes:
            raise Unfusable
        if len(parts) == 1:
            return parts[0]
        rows = Name("rows", self.i)
        step.shared.append(SharedRows(rows, size, begins))
        return rows
