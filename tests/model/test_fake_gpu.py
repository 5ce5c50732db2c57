"""Slices of every architecture run on tensors of a GPU that is not there: all that they make is there too."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.split import split
from tests.support.models import ARCHITECTURES

GPU = torch.device("cuda", 0)
SIZES = {"T": 11, "L": 4}
READ_BACK = (DataDependentOutputException, DynamicOutputShapeException)


def fake(about: Meta) -> torch.Tensor:
    return torch.empty([SIZES.get(n, n) for n in about.shape], dtype=about.dtype, device=GPU)


def devices(graph: fx.Graph) -> set[torch.device]:
    """Run a graph on tensors of the GPU and return where its results are."""
    with FakeTensorMode():
        given = [fake(node.meta["about"]) for node in graph.nodes if node.op == "placeholder"]
        found = fx.GraphModule({}, graph)(*given)
    return {each.device for each in tree_leaves(found) if isinstance(each, torch.Tensor)}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_slices_run_on_a_gpu_that_is_not_there(checkpoint, name):
    """Operators of tensors of two devices would be refused. Experts, which are lowered later, read their choices."""
    graphs = [group.graph for group in split(cached_trace(checkpoint(name), torch.bfloat16), GPU).groups]
    ran = 0
    for graph in graphs:
        if any(node.target is expert_linear for node in graph.nodes):
            with pytest.raises(READ_BACK):
                devices(graph)
            continue
        assert devices(graph) == {GPU}
        ran += 1
    assert ran >= 1  # if all layers have experts, the first slice


def test_a_tensor_of_another_device_is_refused():
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["about"] = Meta.of(torch.float32, ("T", 4))
    graph.output((graph.call_function(torch.add, (node, graph.call_function(torch.ones, (11, 4)))),))
    with pytest.raises(RuntimeError, match="device"):
        devices(graph)
