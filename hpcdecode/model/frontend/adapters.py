"""LoRA adapters that stay apart from the weights: each token is updated by the adapter of its own sequence.

A projection y = W x of the trace becomes y + B_a (A_a x) for tokens that have an adapter a. All adapters' A lie in one
tensor, and all B, with zeros where an adapter has a lower rank or does not update the weight. A member of a group that
has some outputs of W has those of B; one that has some inputs has those of A, and the sum over members adds up all.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.lora import LoraUpdate, read_updates
from hpcdecode.model.frontend.membership import WeightCut
from hpcdecode.model.frontend.meta import TOKENS, Meta, tensor_meta
from hpcdecode.model.frontend.nodes import as_node
from hpcdecode.model.frontend.plausible import check_values
from hpcdecode.model.frontend.sources import Sources
from hpcdecode.model.frontend.trace import Trace

aten = torch.ops.aten
RANK_STEP = 16  # ranks are multiples of it in memory
ROWS_AT_ONCE = 16


class Projected(NamedTuple):
    """A projection of tokens by a weight: its node, and that of its input [..., in]."""

    node: fx.Node
    x: fx.Node


def lora_update(y: Tensor, x: Tensor, adapters: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y + B_a (A_a x) for tokens that have an adapter a, and y for the others.

    A token's bits do not depend on others: sums are those of single rows on CPUs.

    Args:
        y: Result of a projection, [..., T, out] without other tokens.
        x: Its input, [..., T, in].
        adapters: The tokens' adapters, int64 [T], -1 for none.
        a: A of every adapter, [adapters, rank, in].
        b: B of every adapter times its scale, [adapters, out, rank].
    """
    made, rows = y.reshape(len(adapters), -1).clone(), x.reshape(len(adapters), -1)
    for adapter in adapters.unique().tolist():
        if adapter < 0:
            continue
        chosen = (adapters == adapter).nonzero()[:, 0]
        made[chosen] += _linear(_linear(rows[chosen], a[adapter]), b[adapter])
    return made.view(y.shape)


def with_numbers(trace: Trace, context: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the context of the first slice; if the model has adapters and no token has any, with -1 for each."""
    if trace.adapters is None or len(context) == len(trace.step_inputs):
        return context
    return *context, torch.full_like(context[0], -1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, on CPUs with sums of each row by itself."""
    if x.device.type != "cpu":
        return x @ weight.t()
    wide = weight.float()
    parts = [(part[:, None] * wide).sum(-1) for part in x.float().split(ROWS_AT_ONCE)]
    return torch.cat(parts).to(x.dtype)


def add_adapters(trace: Trace, folders: Mapping[str, str], sources: Sources) -> None:
    """Let adapters update the projections of a trace, in place.

    Args:
        trace: Trace of a whole model, or of a member of a group.
        folders: Directories of the adapters, by name; tokens name them by their places.
        sources: Which tensors of the checkpoint make up each weight of the model.

    Raises:
        UserError: If an adapter is damaged, of another model, or updates what is no projection of tokens.
    """
    of_weight: dict[str, dict[int, LoraUpdate]] = {}
    known = {name: node for node, name in trace.weights.items() if node.users}
    by_key = {key: name for name, key in sources.keys.items()}
    for number, (name, folder) in enumerate(folders.items()):
        for module, update in read_updates(Path(folder)).items():
            stored = f"{module}.weight"
            weight = stored if stored in known else by_key.get(stored, stored)
            if weight not in known:
                raise _refused(name, folder, f"weights of the model, got {module!r:.200}, which it does not have")
            if weight in sources.ties or weight in sources.ties.values():
                raise _refused(name, folder, f"weights of one use each, got {module!r:.200}, which is tied to another")
            _check(name, folder, module, known[weight], update, trace.cuts.get(known[weight]))
            of_weight.setdefault(weight, {})[number] = update
    _insert(trace, {known[weight]: updates for weight, updates in of_weight.items()}, list(folders.items()))


def _check(name: str, folder: str, module: str, weight: fx.Node, update: LoraUpdate, cut: WeightCut | None) -> None:
    """Raise UserError unless an update fits the weight, of which there may be a part, and it projects tokens."""
    if _projected(weight) is None:
        raise _refused(name, folder, f"projections of tokens in layers, got {module!r:.200}, which is none")
    shape, own = update.shape(is_turned(weight)), tensor_meta(weight).one_token
    expected = own if cut is None else cut.whole_shape(own)
    if expected != shape:
        raise _refused(name, folder, f"{module!r:.200} of shape {list(expected)}, got an update of {list(shape)}")


def is_turned(weight: fx.Node) -> bool:
    """Return whether a weight is stored as [in, out], as layers of the class Conv1D have it."""
    return any(node.target is aten.addmm.default and node.args[2] is weight for node in weight.users)


def _projected(weight: fx.Node) -> Projected | None:
    """Return the projection that a weight has its only use in, if that is one of all tokens."""
    if len(weight.users) != 1:
        return None
    (node,) = weight.users
    if node.target is aten.linear.default and node.args[1] is weight:
        x = as_node(node.args[0])
    elif node.target is aten.addmm.default and node.args[2] is weight and not node.kwargs:
        x = as_node(node.args[1])
    else:
        return None
    about = tensor_meta(x)
    rows = about.token_dim == len(about.shape) - 2 and about.numel_per_token == about.one_token[-1]
    return Projected(node, x) if rows and about.shape[-2] == TOKENS else None


def _insert(
    trace: Trace, updates: Mapping[fx.Node, Mapping[int, LoraUpdate]], adapters: Sequence[tuple[str, str]]
) -> None:
    """Add the placeholder of tokens' adapters, and those of A and B with their updates behind each weight's use."""
    graph = trace.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        trace.adapters = graph.placeholder("adapters")
        trace.adapters.meta["about"] = Meta.of(torch.int64, (TOKENS,))
    for weight, own in updates.items():
        found = _projected(weight)
        assert found is not None, "checked before"
        rank = -(-max(update.a.shape[0] for update in own.values()) // RANK_STEP) * RANK_STEP
        turned, own_shape = is_turned(weight), tensor_meta(weight).one_token
        outputs, inputs = reversed(own_shape) if turned else own_shape
        cuts = _cuts(trace.cuts.get(weight), turned)
        name, dtype = trace.weights[weight], tensor_meta(weight).dtype
        with graph.inserting_before(trace.adapters):
            made = [graph.placeholder(f"lora_{part}_{weight.name}") for part in "ab"]
        shapes = (len(adapters), rank, inputs), (len(adapters), outputs, rank)
        for node, shape, part, cut in zip(made, shapes, "ab", cuts, strict=True):
            node.meta["about"] = Meta.of(dtype, shape)
            trace.updates[node] = partial(_read, part, own, torch.Size(shape), dtype, adapters, name, cut)
        with graph.inserting_after(found.node):
            update = graph.call_function(lora_update, (found.node, found.x, trace.adapters, *made))
        update.meta["about"] = found.node.meta["about"]
        found.node.replace_all_uses_with(update, delete_user_cb=partial(operator.is_not, update))


def _cuts(cut: WeightCut | None, turned: bool) -> tuple[WeightCut | None, WeightCut | None]:
    """Return what a member takes of A [rank, in] and of B [out, rank] beside its part of a weight; None for all."""
    if cut is None:
        return None, None
    of_outputs = cut.dim == (1 if turned else 0)
    return (None, cut._replace(dim=0)) if of_outputs else (cut._replace(dim=1), None)


def _read(
    part: str,
    updates: Mapping[int, LoraUpdate],
    shape: torch.Size,
    dtype: torch.dtype,
    adapters: Sequence[tuple[str, str]],
    name: str,
    cut: WeightCut | None,
) -> Tensor:
    """Return A of all adapters of a weight, or B times their scales; `shape` as `lora_update` takes them."""
    made = torch.zeros(shape, dtype=dtype)
    for number, update in updates.items():
        stored = update.a() if part == "a" else update.b()
        check_values(Path(adapters[number][1]), {f"lora_{part.upper()} of {name}": stored})
        stored = stored if cut is None else cut.of(stored)
        rows, columns = stored.shape
        made[number, :rows, :columns] = stored if part == "a" else stored.float() * update.scale
        if not made[number].isfinite().all():
            what = f"lora_{part.upper()} of {name}" + f" times {update.scale:.4g}, its scale" * (part == "b")
            raise _refused(*adapters[number], f"finite numbers, got others in {what}")
    return made


def _refused(name: str, folder: str, expected: str) -> UserError:
    return UserError(
        f"--lora {name}={folder}: expected {expected}; mend it, or merge it into the model for all rows by --lora DIR"
    )
