"""A step of rows that decode, from the first attention to the last, in one native call: for a process of both roles.

Threads take blocks of rows through all layers, attention included, each at its own pace, so none waits for another and
attention, which is bound by memory, meets the products of other threads, which are not. Only where every slice between
two attentions is a single chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from hpcdecode import _ops_cpu
from hpcdecode.attention.base import KvCache
from hpcdecode.attention.cpu import CpuKvCache
from hpcdecode.model.frontend.meta import meta
from hpcdecode.model.lower.chain import Chain, Link, assemble, source
from hpcdecode.model.lower.stage import TokenRows
from hpcdecode.model.run.load import SplitModel

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)
UNEVEN = (
    1.25  # the most that a thread's sequences may hold of the mean, where long ones are attended by one thread each
)


class Unwalkable(Exception):
    """A slice is more than a chain."""


class FusedStep:
    """The layers of `model` between its first slice and its last, and the attention of `store`."""

    def __init__(self, model: SplitModel, store: CpuKvCache):
        """Raises Unwalkable."""
        self.model, self.store = model, store
        self.sinks = [model.sinks(i) for i in range(len(model.attends))]
        links: list[Link] = []
        self.weights: list[tuple[Any, Tensor]] = []
        qkv, names = "qkv", [("context", i) for i in range(len(model.parts.slices[0].context))]
        self.rows: dict[Any, TokenRows] = {}  # of the context's tensors
        layers = len(model.attends)
        for i in range(1, layers):
            links.append(self._attention(i - 1, qkv, ("o", i - 1)))
            step = Between(model, i)
            qkv, names = step.join(links, self.weights, self.rows, ("o", i - 1), names)
        links.append(self._attention(layers - 1, qkv, "o"))
        self.context = names  # after the last slice but one
        made = [name for name in names if name[0] != "context"]
        read = {name for link in links for name in link.reads}
        self.taken = [name for name in self.rows if name[0] == "context" and name in read]
        self.made = list(dict.fromkeys(made))
        weights = [name for name, _ in self.weights]
        self.native = assemble(links, ["qkv", *self.taken, *self.made, "o", *weights])
        self.places = [tensor.data_ptr() for _, tensor in self.weights]

    def _attention(self, layer: int, qkv: Any, o: Any) -> Link:
        size = self.model.attends[layer].out_columns * self.model.dtype.itemsize
        return Link(_ops_cpu.Attention(layer), (qkv,), {o: size})

    @staticmethod
    def of(model: SplitModel, store: KvCache) -> FusedStep | None:
        """None where the model or the store does not allow it."""
        if not isinstance(store, CpuKvCache) or len(store.node_free_blocks) > 1 or model.device.type != "cpu":
            return None
        try:
            return FusedStep(model, store)
        except Unwalkable:
            return None

    def suits(self, lengths: Sequence[int]) -> bool:
        """Whether a step of sequences of so many tokens is worth it: threads have about as much to attend to."""
        threads = torch.get_num_threads()
        held = np.array([sum(lengths[i::threads]) for i in range(threads)])
        return bool(threads <= self.store.threads and held.max() <= UNEVEN * held.mean())

    def run(self, slots: np.ndarray, qkv: Tensor, context: tuple[Tensor, ...]) -> tuple[Tensor, tuple, float]:
        """From the first slice's qkv [T, row_columns] and context to the last attention's output and the context of the
        last slice; and the seconds of attention. slots: int32 [T], the sequences' in the store, extended by the step.
        """
        count, dtype = len(qkv), str(self.model.dtype).removeprefix("torch.")
        o = self.model.empty_output(len(self.sinks) - 1, count)
        taken = [self.rows[name].rows_of(context[name[1]], count) for name in self.taken]
        made = [self.rows[name].fresh(count) for name in self.made]
        rows = [(qkv, qkv.stride(0) * qkv.element_size()), *taken, *made, (o, o.stride(0) * o.element_size())]
        pointers = [x.data_ptr() for x, _ in rows] + self.places
        steps = [step for _, step in rows] + [0] * len(self.places)
        attention = self.store.step_attention(slots, dtype, self.sinks)
        self.native.run(count, torch.get_num_threads(), pointers, steps, attention.address)
        new = {name: self.rows[name].shaped(x, count) for name, (x, _) in zip(self.made, made, strict=True)}
        after = tuple(new[name] if name in new else context[name[1]] for name in self.context)
        return o, after, attention.seconds


class Between:
    """Slice `i` of a model, between two attentions, as links of a chain."""

    def __init__(self, model: SplitModel, i: int):
        self.i, self.part = i, model.parts.slices[i]
        graph, self.weights = model.graph(i), model.weights(i)
        self.inputs = [n for n in graph.nodes if n.op == "placeholder"]
        chains = [n for n in graph.nodes if isinstance(n.target, Chain)]
        if len(chains) != 1 or not all(isinstance(w, Tensor) for w in self.weights):
            raise Unwalkable
        self.call, self.chain = chains[0], chains[0].target
        self.results = list(graph.output_node().args[0])

    def join(
        self, links: list[Link], weights: list, rows: dict[Any, TokenRows], o: Any, context: list
    ) -> tuple[Any, list[Any]]:
        """Append this slice's links; returns the names of its qkv and of the context after it."""
        tensors = self.inputs[: len(self.inputs) - len(self.weights)]
        names = dict(zip(tensors, [o, *(context[j] for j in self.part.take)], strict=True))
        names.update((n, ("weight", self.i, j)) for j, n in enumerate(self.inputs[len(tensors) :]))
        weights += [(names[n], w.contiguous()) for n, w in zip(self.inputs[len(tensors) :], self.weights, strict=True)]
        inside = {}
        for inner, arg in zip(self.chain.given, self.call.args, strict=True):
            node = self._seen_through(arg)
            inside[inner] = names[node]
            if names[node][0] == "context":
                rows[names[node]] = TokenRows(meta(node))
        for link in self.chain.links:
            reads = tuple(inside.get(name, (self.i, name)) for name in link.reads)
            links.append(Link(link.work, reads, {(self.i, name): size for name, size in link.writes.items()}))
        new = [self._output(n) for n in self.results[3:]]
        rows.update((name, self.chain.outputs[at]) for name, at in new)
        after = [context[j] if j >= 0 else new[~j][0] for j in self.part.give]
        return self._joined(), after

    def _seen_through(self, node: fx.Node) -> fx.Node:
        """The input that `node` is, or is the same rows of."""
        while node.target in VIEWS:
            before, about = meta(node.args[0]), meta(node)
            if before is None or about is None or not (TokenRows(before).leads and TokenRows(about).leads):
                raise Unwalkable
            node = node.args[0]
        if node not in self.inputs:
            raise Unwalkable
        return node

    def _output(self, node: fx.Node) -> tuple[Any, int]:
        """The name of a result of the chain, and which it is."""
        call, at = source(node)
        if call is not self.call:
            raise Unwalkable
        return (self.i, self.chain.made[at]), at

    def _joined(self) -> Any:
        """What q, k and v are the columns of, from first to last."""
        begin, whole = 0, self.results[0].args[0]
        for part in self.results[:3]:
            if part.target is not aten.narrow.default or part.args[:3] != (whole, 1, begin):
                raise Unwalkable
            begin += part.args[3]
        name, at = self._output(whole)
        if self.chain.outputs[at].elements != begin:
            raise Unwalkable
        return name
