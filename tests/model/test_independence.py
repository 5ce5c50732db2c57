"""Operators outside of attention that mix tokens are found in a trace, and the model is refused by their name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend import cache, independence
from hpcdecode.model.frontend.independence import check_independence, example_weight
from hpcdecode.model.frontend.meta import Meta, meta
from hpcdecode.model.frontend.trace import Trace, trace
from tests.support.models import ARCHITECTURES

aten = torch.ops.aten


def flipped(graph: fx.Graph, x: fx.Node, trace: Trace) -> fx.Node:
    return graph.call_function(aten.flip.default, (x, [1]))


def centred(graph: fx.Graph, x: fx.Node, trace: Trace) -> fx.Node:
    return graph.call_function(aten.sub.Tensor, (x, graph.call_function(aten.mean.dim, (x, [1], True))))


def summed(graph: fx.Graph, x: fx.Node, trace: Trace) -> fx.Node:
    return graph.call_function(aten.cumsum.default, (x, 1))


def with_neighbour(graph: fx.Graph, x: fx.Node, trace: Trace) -> fx.Node:
    return graph.call_function(aten.roll.default, (x, [1], [1]))


def scaled_by_longest(graph: fx.Graph, x: fx.Node, trace: Trace) -> fx.Node:
    longest = graph.call_function(aten.max.default, (trace.positions,))
    return graph.call_function(aten.mul.Tensor, (x, graph.call_function(aten.gt.Scalar, (longest, 512))))


MIXING = {"flip": flipped, "sub": centred, "cumsum": summed, "roll": with_neighbour, "mul": scaled_by_longest}


@pytest.fixture(scope="module", params=["llama3", "qwen3_moe"])
def traced(request) -> Callable[[], Trace]:
    config = ARCHITECTURES[request.param]()
    made = trace(config, torch.bfloat16)
    return lambda: made


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused_by_name(name, traced):
    made = traced()
    check_independence(made)
    x = next(n for n in made.graph.nodes if n.target is aten.linear.default and meta(n).token_dim == 1)
    users = list(x.users)
    with made.graph.inserting_before(users[0]):
        mixed = MIXING[name](made.graph, x, made)
    mixed.meta = dict(x.meta)
    for user in users:
        user.replace_input_with(x, mixed)
    try:
        with pytest.raises(UserError, match=rf"not supported: aten\.{name}.* mixes tokens outside of attention"):
            check_independence(made)
    finally:
        mixed.replace_all_uses_with(x)
        made.graph.erase_node(mixed)
    check_independence(made)


def test_large_weights_are_not_made(traced, monkeypatch):
    """Those of projections never are, and those of other products are not if they are large."""
    made = traced()
    monkeypatch.setattr(independence, "LARGE", 1)
    asked: list[fx.Node] = []
    monkeypatch.setattr(independence, "example_weight", lambda node: asked.append(node) or example_weight(node))
    linear = next(n for n in made.graph.nodes if n.target is aten.linear.default and meta(n).token_dim == 1)
    x, weight = linear.args[:2]
    with made.graph.inserting_before(linear):
        turned = made.graph.call_function(aten.t.default, (weight,))
        turned.meta["about"] = Meta.of(meta(weight).dtype, meta(weight).shape[::-1])
        product = made.graph.call_function(aten.matmul.default, (x, turned))
    product.meta = dict(linear.meta)
    linear.replace_all_uses_with(product)
    try:
        check_independence(made)
    finally:
        product.replace_all_uses_with(linear)
        made.graph.erase_node(product)
        made.graph.erase_node(turned)
    assert asked and all(len(meta(node).shape) < 2 for node in asked)


def test_a_refused_trace_is_not_kept(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("HPCDECODE_CACHE", str(tmp_path))

    def refuse(trace: Trace) -> None:
        raise UserError("mixes tokens")

    monkeypatch.setattr(cache, "check_independence", refuse)
    with pytest.raises(UserError, match="mixes tokens"):
        load_split(checkpoint("llama2"), dtype="float32", weights=False)
    assert not list(tmp_path.iterdir())
