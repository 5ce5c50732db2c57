"""Expert parallelism: members have whole experts, the whole model's logits, and read no other experts' weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError
from hpcdecode.model.frontend import experts
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.expert_rows import note_expert_rows
from hpcdecode.model.frontend.mapped import in_checkpoints
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.operators import EXPERT_LINEAR, MEMBER_SUM
from hpcdecode.model.frontend.shard import member_trace
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.frontend.weights import weight_key
from hpcdecode.model.frontend.whole_experts import feeds_same_experts
from hpcdecode.model.run.checkpoint_weights import bound_weights
from tests.support.members import check_members

aten = torch.ops.aten
EXPERTS = {"mixtral": 4, "qwen3_moe": 8, "gpt_oss": 4, "deepseek_v2": 8, "deepseek_v3": 8}
OWN_ROWS = {"mixtral": 3, "qwen3_moe": 2, "gpt_oss": 3}  # layers without shared experts, whose part is in the same sum
OWN = {2: {4: [2, 2], 8: [4, 4]}, 3: {4: [2, 1, 1], 8: [3, 3, 2]}}


def of_experts(name: str) -> bool:
    """Whether a weight is of experts that a router chooses from."""
    return ".experts." in name


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("members", OWN)
def test_members_have_the_models_logits_and_whole_experts(name, members, checkpoint):
    whole = cached_trace(checkpoint(name), torch.float32)
    experts, split, first = EXPERTS[name], members == 2, 0  # three members have the attention whole
    traces = check_members(whole, members, ep=True)
    for own, count in zip(traces, OWN[members][experts], strict=True):
        cuts = {n: own.cuts[node] for node, n in own.weights.items() if of_experts(n)}
        assert cuts and set(cuts.values()) == {(0, experts, ((first, first + count),))}
        first += count
        whole_weights = {n for node, n in own.weights.items() if node not in own.cuts}
        assert any(n.endswith((".gate.weight", ".router.weight")) for n in whole_weights)
        assert own.membership.sums == (2 if split else 1) * len(whole.attends)
        assert own.membership.sums_of_own_rows == OWN_ROWS.get(name, 0)
        if name.startswith("deepseek"):  # a dense layer and shared experts
            assert not any(".down_proj" in n for n in whole_weights)
    assert first == experts


def own_weights(path: Path) -> tuple[list[Tensor | Stack], set[str]]:
    """The weights of the experts of the second of three members, and the tensors that were read for them, by key.

    They are checked against the same part of the whole model's.
    """
    tensors, asked = open_checkpoint(path), set()

    class Noted(dict):
        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

    whole = cached_trace(path, torch.float32)
    own = member_trace(whole, 3, 1, ep=True)
    weights = bound_weights(path, Noted(tensors), whole, own, torch.device("cpu"), None)
    asked.clear()  # of shapes that were checked
    mine = {node: weights[weight_key(own, node)] for node, name in own.weights.items() if of_experts(name)}
    all_of_them = bound_weights(path, tensors, whole, whole, torch.device("cpu"), None)
    for node, weight in mine.items():
        assert torch.equal(as_one(weight), own.cuts[node].of(as_one(all_of_them[own.weights[node]])))
    return [*mine.values()], asked


def as_one(weight: Tensor | Stack) -> Tensor:
    return weight if isinstance(weight, Tensor) else torch.stack([torch.cat(pieces) for pieces in weight])


def test_only_the_members_own_experts_are_read(checkpoint):
    weights, asked = own_weights(checkpoint("qwen3_moe"))  # a tensor for every expert
    assert len(weights) == 4 and all(isinstance(w, Stack) and len(w) == 3 for w in weights)
    assert {int(key.split(".experts.")[1].split(".")[0]) for key in asked} == {3, 4, 5}


def test_of_a_tensor_of_all_experts_the_own_ones_are_used_where_they_lie(checkpoint):
    weights, _ = own_weights(checkpoint("gpt_oss"))
    matrices = [w for w in weights if w.ndim == 3]
    assert len(weights) == 12 and len(matrices) == 6 and all(len(w) == 1 for w in weights)
    starts = {w.data_ptr(): w.nbytes for w in matrices}
    assert in_checkpoints(starts) == starts


def test_rows_of_other_members_experts_are_zeros_and_cost_no_gemm(monkeypatch):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(6, 5, 4), torch.randn(6, 5), torch.randn(3, 3, 4)
    expert = torch.tensor([[0, 5, 1], [2, 0, 2], [4, 5, 2]])
    whole, rows, linear = experts.expert_linear(x, expert, weight, bias, False), [], experts.linear
    monkeypatch.setattr(experts, "linear", lambda x, *given: rows.append(len(x)) or linear(x, *given))
    parts = []
    for first, last in ((0, 2), (2, 4), (4, 6)):
        rows.clear()
        parts.append(experts.expert_linear(x, expert, weight[first:last], bias[first:last], False, first))
        own = (expert >= first) & (expert < last)
        assert torch.equal(parts[-1][own], whole[own]) and not parts[-1][~own].any() and sum(rows) == own.sum()
        stack = [(w[:2], w[2:]) for w in weight[first:last]]
        torch.testing.assert_close(experts.expert_linear(x, expert, stack, bias[first:last], False, first), parts[-1])
    assert torch.equal(sum(parts), whole)
    nothing = experts.expert_linear(x[1:2], expert[1:2], weight[3:], None, False, 3)
    assert nothing.shape == (1, 3, 5) and not nothing.any()


def sum_after(*calls):
    """A layer of experts, calls on its rows, and a sum over members."""
    graph = fx.Graph()
    x, expert, weight = (graph.placeholder(name) for name in ("x", "expert", "weight"))
    expert.meta["about"] = Meta.of(torch.int64, ("T", 2))
    y = graph.call_function(EXPERT_LINEAR, (x, expert, weight, None, False, 0))
    y.meta["about"], down = Meta.of(torch.float32, ("T", 2, 8)), y
    for target, args, shape in calls:
        y = graph.call_function(target, tuple(y if arg == "y" else arg for arg in args))
        y.meta["about"] = Meta.of(torch.float32, shape)
    total = graph.call_function(MEMBER_SUM, (y,))
    graph.output((total,))
    note_expert_rows(graph, {down: 6})
    return total.args[1:], expert


ROWS = ("T", 2, 8)
SUMMED = (aten.sum.dim_IntList, ("y", [1]), ("T", 8))


@pytest.mark.parametrize(
    ("calls", "own_rows"),
    [
        ([(aten.mul.Tensor, ("y", 2.0), ROWS), SUMMED], True),
        ([SUMMED, (aten.unsqueeze.default, ("y", 0), (1, "T", 8))], True),
        ([SUMMED, (aten.div.Tensor, ("y", 2.0), ("T", 8)), (aten._to_copy.default, ("y",), ("T", 8))], True),
        ([SUMMED, (aten.add.Tensor, ("y", 1.0), ("T", 8))], False),
        ([(aten.exp.default, ("y",), ROWS), SUMMED], False),
        ([(aten.sum.dim_IntList, ("y", [0]), (2, 8))], False),
        ([(aten.view.default, ("y", [-1, 8]), ("2*T", 8))], False),
        ([(aten.slice.Tensor, ("y", 1, 0, 1), ("T", 1, 8))], False),  # rows that are not [T, columns]
    ],
)
def test_rows_of_other_members_experts_are_not_sent_if_they_are_zeros(calls, own_rows):
    found, expert = sum_after(*calls)
    assert found == (expert, 6, own_rows)


@pytest.mark.parametrize(
    ("between", "by_rows"),
    [
        ((aten.mul.Tensor, 2), True),
        ((aten.slice.Tensor, 2, 0, 3), True),
        ((aten.slice.Tensor, 1, 0, 3), False),
        ((aten.slice.Tensor, 0, 0, 3), False),
        ((aten.cumsum.default, 0), False),
    ],
)
def test_rows_that_are_mixed_are_added_up_first(between, by_rows):
    """Between two projections of experts, only what works row by row may see rows of a member's own experts alone."""
    graph = fx.Graph()
    x, expert, weight = (graph.placeholder(name) for name in ("x", "expert", "weight"))
    weight.meta["about"] = Meta.of(torch.float32, (4, 8, 8))

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["about"] = Meta.of(torch.float32, ("T", 2, 8))
        return node

    up = call(EXPERT_LINEAR, x, expert, weight, None, False)
    target, *args = between
    down = call(EXPERT_LINEAR, call(target, up, *args), expert, weight, None, False)
    call(aten.index.Tensor, down, [expert])
    assert feeds_same_experts(up) == by_rows and not feeds_same_experts(down)


def test_a_model_that_cannot_be_dealt_so_is_refused(checkpoint):
    dense, few = (cached_trace(checkpoint(name), torch.float32) for name in ("llama2", "mixtral"))
    for members in (1, 2):
        with pytest.raises(UserError, match="--ep: expected a model with layers of experts"):
            member_trace(dense, members, 0, ep=True)
    assert member_trace(few, 1, 0, ep=True) is few
    with pytest.raises(UserError, match="--ep: expected at most 4 ranks"):
        member_trace(few, 5, 0, ep=True)
