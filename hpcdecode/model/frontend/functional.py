"""Give an exported program's operators forms without in-place writes, without tracing the program a second time.

`ExportedProgram.run_decompositions` runs the whole graph again, which takes longer than the export itself. Most models
need it for a few operators only, which are replaced here by what it makes of them. Programs with any other operator
that writes in place, or that may return its input, go through `run_decompositions`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hpcdecode.model.frontend.clean import is_contiguous, remove_dead
from hpcdecode.model.frontend.nodes import as_int, as_node, traced_tensor, traced_value

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten
SLICES = (aten.slice.Tensor, aten.alias.default)
RESHAPES = (aten.flatten.using_ints, aten.unflatten.int)
CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout)
CAST_KEYS = {"dtype", "device", "layout"}
OUT_OF_PLACE: dict[Any, OpOverload] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.scatter_.value: aten.scatter.value,
    aten.sub_.Tensor: aten.sub.Tensor,
}


class NotSimple(Exception):
    """A program has an operator that only `run_decompositions` handles."""


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return `program` without in-place operators. It may be changed, or be the result itself."""
    try:
        check(program.graph)
    except NotSimple:
        made: ExportedProgram = program.run_decompositions({})
        return made
    for node in list(program.graph.nodes):
        if (replace := REPLACED.get(node.target)) is not None:
            with program.graph.inserting_before(node):
                replace_uses(node, replace(node))
    remove_dead(program.graph)
    return program


def replace_uses(node: fx.Node, new: fx.Node) -> None:
    """Let what reads `node` read `new`, and remove `node`; what follows an in-place write reads its result, too."""
    if node.target in WRITES:
        changed = as_node(node.args[0])
        changed = as_node(changed.args[0]) if node.target is aten.copy_.default else changed
        changed.replace_all_uses_with(new, delete_user_cb=lambda user: user > node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def check(graph: fx.Graph) -> None:
    """Raise NotSimple if a call in `graph` writes in place, or may return its input, and is not handled here."""
    for node in graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotSimple(node.name)
        if not isinstance(node.target, OpOverload):
            continue
        if node.target in OUT_OF_PLACE:
            check_write(node)
        elif node.target in CASTS:
            check_cast(node)
        elif node.target is aten.copy_.default:
            check_fill(node)
        elif node.target is aten.contiguous.default:
            if len(node.args) > 1 or node.kwargs:  # another order of dimensions
                raise NotSimple(node.name)
        elif node.target in RESHAPES:
            if sum(not isinstance(size, int) for size in traced_tensor(node).shape) > 1:
                raise NotSimple(node.name)
        elif node.target is aten.dropout.default:
            if node.args[2] is not False:
                raise NotSimple(node.name)
        elif node.target not in REPLACED and (
            node.target._schema.is_mutable or (composite(node) and returns_input(node))
        ):
            raise NotSimple(node.name)


def check_cast(node: fx.Node) -> None:
    """Raise NotSimple if a cast does more than convert a tensor."""
    if len(node.args) > (3 if node.target is aten.to.device else 2) or not set(node.kwargs) <= CAST_KEYS:
        raise NotSimple(node.name)


def check_write(node: fx.Node) -> None:
    """Raise NotSimple unless `node` writes to a tensor that shares its memory with no other, and keeps its dtype."""
    written = as_node(node.args[0])
    others = [n for n in written.users if n is not node]
    if not fresh(written) or any(composite(n) or returns_input(n) for n in others):
        raise NotSimple(node.name)
    dtypes = {traced_tensor(n).dtype for n in node.all_input_nodes if isinstance(traced_value(n), Tensor)}
    floats = {dtype for dtype in dtypes if dtype != torch.int64}  # indices
    if floats != {traced_tensor(written).dtype} or not traced_tensor(written).dtype.is_floating_point:
        raise NotSimple(node.name)


def check_fill(node: fx.Node) -> None:
    """Raise NotSimple unless `node` fills a slice of a new tensor that nothing reads before all its slices are filled.

    The slice, which may be all of it, has no other use, and nothing was written to the tensor since it was taken.
    """
    view = as_node(node.args[0])
    if view.target not in SLICES or node.users or not fresh(buffer := as_node(view.args[0])):
        raise NotSimple(node.name)
    fills = {n for u in buffer.users if u.target in SLICES for n in u.users if n.target is aten.copy_.default}
    reads = [u for u in buffer.users if u < node and any(n.target is not aten.copy_.default for n in u.users)]
    if len(view.users) != 1 or reads or any(view < fill < node for fill in fills):
        raise NotSimple(node.name)


def fresh(node: fx.Node) -> bool:
    """Return whether the result of `node` is memory of its own."""
    if node.target is operator.getitem:
        node = as_node(node.args[0])
    return isinstance(node.target, OpOverload) and not composite(node) and not returns_input(node)


def composite(node: fx.Node) -> bool:
    """Return whether `node` calls an operator that torch makes of others; its schema may be silent about memory."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(node.target, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        node.target.name(), key
    )


def returns_input(node: fx.Node) -> bool:
    """Return whether a result of `node` may share memory with an argument, or an argument is written to."""
    return not isinstance(node.target, OpOverload) or any(a.alias_info for a in node.target._schema.arguments)


def cast(node: fx.Node) -> fx.Node:
    """Return the argument of a cast if it has the dtype already, else the conversion."""
    x = as_node(node.args[0])
    if traced_tensor(x).dtype == traced_tensor(node).dtype and traced_tensor(x).device == traced_tensor(node).device:
        return x
    options: dict[str, Any] = {"dtype": traced_tensor(node).dtype}
    if traced_tensor(x).device != traced_tensor(node).device:
        options["device"] = traced_tensor(node).device
    return call(node, aten._to_copy.default, (x,), options)


def reshaped(node: fx.Node) -> fx.Node:
    """Return the reshape as a view, or as a view of a copy where no view of the argument has the shape."""
    x = as_node(node.args[0])
    shape = node.args[1] if is_contiguous(x) and node.target is aten.reshape.default else known_shape(node)
    if is_contiguous(x):
        return call(node, aten.view.default, (x, shape))
    if traced_tensor(x).untyped_storage()._cdata == traced_tensor(node).untyped_storage()._cdata:
        return call(node, aten.view.default, (x, shape))
    copy = call(node, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = traced_tensor(x).clone(memory_format=torch.contiguous_format)
    return call(node, aten._unsafe_view.default, (copy, shape))


def known_shape(node: fx.Node) -> list[Any]:
    """Return the shape that a reshape asks for, with a size in the place of -1 unless it varies."""
    sizes = [size if isinstance(size, int) else -1 for size in traced_tensor(node).shape]
    asked: Any = node.args[1] if node.target is aten.reshape.default else sizes
    return [size if each == -1 else each for each, size in zip(asked, sizes, strict=True)]


def contiguous(node: fx.Node) -> fx.Node:
    """Return the argument if its memory is contiguous, else a copy whose memory is."""
    x = as_node(node.args[0])
    return x if is_contiguous(x) else call(node, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})


def argument(node: fx.Node) -> fx.Node:
    """Return the argument of what only concerns gradients."""
    return as_node(node.args[0])


def chunked(node: fx.Node) -> fx.Node:
    """Return the chunks as a split."""
    x, chunks, dim = as_node(node.args[0]), as_int(node.args[1]), as_int(node.args[2]) if len(node.args) > 2 else 0
    size = traced_tensor(x).shape[dim]
    return call(node, aten.split.Tensor, (x, -(-size // chunks), dim))


def copied(node: fx.Node) -> fx.Node:
    """Return a copy of the argument of a dropout that does nothing."""
    return call(node, aten.clone.default, (node.args[0],))


def written(node: fx.Node) -> fx.Node:
    """Return the in-place operator's result as a new tensor."""
    return call(node, OUT_OF_PLACE[node.target], node.args, node.kwargs)


def filled(node: fx.Node) -> fx.Node:
    """Return the tensor of which the in-place copy `node` fills a slice, with the slice filled."""
    view = as_node(node.args[0])
    part = call(node, aten.copy.default, node.args)
    part.meta = dict(view.meta)
    if view.target is aten.alias.default:
        return part
    whole = call(node, aten.slice_scatter.default, (view.args[0], part, *view.args[1:]))
    whole.meta = dict(as_node(view.args[0]).meta)
    return whole


def call(node: fx.Node, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Insert a call in the place of `node`, with what was noted for it."""
    new = node.graph.call_function(target, args, dict(kwargs or {}))
    new.meta = dict(node.meta)
    return new


WRITES = {*OUT_OF_PLACE, aten.copy_.default}
REPLACED: dict[Any, Callable[[fx.Node], fx.Node]] = {
    **dict.fromkeys(CASTS, cast),
    **dict.fromkeys(OUT_OF_PLACE, written),
    **dict.fromkeys((aten.reshape.default, *RESHAPES), reshaped),
    aten.contiguous.default: contiguous,
    aten.detach_.default: argument,
    aten.chunk.default: chunked,
    aten.copy_.default: filled,
    aten.dropout.default: copied,
}
