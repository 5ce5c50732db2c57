"""Units: joined labels, and how they are dealt out; the deal of real traces, against transformers' own plans."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import transformers

from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.deal import Deal, Dealt, Undealable, dealt, in_blocks
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.units import Units, components
from tests.support.models import ARCHITECTURES

REPLICATED = [0]


def units(labels: Units, *tensors: torch.Tensor) -> list[list[int]]:
    labels.settle()
    return [labels.of(x).tolist() for x in tensors]


def test_joined_labels_are_one_unit():
    labels = Units()
    a, b, c = (labels.fresh((4,)) for _ in range(3))
    labels.join(a, b)
    labels.join(b.flip(0), c)
    one, other, third = units(labels, a, b, c)
    assert one == other == third[::-1] and len(set(one)) == 4


def test_what_is_joined_with_replicated_columns_is_replicated():
    labels = Units()
    a, b, c = (labels.fresh((2, 2)) for _ in range(3))
    labels.join(a, b)
    labels.replicate(b[:1])
    assert units(labels, a[0], c[0])[0] == REPLICATED * 2 and 0 not in units(labels, a[1], c)[1]
    assert labels.whole(a[0]) and not labels.whole(a)


def test_rows_are_united():
    labels = Units()
    heads = labels.fresh((3, 5))
    labels.unite(heads)
    (found,) = units(labels, heads)
    assert [len(set(found[i : i + 5])) for i in (0, 5, 10)] == [1, 1, 1] and len(set(found)) == 3


def test_a_source_goes_with_its_copies_or_everywhere():
    labels = Units()
    source, heads = labels.fresh((2, 1)), labels.fresh((2, 4))
    labels.unite(heads)
    labels.copy(source, heads)  # one value a head
    everywhere = labels.fresh((1, 4))
    labels.copy(everywhere, heads)  # one for all heads
    ones, spread, of_heads = units(labels, source, everywhere, heads)
    assert ones == of_heads[::4] and spread == REPLICATED * 4


def test_components_are_those_of_networkx():
    import networkx as nx

    generator = np.random.default_rng(0)
    for count, edges in ((1, 0), (50, 20), (200, 190), (300, 900)):
        a, b = generator.integers(0, count, (2, edges))
        graph = nx.Graph(list(zip(a.tolist(), b.tolist(), strict=True)))
        graph.add_nodes_from(range(count))
        expected = {node: min(part) for part in nx.connected_components(graph) for node in part}
        assert components(count, a, b).tolist() == [expected[node] for node in range(count)]


@pytest.mark.parametrize(
    ("count", "members", "sizes"),
    [(128, 4, [32] * 4), (96, 2, [48, 48]), (48, 2, [32, 16]), (10, 4, [3, 2, 3, 2]), (50257, 2, [25136, 25121])],
)
def test_units_are_dealt_in_blocks(count, members, sizes):
    owners = in_blocks(count, members)
    assert np.bincount(owners).tolist() == sizes and (np.diff(owners) >= 0).all()


def test_a_tensor_is_dealt_along_one_dimension_or_not_at_all():
    columns = np.repeat([0, 1], 4)
    found = dealt(np.broadcast_to(columns[:, None], (1, 8, 3)), 2)
    assert found is not None and found.dim == 1 and found.ranges(1) == ((4, 8),)
    assert dealt(np.full((2, 3), -1), 2) is None
    for owners in (np.stack([columns, 1 - columns]), columns[:4], np.zeros((2, 2))):
        with pytest.raises(Undealable):
            dealt(owners, 2)


def test_own_slices_are_even_or_refused():
    pairs = Dealt(0, np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    assert pairs.slice(1, slice(0, None, 2)) == slice(0, 3, 2)
    assert pairs.slice(0, slice(0, 4)) == slice(0, 2, 1)
    assert pairs.counts(1, [4, 4]) == [2, 2] and pairs.ranges(0) == ((0, 2), (4, 6))
    for wrong in (slice(0, 2), slice(0, 0)):  # member 1 has nothing of it
        with pytest.raises(Undealable):
            pairs.slice(1, wrong)
    with pytest.raises(Undealable):  # its places 0, 1, 3 and 4
        Dealt(0, np.array([0, 1, 0, 0, 0, 1, 1, 1, 0])).slice(0, slice(0, None, 2))


def projections(trace: Trace, members: int) -> dict[str, str]:
    """How each projection is dealt out, by its name without the number of its layer."""
    deal, found = Deal(trace, members), {}
    for linear in deal.projections.values():
        name = re.sub(r"\.\d+\.", ".*.", trace.weights[linear.weight]).removesuffix(".weight").removeprefix("model.")
        kind = "row" if linear.x in deal.of else "column" if linear.node in deal.of else "whole"
        assert found.setdefault(name, kind) == kind
    return found


PLANS = {"colwise": "column", "packed_colwise": "column", "rowwise": "row"}
PLANS |= {"colwise_gather_output": "column", "rowwise_split_input": "row"}  # Phi-3's, which gathers between the two
WHOLE = ("gate", "router", "q_a_proj", "kv_a_proj_with_mqa")  # routers, and low-rank projections before a norm


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_projections_are_dealt_as_transformers_plans(name, checkpoint):
    path = checkpoint(name)
    found, plan = projections(cached_trace(path, torch.float32), 2), read_config(path).base_model_tp_plan or {}
    planned = {key: PLANS[kind] for key, kind in plan.items() if key in found and kind in PLANS}
    assert planned.items() <= found.items()
    assert len(planned) >= 4 or name in ("opt", "gpt2", "gpt_oss")  # without a plan, or one without projections
    assert found.pop("lm_head") == "column"
    assert {key for key, kind in found.items() if kind == "whole"} == {k for k in found if k.endswith(WHOLE)}


def test_kv_heads_that_cannot_be_dealt_evenly_stay_whole(checkpoint):
    found = projections(cached_trace(checkpoint("llama3"), torch.float32), 4)  # two KV heads
    assert {kind for key, kind in found.items() if "self_attn" in key} == {"whole"}
    assert {kind for key, kind in found.items() if "mlp" in key} == {"column", "row"}


def test_known_plans_are_still_those_of_transformers():
    """Where transformers gains a plan, it is to be compared as well."""
    for kind in ("OPT", "GPT2"):
        assert getattr(transformers, f"{kind}Config")().base_model_tp_plan is None
