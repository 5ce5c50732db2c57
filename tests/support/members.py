"""Run the members of a group side by side in one process, each its own trace, by plain torch in float32."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor, fx

from hpcdecode.attention.states import ReferenceStateStore
from hpcdecode.model.frontend.deal import Deal
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.mixers import rows_of
from hpcdecode.model.frontend.operators import ATTEND, EXPERT_LINEAR, MEMBER_SUM
from hpcdecode.model.frontend.recurrent import RECURRENT
from hpcdecode.model.frontend.shard import trace_of
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.run.bound_slice import together
from hpcdecode.model.run.head_input import LmHeadInput
from hpcdecode.model.run.mixers import layer_shape, recurrent_weights
from hpcdecode.model.run.split_model import SplitModel
from tests.support.models import VOCAB
from tests.support.steps import Attention

aten = torch.ops.aten
TOKENS = 12


def random_weights(trace: Trace, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a trace by name, that keep activations near unit size."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for node, name in trace.weights.items():
        shape = tensor_meta(node).one_token
        noise = torch.randn(shape, generator=generator)
        if tensor_meta(node).dtype == torch.int64:  # factors and divisors of hashes, and where their tables begin
            made[name] = 20 + 9 * torch.arange(*shape) * (not name.endswith("offsets"))
        elif len(shape) < 2:
            made[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
        else:
            made[name] = noise * shape[-1] ** -0.5
    return made


def check_members(whole: Trace, members: int, *, ep: bool = False) -> list[Trace]:
    """Compare the logits of a group with those of the whole model, and return the traces of the members."""
    weights, ids = random_weights(whole), torch.randint(2, VOCAB, (TOKENS,), generator=torch.manual_seed(1))
    ((expected,), _), deal = run_members([whole], weights, ids), Deal(whole, members, ep=ep)
    traces = [trace_of(deal, member) for member in range(members)]
    parts, sums = run_members(traces, weights, ids)
    ranges, vocabulary = [own.membership.vocabulary for own in traces], expected.shape[-1]
    logits = parts[0] if len(ranges[0]) == vocabulary else torch.cat(parts, -1)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1)) and expected.std() > 0.1
    assert len(ranges[0]) == vocabulary or [i for own in ranges for i in own] == list(range(vocabulary))
    assert {own.membership.sums for own in traces} == {sums}
    return traces


@torch.no_grad()
def run_members(traces: Sequence[Trace], weights: Mapping[str, Tensor], ids: Tensor) -> tuple[list[Tensor], int]:
    """Return the logits of each member for one sequence of token ids, and the number of sums over members."""
    members = [steps(trace, weights, ids) for trace in traces]
    parts, sums = [next(member) for member in members], 0
    while not all(done for done, _ in parts):
        assert not any(done for done, _ in parts)
        total = parts[0][1]
        for _, part in parts[1:]:
            total = total + part
        parts, sums = [member.send(total) for member in members], sums + 1
    return [logits for _, logits in parts], sums


def steps(trace: Trace, weights: Mapping[str, Tensor], ids: Tensor) -> Generator[tuple[bool, Tensor], Tensor, None]:
    """Yield (False, the part of each sum), for which the total is sent; then (True, the logits)."""
    every = torch.arange(len(ids))
    values: dict[fx.Node, object] = {trace.ids: ids, trace.positions: every, trace.logits_indices: every}
    for node, name in trace.weights.items():
        cut = trace.cuts.get(node)
        values[node] = weights[name] if cut is None else cut.of(weights[name])
    values |= trace.constants
    for node in trace.graph.nodes:
        if node.op == "call_function":
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(dict(node.kwargs), values.__getitem__)
            if node.target is MEMBER_SUM:
                values[node] = yield False, args[0]
            elif node.target is ATTEND:
                q, k, v, q_heads, *rest = args
                v = v if v.shape[1] else k[:, : tensor_meta(node).one_token[1] // q_heads]  # the values are in K
                values[node] = attend(q, k, v, q_heads, *rest)
            elif node.target in RECURRENT:
                values[node] = recur(node, values)
            elif node.target is EXPERT_LINEAR:
                values[node] = expert_linear(*args)
            else:
                values[node] = node.target(*args, **kwargs)
        check_shape(node, values.get(node), len(ids))
    yield True, values[trace.logits]


def recur(mixer: fx.Node, values: dict[fx.Node, object]) -> Tensor:
    """A recurrence over one sequence."""
    rows = torch.cat([values[n] for n in rows_of(mixer)], 1)
    shape, out = layer_shape(mixer, rows.dtype), torch.empty(len(rows), tensor_meta(mixer).one_token[1])
    assert (shape.row_columns, shape.out_columns) == (rows.shape[1], out.shape[1])
    store = ReferenceStateStore([shape], [recurrent_weights(mixer, values.__getitem__)], 1)
    store.extend([0], [len(rows)])
    store.run(0, [0], [len(rows)], rows, out)
    return out


def check_shape(node: fx.Node, value: object, tokens: int) -> None:
    """The shape that the trace notes for a node is the one that it has."""
    if isinstance(value, Tensor) and "about" in node.meta:
        about = tensor_meta(node)
        names = {"T": tokens, "L": tokens}
        assert tuple(value.shape) == tuple(eval(str(s), names) for s in about.shape), node.name
        assert value.dtype == about.dtype, node.name


def attend(q, k, v, q_heads, kv_heads, scale, window, softcap, sinks) -> Tensor:
    """Causal attention of one sequence."""
    tokens, group = len(q), q_heads // kv_heads
    q = q.view(tokens, q_heads, -1).transpose(0, 1)
    k, v = (x.view(tokens, kv_heads, -1).transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scores = (q @ k.mT) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    scores = scores.masked_fill((back < 0) | (back >= (window or tokens)), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ v).transpose(0, 1).reshape(tokens, -1)


def members_logits(models: list[SplitModel], ids: list[int]) -> Tensor:
    """Logits of a sequence, in chunks, by members that lie in one process."""
    attentions = [Attention(model) for model in models]
    chunks = (range(16), range(16, 19), range(19, len(ids)))
    heads = (members_heads(models, attentions, ids, chunk) for chunk in chunks)
    return torch.cat([torch.cat([head.logits() for head in own], -1) for own in heads])


def members_heads(
    models: list[SplitModel], attentions: list[Attention], ids: list[int], chunk: range
) -> list[LmHeadInput]:
    """Where each member's last slice ends for some tokens of a sequence, by members that lie in one process."""
    positions = torch.tensor(chunk)
    every = torch.arange(len(chunk))
    outputs, contexts = [None] * len(models), [(torch.tensor(ids)[positions], positions, every)] * len(models)
    for layer in range(len(models[0].attends)):
        made = together([m.start_slice(layer, *at) for m, *at in zip(models, outputs, contexts, strict=True)], added)
        outputs = [
            attend(layer, [0] * len(chunk), positions, *rows)
            for attend, (rows, _) in zip(attentions, made, strict=True)
        ]
        contexts = [context for *_, context in made]
    given = zip(models, outputs, contexts, strict=True)
    return together([model.start_last(*at) for model, *at in given], added)


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of members' parts, in their order."""
    return torch.stack(list(parts)).sum(0)
