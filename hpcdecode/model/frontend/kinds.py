"""Trace one decoder layer of each kind: layers that are alike but for their weights stand in for each other.

While a model is traced, the first two layers of a kind run as they are, between marker operators; each later one is a
single operator, `again`, on the tensors that the model hands it. `expand.py` checks that the two came out alike and
puts copies of the first in the place of the others. Layers are of one kind if their modules are equal, attribute by
attribute, and are called with equal arguments but for the values of tensors. Whatever this cannot vouch for raises
Unlike, and the model is traced whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

TRACED = 2  # layers of a kind
INDEX_NAMES = ("layer_idx", "layer_id")  # attributes that hold a layer's place
SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Unlike(Exception):
    """Layers are not known to be alike."""


class Unread:
    """Stands in for a layer's place while it is traced: a layer that looks at its place is like no other."""


def _looked_at(self: Unread, *_: Any) -> Any:
    raise Unlike("a layer computes with its place")


_OPERATORS = "eq ne lt le gt ge hash bool int float index str repr format add radd sub rsub mul rmul neg truediv"
for _name in (*_OPERATORS.split(), "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "call", "iter"):
    setattr(Unread, f"__{_name}__", _looked_at)


@functools.cache
def define() -> None:
    """Define the marker operators `enter`, `leave` and `again` for torch, once.

    enter and leave surround a layer that is traced: leave has the layer's output, its inputs once it has run, and what
    enter returned, which has the inputs before. again stands for a layer like another; its output has the form of the
    input of that number. like is the first layer of the kind.
    """
    schemas = {
        "enter": "(Tensor[] inputs, int layer) -> Tensor",
        "leave": "(Tensor out, Tensor[] inputs, Tensor entered, int layer, int like) -> Tensor",
        "again": "(Tensor[] inputs, int layer, int like, int form) -> Tensor",
    }
    fakes = {
        "enter": lambda inputs, layer: inputs[0].new_empty(0),
        "leave": lambda out, inputs, entered, layer, like: fresh(out),
        "again": lambda inputs, layer, like, form: fresh(inputs[form]),
    }
    for name, schema in schemas.items():
        marker = torch.library.custom_op(f"hpcdecode::{name}", _never, mutates_args=(), schema=schema)
        marker.register_fake(fakes[name])


def _never(*_: Any) -> Tensor:
    raise NotImplementedError("a marker of the tracer is never run")


def fresh(like: Tensor) -> Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)


@dataclass
class Kind:
    """Layers that are alike.

    about: what they have in common. first: place of the first. met: how many have run. form: number of the input whose
    form the output has. out_tree: what the output is the leaf of.
    """

    about: tuple
    first: int
    met: int = 0
    form: int = 0
    out_tree: Any = None


class Kinds:
    """The decoder layers of a model, and which of them are of one kind.

    name: of their list in the model, such as model.layers.
    """

    def __init__(self, model: torch.nn.Module, layers: int):
        """Raises Unlike if the model has not one list of its `layers` layers, or if they share tensors."""
        self.name, self.layers = layer_list(model, layers)
        check_own_tensors(model, self.name)
        self._known: list[Kind] = []
        self._last = -1
        self._signatures: list[tuple] = []

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Let layers stand in for each other inside the block. Raises Unlike if running them has changed them."""
        define()
        places = [(m, n, i) for i, layer in enumerate(self.layers) for m, n in indexed(layer, i)]
        skipped_queries = Unread()
        for module, name, _ in places:
            setattr(module, name, skipped_queries)
        self._signatures = [signature(layer) for layer in self.layers]
        for i, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._run, i, layer.forward)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.__dict__["forward"]
            changed = self._signatures != [signature(layer) for layer in self.layers]
            for module, name, i in places:
                setattr(module, name, i)
        if changed:
            raise Unlike("a layer keeps something as it runs")

    def _run(self, i: int, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if i <= self._last:
            self._known.clear()  # the tracer runs the model more than once
        self._last = i
        leaves, tree = tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        about = (self._signatures[i], tree, [described(x) for x in leaves])
        kind = next((kind for kind in self._known if kind.about == about), None)
        if kind is None:
            kind = Kind(about, i)
            self._known.append(kind)
        kind.met += 1
        if kind.met > TRACED:
            return tree_unflatten([torch.ops.hpcdecode.again(inputs, i, kind.first, kind.form)], kind.out_tree)
        entered = torch.ops.hpcdecode.enter(inputs, i)
        outs, kind.out_tree = tree_flatten(forward(*args, **kwargs))
        after = tree_flatten((args, kwargs))[0]
        if len(after) != len(leaves) or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise Unlike("a layer changes its arguments")
        if len(outs) != 1 or not isinstance(outs[0], Tensor) or described(outs[0]) not in map(described, inputs):
            raise Unlike("a layer's output is not one tensor of the form of its input")
        kind.form = [described(x) for x in inputs].index(described(outs[0]))
        return tree_unflatten([torch.ops.hpcdecode.leave(outs[0], inputs, entered, i, kind.first)], kind.out_tree)


def layer_list(model: torch.nn.Module, layers: int) -> tuple[str, torch.nn.ModuleList]:
    """Return name and modules of the only outermost list of `layers` modules; raises Unlike if there is none."""
    found: list[tuple[str, torch.nn.ModuleList]] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers and not inner:
            found.append((name, module))
    if len(found) != 1 or len(set(map(id, found[0][1]))) != layers:
        raise Unlike(f"expected one list of {layers} layers")
    return found[0]


def check_own_tensors(model: torch.nn.Module, name: str) -> None:
    """Raise Unlike if a layer of the list `name` shares a parameter or a buffer with whatever else."""
    own, counts = set(), Counter()
    for each in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for key, tensor in each:
            counts[id(tensor)] += 1
            if key.startswith(f"{name}."):
                own.add(id(tensor))
    if any(counts[key] > 1 for key in own):
        raise Unlike("layers share tensors")


def indexed(layer: torch.nn.Module, place: int) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield the modules of `layer` and the attributes of theirs that hold the layer's `place`."""
    for module in layer.modules():
        for name in INDEX_NAMES:
            value = module.__dict__.get(name)
            if type(value) is int and value == place:
                yield module, name


def signature(module: torch.nn.Module) -> tuple:
    """Return what modules must have in common to compute the same of their tensors: class and attributes, deeply."""
    named = (*module._parameters.items(), *module._buffers.items())
    tensors = [(name, t if t is None else (tuple(t.shape), t.stride(), t.dtype)) for name, t in named]
    others = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
    inner = [(name, None if m is None else signature(m)) for name, m in module._modules.items()]
    return id(type(module)), tensors, value_of(others), inner


def value_of(attribute: Any) -> Any:
    """Return `attribute` as plain data if it is that or a function of such arguments, else which object it is."""
    if isinstance(attribute, SCALARS):
        return type(attribute), repr(attribute)
    if type(attribute) in (list, tuple):
        return type(attribute), [value_of(v) for v in attribute]
    if isinstance(attribute, dict):
        return type(attribute), [(value_of(k), value_of(v)) for k, v in attribute.items()]
    if type(attribute) in (set, frozenset):
        return type(attribute), sorted(repr(value_of(v)) for v in attribute)
    if type(attribute) is functools.partial:
        return type(attribute), id(attribute.func), value_of(attribute.args), value_of(attribute.keywords)
    return type(attribute), id(attribute)


def described(leaf: Any) -> Any:
    """Return what arguments must have in common: of tensors shape, strides and dtype."""
    if isinstance(leaf, Tensor):
        return "tensor", str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype, str(leaf.device), type(leaf)
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return "symbol", str(leaf)
    return value_of(leaf)
