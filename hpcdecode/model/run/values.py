"""What a trace computes before it sees a token: the values of its static nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.held import NOT_HELD, Held
from hpcdecode.model.frontend.membership import WeightKey
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.weights import Weights, weight_key
from hpcdecode.model.lower.expanded import expands
from hpcdecode.model.lower.packed_weights import packs
from hpcdecode.model.lower.recipe import BlocksBy, ReadWeight, as_tensor


class Values:
    """Values of a trace's static nodes: weights, constants, and expressions of them.

    What is computed of constants alone is kept. What is read or computed of weights is kept until `forget_weights`.

    Args:
        trace: The trace.
        weights: Its weights by name, and parts of them if it takes parts.
        device: Device of the values.
    """

    def __init__(self, trace: Trace, weights: Mapping[WeightKey, Tensor | Stack], device: torch.device):
        self._device = device
        self._weights, self._updates = weights, trace.updates
        self._keys = {node: key for node in trace.weights if (key := weight_key(trace, node)) in weights}
        self._constant: dict[fx.Node, Tensor | Stack] = {node: c.to(device) for node, c in trace.constants.items()}
        self._of_weights: dict[fx.Node, Tensor | Stack] = {}

    def __getitem__(self, node: fx.Node) -> Tensor | Stack:
        for known in (self._constant, self._of_weights):
            if node in known:
                return known[node]
        value = self._read(node)
        constant = node.op != "placeholder" and all(n in self._constant for n in node.all_input_nodes)
        (self._constant if constant else self._of_weights)[node] = value
        return value

    def _read(self, node: fx.Node) -> Tensor | Stack:
        """Return a weight, or what is computed."""
        if node in self._updates:
            return self._updates[node]().to(self._device)
        return self._weights[self._keys[node]] if node in self._keys else self._computed(node)

    def reader(self, nodes: Sequence[fx.Node]) -> ReadWeight:
        """Return what reads or computes the value of one of `nodes`, by its number."""

        def read(number: int, blocks: BlocksBy = None) -> Tensor | Stack:
            return self[nodes[number]] if blocks is None else self.blocks(nodes[number], blocks == "column")

        return read

    def stored_as(self, node: fx.Node) -> str | None:
        """Return the key of the tensor of the checkpoint that a node is, or None if it is another value."""
        key, weights = self._keys.get(node), self._weights
        return weights.stored_as(key) if key is not None and isinstance(weights, Weights) else None

    def few_bits(self, nodes: Sequence[fx.Node]) -> tuple[Held, ...]:
        """Return what holds the numbers of weights of a quantised checkpoint in few bits, for each of them."""
        if not isinstance(self._weights, Weights):
            return (NOT_HELD,) * len(nodes)
        return tuple(self._weights.few_bits(self._keys[n]) if n in self._keys else NOT_HELD for n in nodes)

    def blocks(self, node: fx.Node, by_column: bool) -> Tensor | Stack:
        """Return the blocks of a weight whose `few_bits` are one of BLOCKS, uint8 [out, bytes]."""
        assert isinstance(self._weights, Weights), "others have no blocks"
        return self._weights.blocks(self._keys[node], by_column)

    def tensor(self, node: fx.Node) -> Tensor:
        """Return the value of a node that is one tensor."""
        return as_tensor(self[node])

    def forget_weights(self) -> None:
        """Let go of all weights and of what was computed of them."""
        self._of_weights.clear()

    def _computed(self, node: fx.Node) -> Tensor:
        if not callable(node.target):
            raise TypeError(f"expected a call, got {node.name}")
        args = fx.map_arg(node.args, self.tensor)
        kwargs = dict(fx.map_arg(dict(node.kwargs), self.tensor))
        if "device" in kwargs:
            kwargs["device"] = self._device
        with torch.no_grad():
            value: Tensor = node.target(*args, **kwargs)
        return value


def takes_form(bits: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether slices on a device take weights in a form, one of ALL_FORMS, beside activations of `dtype`."""
    return packs(dtype, bits) if device.type == "cpu" else expands(bits, 0, dtype)


def came_in(values: Values, weights: Sequence[fx.Node], device: torch.device, dtype: torch.dtype) -> tuple[Held, ...]:
    """Return what each weight came in, if there are GEMMs of it: the type of its blocks, bfloat16, float16, or None.

    Args:
        values: Of the model.
        weights: Nodes of the weights.
        device: Device of the slices.
        dtype: Of activations.
    """

    def form(name: str | None) -> str | None:
        return name if name is not None and takes_form(name, dtype, device) else None

    return tuple(Held(*map(form, names)) for names in values.few_bits(weights))
