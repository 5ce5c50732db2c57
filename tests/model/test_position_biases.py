"""Models whose scores have biases by distance, and those that bypass transformers' attention interface."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx

from hpcdecode.attention.shapes import LayerShape, PositionBias
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import load_split
from hpcdecode.model.frontend import trace_file
from hpcdecode.model.frontend.meta import TOKENS, Meta
from hpcdecode.model.frontend.own_attentions import halving_slopes, interleaved_slopes
from hpcdecode.model.frontend.token_dims import PRODUCTS, separate_tokens
from hpcdecode.model.frontend.trace import trace
from hpcdecode.model.run.load import ModelPart
from tests.support.biased import BIASED, BYPASSING
from tests.support.whole_models import logits_difference, save_whole

aten = torch.ops.aten


@pytest.mark.parametrize(
    "name",  # the one with loops has a graph for every pass and layer, which takes a minute
    [pytest.param(n, marks=pytest.mark.full) if n == "inkling2_loop" else n for n in (*BIASED, *BYPASSING)],
)
def test_logits_are_those_of_transformers(name, tmp_path):
    whole = save_whole((BIASED | BYPASSING)[name](), tmp_path)
    if "falcon" in name:
        # The other implementation adds linear biases twice.
        whole = type(whole).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    model = load_split(tmp_path, dtype="float32")
    assert logits_difference(model, whole) < 1e-4
    assert model.max_positions == {"bloom": None, "falcon_alibi": 2048, "mpt": 1024}.get(name, model.max_positions)
    attends = [s for s in model.attends if isinstance(s, LayerShape)]
    assert all((s.bias is not None) == (name in BIASED) for s in attends)
    assert all(s.row_sinks == name.startswith("inkling2") for s in attends)


@pytest.mark.parametrize("name", ["inkling", "inkling2", "bloom"])
def test_a_restored_trace_is_the_trace(name):
    made = trace(BIASED[name](), torch.bfloat16)
    again = trace_file.restored(trace_file.stored(made))
    assert trace_file.stored(again) == trace_file.stored(made)


def test_profiles_are_those_of_the_checkpoint(tmp_path):
    whole = save_whole(BIASED["inkling"](), tmp_path)
    model = load_split(tmp_path, dtype="float32")
    shapes = [s for s in model.attends if isinstance(s, LayerShape)]
    for layer, shape in zip(whole.model.layers, shapes, strict=True):
        profiles = layer.self_attn.rel_logits_proj.proj.detach().numpy()
        np.testing.assert_array_equal(shape.bias.values(), profiles)
    assert [s.bias.extent for s in shapes] == [40, 48, 40, 40, 48]


@pytest.mark.parametrize("heads", range(1, 72))
def test_slopes_are_those_of_transformers(heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes = halving_slopes(heads).float()
    torch.testing.assert_close(slopes, _get_alibi_slopes(heads, torch.device("cpu")))
    falcon = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes.bfloat16().float(), falcon)
    mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(interleaved_slopes(heads).float(), mpt)


def test_a_partition_by_head_is_refused():
    shape = LayerShape(2, 16, 16, 4, 0.25, bias=PositionBias(2, 0))
    with pytest.raises(UserError, match="--partition request"):
        Partition("head", 2).check([shape])
    Partition("request", 2).check([shape])


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_tokens_and_weights_are_projections(turned):
    """What x @ W.T and bmm compute is what linear does, whose results do not depend on how many tokens there are."""
    graph = fx.Graph()
    x, weight, experts = (graph.placeholder(name) for name in ("x", "weight", "experts"))
    shapes = {x: (2, TOKENS, 8), weight: (6, 8), experts: (2, 6, 8)}
    read = {weight: weight, experts: experts}
    if turned:
        for node, dims in ((weight, [1, 0]), (experts, [0, 2, 1])):
            read[node] = graph.call_function(aten.permute.default, (node, dims))
    else:
        shapes |= {weight: (8, 6), experts: (2, 8, 6)}
    one = graph.call_function(aten.matmul.default, (x, read[weight]))
    several = graph.call_function(aten.bmm.default, (x, read[experts]))
    graph.output((one, several))
    sizes = {**shapes, read[weight]: (8, 6), read[experts]: (2, 8, 6), one: (2, TOKENS, 6), several: (2, TOKENS, 6)}
    for node, shape in sizes.items():
        node.meta["about"] = Meta.of(torch.float32, shape if node not in read or not turned else shapes[node])
    values = [torch.randn([5 if size == TOKENS else size for size in shapes[node]]) for node in (x, weight, experts)]
    before = fx.GraphModule({}, graph)(*values)
    separate_tokens(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets.count(aten.linear.default) == 3 and not PRODUCTS & set(targets)
    assert (aten.transpose.int in targets) != turned
    torch.testing.assert_close(fx.GraphModule({}, graph)(*values), before)


@pytest.mark.parametrize("name", ["inkling", "inkling2", "bloom"])
def test_members_have_heads_of_their_own(name, checkpoint):
    model = load_split(checkpoint(name), dtype="float32", weights=False, part=ModelPart(2, 1, 1, 0, False))
    whole = load_split(checkpoint(name), dtype="float32", weights=False)
    for own, all_heads in zip(model.attends, whole.attends, strict=True):
        if isinstance(own, LayerShape):
            assert (own.kv_heads, own.q_heads) == (all_heads.kv_heads // 2, all_heads.q_heads // 2)
            assert (own.bias, own.row_sinks) == (all_heads.bias, all_heads.row_sinks)
