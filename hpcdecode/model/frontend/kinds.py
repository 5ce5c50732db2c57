"""Trace one decoder layer of each kind, and mark where layers like it run.

While a model is traced, the first two layers of a kind run as they are, between marker operators. Each later one is a
single operator, `again`, on the tensors that the model hands it. `expand.py` checks that the first two came out alike,
and puts copies of the first in the place of the others.

Layers are of one kind if their modules are equal, attribute by attribute, and if their arguments are equal, too. The
values of tensors are not compared. If this cannot be shown, LayersDiffer is raised and the model is traced whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hpcdecode.model.frontend.indexers import EVERY_TOKEN
from hpcdecode.model.frontend.module_form import ModuleForm, argument_form, module_form

TRACED = 2  # layers of a kind
INDEX_NAMES = ("layer_idx", "layer_id")  # attributes that hold a layer's index
Forward = Callable[..., object]


class LayersDiffer(Exception):
    """Layers are not known to be alike."""


class OpaqueIndex:
    """Stand in for a layer's index while it is traced; any use raises LayersDiffer.

    A layer that computes with its index is like no other.
    """


def _refuse_use(self: OpaqueIndex, *_: object) -> None:
    raise LayersDiffer("a layer computes with its index")


_OPERATORS = "eq ne lt le gt ge hash bool int float index str repr format add radd sub rsub mul rmul neg truediv"
for _name in (*_OPERATORS.split(), "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "call", "iter"):
    setattr(OpaqueIndex, f"__{_name}__", _refuse_use)


@functools.cache
def define() -> None:
    """Define the marker operators `enter`, `leave` and `again` for torch, once.

    `enter` and `leave` surround a layer that is traced. `leave` takes the layer's output, its inputs after it has run,
    and the result of `enter`, which took the inputs before. `again` stands for a layer like another: its output has the
    form of the input number `form`. `like` is the first layer of the kind.
    """
    schemas = {
        "enter": "(Tensor[] inputs, int layer) -> Tensor",
        "leave": "(Tensor out, Tensor[] inputs, Tensor entered, int layer, int like) -> Tensor",
        "again": "(Tensor[] inputs, int layer, int like, int form) -> Tensor",
    }
    fakes: dict[str, Callable[..., Tensor]] = {"enter": _entered, "leave": _left, "again": _repeated}
    for name, schema in schemas.items():
        marker = torch.library.custom_op(f"hpcdecode::{name}", _never, mutates_args=(), schema=schema)
        marker.register_fake(fakes[name])


def _entered(inputs: Sequence[Tensor], layer: int) -> Tensor:
    return inputs[0].new_empty(0)


def _left(out: Tensor, inputs: Sequence[Tensor], entered: Tensor, layer: int, like: int) -> Tensor:
    return empty_copy(out)


def _repeated(inputs: Sequence[Tensor], layer: int, like: int, form: int) -> Tensor:
    return empty_copy(inputs[form])


def _never(*_: object) -> Tensor:
    raise NotImplementedError("a marker of the tracer is never run")


def empty_copy(like: Tensor) -> Tensor:
    """Return a new tensor, uninitialised, with the shape, strides, dtype and device of `like`."""
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)


class CallForm(NamedTuple):
    """A layer and its arguments, without the values of tensors.

    Attributes:
        module: Form of the layer.
        tree: Nesting of the arguments.
        leaves: Form of each argument.
    """

    module: ModuleForm
    tree: TreeSpec
    leaves: list[object]


@dataclass
class LayerKind:
    """Layers that are alike.

    Attributes:
        call: Form of the call that they have in common.
        first: Index of the first of them.
        seen: Number of them that have run.
        form: Number of the input whose form the output has.
        others: What they return behind their output.
        out_tree: Nesting of what they return; None until one has run.
    """

    call: CallForm
    first: int
    seen: int = 0
    form: int = 0
    others: Sequence[object] = ()
    out_tree: TreeSpec | None = None


class LayerKinds:
    """The decoder layers of a model, and which of them are of one kind.

    Args:
        model: Model that will be traced.
        decoder: The part of it that has the layers.
        layers: Number of its layers.

    Attributes:
        name: Name of the list of layers in the model, such as model.layers.
        layers: The modules of that list.

    Raises:
        LayersDiffer: If the model has not one list of its layers, or if layers share tensors.
    """

    def __init__(self, model: torch.nn.Module, decoder: torch.nn.Module, layers: int):
        self.name, self.layers = layer_list(model, decoder, layers)
        check_own_tensors(model, self.name)
        self._model = model
        self._known: list[LayerKind] = []
        self._last = -1
        self._forms: list[ModuleForm] = []

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Let layers stand in for each other inside the block. Raise LayersDiffer if running them has changed them."""
        define()
        indices = [(m, n, i) for i, layer in enumerate(self.layers) for m, n in index_attributes(layer, i)]
        opaque = OpaqueIndex()
        for module, name, _ in indices:
            setattr(module, name, opaque)
        self._forms = [module_form(layer) for layer in self.layers]
        for i, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._run, i, layer.forward)
        begun = self._model.register_forward_pre_hook(self._begin)
        try:
            yield
        finally:
            begun.remove()
            for layer in self.layers:
                del layer.__dict__["forward"]
            changed = self._forms != [module_form(layer) for layer in self.layers]
            for module, name, i in indices:
                setattr(module, name, i)
        if changed:
            raise LayersDiffer("a layer keeps something as it runs")

    def _begin(self, *_: object) -> None:
        """Begin anew: the tracer may run the model more than once."""
        self._known.clear()
        self._last = -1

    def _run(self, i: int, forward: Forward, *args: object, **kwargs: object) -> object:
        if i <= self._last:
            raise LayersDiffer("a layer runs again, with the weights that it has")
        self._last = i
        leaves, tree = tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        kind = self._kind(i, CallForm(self._forms[i], tree, [argument_form(x) for x in leaves]))
        kind.seen += 1
        if kind.seen > TRACED and kind.out_tree is not None:
            again = torch.ops.hpcdecode.again(inputs, i, kind.first, kind.form)
            return tree_unflatten([again, *kind.others], kind.out_tree)
        entered = torch.ops.hpcdecode.enter(inputs, i)
        outs, tree = tree_flatten(forward(*args, **kwargs))
        after = tree_flatten((args, kwargs))[0]
        if len(after) != len(leaves) or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise LayersDiffer("a layer changes its arguments")
        forms = [argument_form(x) for x in inputs]
        out, *others = outs
        if not isinstance(out, Tensor) or not set(others) <= {None, EVERY_TOKEN}:
            raise LayersDiffer("a layer's output is not one tensor")
        if (form := argument_form(out)) in forms:  # else every layer of the kind is traced, such as one of embeddings
            kind.form, kind.others, kind.out_tree = forms.index(form), others, tree
        return tree_unflatten([torch.ops.hpcdecode.leave(out, inputs, entered, i, kind.first), *others], tree)

    def _kind(self, i: int, call: CallForm) -> LayerKind:
        """Return the kind of layer `i`, which is called as `call` says; a new one if it is like none before."""
        for kind in self._known:
            if kind.call == call:
                return kind
        self._known.append(LayerKind(call, i))
        return self._known[-1]


def layer_list(model: torch.nn.Module, decoder: torch.nn.Module, layers: int) -> tuple[str, torch.nn.ModuleList]:
    """Return name in `model` and modules of the only outermost list of `layers` modules in `decoder`, a part of it.

    Raises LayersDiffer if there is none.
    """
    inside = set(decoder.modules())
    found: list[tuple[str, torch.nn.ModuleList]] = []
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, torch.nn.ModuleList) and module in inside and len(module) == layers and not inner:
            found.append((name, module))
    if len(found) != 1 or len(set(map(id, found[0][1]))) != layers:
        raise LayersDiffer(f"expected one list of {layers} layers")
    return found[0]


def check_own_tensors(model: torch.nn.Module, name: str) -> None:
    """Raise LayersDiffer if a layer of the list `name` shares a parameter or a buffer with any other module."""
    own: set[int] = set()
    counts: Counter[int] = Counter()
    for each in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for key, tensor in each:
            counts[id(tensor)] += 1
            if key.startswith(f"{name}."):
                own.add(id(tensor))
    if any(counts[key] > 1 for key in own):
        raise LayersDiffer("layers share tensors")


def index_attributes(layer: torch.nn.Module, index: int) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield the modules of `layer`, and those of their attributes that hold the layer's `index`."""
    for module in layer.modules():
        for name in INDEX_NAMES:
            value = module.__dict__.get(name)
            if type(value) is int and value == index:
                yield module, name
