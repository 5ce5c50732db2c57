"""Attention over latents: found in the graph of any model, and the same logits as with expanded K and V."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from hpcdecode.model import load_split
from hpcdecode.model.frontend.absorb import absorb
from hpcdecode.model.frontend.head_linear import head_linear
from hpcdecode.model.frontend.ops import AttendArguments
from hpcdecode.model.frontend.shard import member_trace
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.trace import Trace, trace
from hpcdecode.model.frontend.trace_file import StoredTrace, restored, stored
from tests.support.members import random_weights, run_members
from tests.support.models import VOCAB
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
RANK, SHARED = 24, 8  # of those models, shrunken
aten = torch.ops.aten


@pytest.mark.parametrize("name", LATENT)
def test_logits_equal_transformers(name, tmp_path):
    whole = save_whole(tiny(name), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    for shape in model.attends:
        assert (shape.kv_heads, shape.k_dim, shape.v_dim, shape.q_heads) == (1, RANK + SHARED, RANK, 4)
    assert logits_difference(model, whole) < 1e-5


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_logits_by_other_instructions(isa, tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    whole = save_whole(tiny("deepseek_v3"), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "olmoe"])
def test_what_is_no_smaller_stays_as_it_is(name):
    made = trace(tiny(name), torch.float32)
    before = str(made.graph)
    assert not any(absorb(made)) and str(made.graph) == before and len(made.attends) == 3


def test_latents_that_do_not_halve_what_is_stored_stay_expanded():
    """K and V have 4 * (24 + 16) = 160 columns."""
    for rank, smaller in ((72, True), (73, False)):
        made = trace(tiny("minicpm3", kv_lora_rank=rank), torch.float32)
        assert absorb(made) == [smaller] * 3


@functools.cache
def stored_trace() -> StoredTrace:
    return stored(trace(tiny("deepseek_v3"), torch.float32))


def latent_trace() -> Trace:
    """Return a trace that is a test's own."""
    return restored(stored_trace())


def test_a_bias_or_a_function_between_latent_and_heads_is_not_linear():
    for change in (biased, squared):
        made = latent_trace()
        call = AttendArguments.of(made.attends[1])
        up = next(n for n in before(call.k) if n.target is aten.linear.default)
        change(made.graph, up)
        assert absorb(made) == [True, False, True]


def before(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node needs, nearest first."""
    found, waiting = [], [node]
    while waiting:
        each = waiting.pop(0)
        found.append(each)
        waiting += [n for n in each.all_input_nodes if n not in found]
    return found


def biased(graph: fx.Graph, up: fx.Node) -> None:
    up.args = (*up.args, next(n for n in graph.nodes if n.op == "placeholder"))


def squared(graph: fx.Graph, up: fx.Node) -> None:
    with graph.inserting_after(up):
        made = graph.call_function(aten.mul.Tensor, (up, up))
    made.meta = dict(up.meta)
    up.replace_all_uses_with(made)
    made.args = (up, up)


@pytest.mark.parametrize(("name", "members"), [("deepseek_v2", 2), ("glm4_moe_lite", 4)])
def test_members_attend_over_the_latent_each_with_its_heads(name, members):
    whole = trace(tiny(name), torch.float32)
    weights, ids = random_weights(whole), torch.randint(2, VOCAB, (12,), generator=torch.manual_seed(1))
    ((expected,), _) = run_members([whole], weights, ids)
    own = [member_trace(whole, members, member) for member in range(members)]
    smaller = 4 // members * (24 + 16) / 2 >= RANK + SHARED
    for each in own:
        assert absorb(each) == [smaller] * 3
        each.graph.lint()
        call = AttendArguments.of(each.attends[0])
        assert (call.q_heads, call.kv_heads) == (4 // members, 1 if smaller else 4 // members)
    parts, _ = run_members(own, weights, ids)
    made = parts[0] if parts[0].shape == expected.shape else torch.cat(parts, -1)
    assert (made - expected).abs().max() < 1e-5 * expected.abs().max()


def test_weights_of_heads_are_made_once():
    """Slices take them as they are; no slice indexes a weight of the checkpoint."""
    made = latent_trace()
    absorb(made)
    graphs = [group.graph for group in split(made, torch.device("cpu")).groups]
    targets = [node.target for graph in graphs for node in graph.nodes]
    assert targets.count(head_linear) == 2 * 3 and aten.index_select.default not in targets


def test_heads_in_plain_torch():
    x, weight = torch.randn(5, 3 * 7), torch.randn(3, 4, 7)
    wanted = torch.einsum("nhi,hoi->nho", x.view(5, 3, 7), weight).flatten(1)
    torch.testing.assert_close(head_linear(x, weight), wanted)
    torch.testing.assert_close(torch.ops.hpcdecode.head_linear(x, weight), wanted)
    assert head_linear(x[:0], weight).shape == (0, 12)
