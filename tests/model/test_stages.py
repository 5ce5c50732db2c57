"""Layers are dealt out to stages so that the largest stage is smallest."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.stages import stages_of


def parts_of(sizes):
    """A split model whose slices have weights of these sizes."""
    graph, slices = fx.Graph(), []
    for i, size in enumerate(sizes):
        node = graph.placeholder(f"w{i}")
        node.meta["about"] = Meta.of(torch.float32, (size,))
        slices.append(SimpleNamespace(weights=(node,)))
    attends = [SimpleNamespace(target=None) for _ in sizes[1:]]  # of which none attends to what another chose
    return SimpleNamespace(slices=slices, trace=SimpleNamespace(attends=attends))


def largest(sizes, ends):
    runs = [sizes[a:b] for a, b in zip((0, *ends), (*ends, len(sizes) - 1), strict=True)]
    return max(sum(run) + (sizes[-1] if i == len(runs) - 1 else 0) for i, run in enumerate(runs))


@pytest.mark.parametrize("sizes", [[5, 1, 1, 1, 1, 9], [1, 2, 3, 4, 5, 6, 0], [7, 1, 1, 7, 1], [3, 3, 3, 3, 3, 3, 20]])
def test_the_largest_stage_is_as_small_as_it_can_be(sizes):
    layers = len(sizes) - 1
    for count in range(1, layers + 1):
        found = stages_of(parts_of(sizes), count)
        assert [i for stage in found for i in stage] == list(range(layers)) and all(len(stage) for stage in found)
        best = min(largest(sizes, ends) for ends in combinations(range(1, layers), count - 1))
        assert largest(sizes, [stage.stop for stage in found[:-1]]) == best


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="--pp 4: expected 1 to 3, the layers of the model, got 4"):
        stages_of(parts_of([1, 1, 1, 1]), 4)


def test_a_stage_has_its_layers_alone(checkpoint):
    stages = [load_split(checkpoint("llama3"), dtype="float32", part=ModelPart(pp=2, pp_rank=i)) for i in range(2)]
    assert [i for stage in stages for i in stage.layers] == list(range(len(stages[0].attends)))
    assert [stage.ends for stage in stages] == [False, True] and not any(stage.whole for stage in stages)
    with pytest.raises(KeyError):
        stages[1].slice(0, None, (torch.tensor([5]), torch.tensor([0]), torch.tensor([0])))
