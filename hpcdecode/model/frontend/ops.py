"""The operators that stand for attention, a layer of experts, and a sum over the members of a group in a trace."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from hpcdecode.errors import UserError
from hpcdecode.model.frontend.compressors import take_compressed_rows
from hpcdecode.model.frontend.experts import expert_linear, projected, run_experts
from hpcdecode.model.frontend.indexers import EVERY_TOKEN, take_indexer_rows
from hpcdecode.model.frontend.llama4 import OWN_CHUNK, chunk_size
from hpcdecode.model.frontend.nodes import as_float, as_int, as_node, as_nodes
from hpcdecode.model.frontend.score_rows import ScoreRows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "hpcdecode"  # of both implementations in transformers' registries

# Arguments transformers passes to an attention function that do not change its result for causal decoding.
HARMLESS = {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "layer_idx"}
HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
HARMLESS |= {"logits_to_keep"}

PLAIN = 9  # arguments of attend without these
# The last arguments of attend: no indexer, no chunks, no entries, no biases.
NO_MORE: tuple[Argument, ...] = (0, 0, 0, None, False, 0, None, 1, 0, None, None, False, None)
OF_SCORES = 4  # the last ones of these
IN_CHUNKS: tuple[Argument, ...] = (0, 0, 0, None, True)


class AttentionModule(Protocol):
    """What is read of a transformers attention module."""

    config: PreTrainedConfig


class AttendArguments(NamedTuple):
    """Arguments of `hpcdecode::attend`.

    Attributes:
        q: Queries, [T, q_heads * k_dim].
        k: Keys, [T, kv_heads * k_dim].
        v: Values, [T, kv_heads * v_dim], or no columns if they are the first columns of k.
        q_heads: Number of query heads.
        kv_heads: Number of KV heads.
        scale: Factor of q.k.
        window: Number of positions that a token sees, itself included; None for all.
        softcap: Limit of the scores, or None.
        sinks: One logit per query head, [q_heads], or None.
        index_topk: Tokens that an indexer chooses, or 0 if there is none.
        index_heads: Heads of the indexer; 0 where the choice of the attention before is taken.
        index_dim: Elements of an index query head, if index queries and weights are columns of q, behind the others,
            and the index key is of k; else 0.
        index_rows: Index queries [T, heads * dim], head weights [T, heads] and index keys [T, dim], if they are not.
        chunked: Whether a token sees the positions of its own chunk of `window` positions alone.
        compress_rate: Tokens of a compressed entry, of which all that are complete are seen beside the window, or those
            that the indexer chooses; 0 if there are none. Entries are columns of k, behind the key, unless `entry` is
            given.
        entry: Entries as of each token, [T, k_dim], if they are not columns of k.
        index_pool: Tokens that the indexer chooses together, by the index key of the last one.
        index_local: If positive, these are blocks, of which every KV head attends to so many of the last, and to those
            that the index head of its number chooses. There are no head weights.
        profiles: Profiles over distances that are mixed into biases of scores, [dim, extent], or None. Of
            [dim, 0] all are minus the distance.
        mixes: What mixes them, [T, q_heads * dim], if it is not columns of q, behind the queries.
        row_sinks: Whether every token brings sinks.
        sink_rows: These, [T, q_heads], if they are not columns of q, behind those of `mixes`.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    q_heads: int
    kv_heads: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: fx.Node | None
    index_topk: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_rows: tuple[fx.Node, ...] = ()
    chunked: bool = False
    compress_rate: int = 0
    entry: fx.Node | None = None
    index_pool: int = 1
    index_local: int = 0
    profiles: fx.Node | None = None
    mixes: fx.Node | None = None
    row_sinks: bool = False
    sink_rows: fx.Node | None = None

    @property
    def score_rows(self) -> list[fx.Node]:
        """Return those of `rows` that change scores."""
        return [n for n in (self.mixes, self.sink_rows) if n is not None]

    @property
    def dealt_rows(self) -> list[fx.Node]:
        """Return those of `rows` behind v of which every KV head has its own: queries of blocks, and `score_rows`."""
        return [*self._block_queries, *self.score_rows]

    @property
    def _block_queries(self) -> list[fx.Node]:
        return list(self.index_rows[:1]) if self.index_local else []

    @property
    def shared_rows(self) -> list[fx.Node]:
        """Return those of `rows` that all heads share: the other ones of an indexer, and entries."""
        return [*self.index_rows[len(self._block_queries) :], *([] if self.entry is None else [self.entry])]

    @property
    def rows(self) -> list[fx.Node]:
        """Return the tensors of which every token brings a row."""
        return [self.q, self.k, self.v, *self.dealt_rows, *self.shared_rows]

    @classmethod
    def of(cls, attend: fx.Node) -> AttendArguments:
        """Return the arguments of the call `attend`."""
        q, k, v, q_heads, kv_heads, scale, window, softcap, sinks, *more = attend.args
        topk, heads, dim, rows, chunked, rate, entry, pool, local, *of_scores = (*more, *NO_MORE[len(more) :])
        profiles, mixes, row_sinks, sink_rows = of_scores
        return cls(
            q=as_node(q),
            k=as_node(k),
            v=as_node(v),
            q_heads=as_int(q_heads),
            kv_heads=as_int(kv_heads),
            scale=as_float(scale),
            window=None if window is None else as_int(window),
            softcap=None if softcap is None else as_float(softcap),
            sinks=None if sinks is None else as_node(sinks),
            index_topk=as_int(topk),
            index_heads=as_int(heads),
            index_dim=as_int(dim),
            index_rows=() if rows is None else tuple(as_nodes(rows)),
            chunked=bool(chunked),
            compress_rate=as_int(rate),
            entry=None if entry is None else as_node(entry),
            index_pool=as_int(pool),
            index_local=as_int(local),
            profiles=None if profiles is None else as_node(profiles),
            mixes=None if mixes is None else as_node(mixes),
            row_sinks=bool(row_sinks),
            sink_rows=None if sink_rows is None else as_node(sink_rows),
        )


@functools.cache
def register() -> None:
    """Define both operators, and enter them in transformers' registries, once."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    define()
    AttentionInterface.register(NAME, _attention)
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


@functools.cache
def define() -> None:
    """Define `hpcdecode::attend`, `hpcdecode::expert_linear` and `hpcdecode::member_sum` for torch, once."""
    attend = torch.library.custom_op(
        "hpcdecode::attend",
        _attend_elsewhere,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v, int q_heads, int kv_heads, float scale, int? window, float? softcap, "
        "Tensor? sinks, int index_topk=0, int index_heads=0, int index_dim=0, Tensor[]? index_rows=None, "
        "bool chunked=False, int compress_rate=0, Tensor? entry=None, int index_pool=1, "
        "int index_local=0, Tensor? profiles=None, Tensor? mixes=None, bool row_sinks=False, "
        "Tensor? sink_rows=None) -> Tensor",
    )
    attend.register_fake(_attended)
    experts = torch.library.custom_op(
        "hpcdecode::expert_linear",
        expert_linear,
        mutates_args=(),
        schema="(Tensor x, Tensor expert, Tensor weight, Tensor? bias, bool transposed, int first=0) -> Tensor",
    )
    experts.register_fake(projected)
    member_sum = torch.library.custom_op(
        "hpcdecode::member_sum",
        _summed_elsewhere,
        mutates_args=(),
        schema="(Tensor x, Tensor? expert=None, int experts=0, bool own_rows=False) -> Tensor",
    )
    member_sum.register_fake(lambda x, *_: torch.empty_like(x))


def _attend_elsewhere(*_: object) -> Tensor:
    raise NotImplementedError("attend marks where a traced model is cut; it is never run")


def _summed_elsewhere(*_: object) -> Tensor:
    raise NotImplementedError("member_sum marks where the members of a group add up; it is never run")


def _attended(q: Tensor, k: Tensor, v: Tensor, q_heads: int, kv_heads: int, *_: object) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[1] // kv_heads * q_heads)


def _attention(
    module: AttentionModule, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call attend with the arguments of transformers' attention interface.

    Args:
        module: Attention module of the layer.
        query: Queries, [1, q_heads, T, k_dim].
        key: Keys, [1, kv_heads, T, k_dim].
        value: Values, [1, kv_heads, T, v_dim].
        attention_mask: A mask other than None is refused.
        kwargs: Scale, window, softcap, sinks and biases, and what some models pass besides.

    Returns:
        The output [1, T, q_heads, v_dim], and None for the attention weights.
    """
    scale, window, softcap, sinks = (kwargs.pop(k, None) for k in ("scaling", "sliding_window", "softcap", "s_aux"))
    dtype = module.config.dtype
    of_scores = _of_scores(kwargs, dtype)
    refuse_unknown_arguments(module, attention_mask, kwargs)
    tokens, q_heads, kv_heads = query.shape[2], query.shape[1], key.shape[1]
    q, k = (x.transpose(1, 2).reshape(tokens, -1).to(dtype) for x in (query, key))
    v = k if value is key else value.transpose(1, 2).reshape(tokens, -1).to(dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    if attention_mask is OWN_CHUNK:
        window = chunk_size(module.config)
    more = _more_arguments(module, attention_mask, dtype)
    if of_scores:
        more += (*NO_MORE[len(more) : -OF_SCORES], *of_scores)
    o: Tensor = torch.ops.hpcdecode.attend(q, k, v, q_heads, kv_heads, scale, window, softcap, sinks, *more)
    return o.reshape(1, tokens, q_heads, value.shape[-1]).to(value.dtype), None


def _of_scores(kwargs: dict[str, Any], dtype: Any) -> tuple[Any, ...]:
    """Take from the arguments of attention what changes scores, and return it as attend takes it, or nothing."""
    if not isinstance(kwargs.get("position_bias"), ScoreRows):
        return ()
    biases, sinks = kwargs.pop("position_bias"), kwargs.pop("sinks", None)
    return biases.profiles, biases.mixes.to(dtype), sinks is not None, None if sinks is None else sinks.to(dtype)


def _more_arguments(module: AttentionModule, attention_mask: object, dtype: Any) -> tuple[Any, ...]:
    """Return the last arguments of attend: what the layer's indexer and its compressor computed, and chunks."""
    chosen, compressed = take_indexer_rows(module), take_compressed_rows()
    if attention_mask is OWN_CHUNK:
        return IN_CHUNKS
    if compressed is not None:
        rows = [row.to(dtype) for row in compressed.index_rows]
        return compressed.topk, compressed.heads, 0, rows, False, compressed.rate, compressed.entry.to(dtype)
    if chosen is None:
        return ()
    rows = [row.to(dtype) for row in chosen.rows]
    return chosen.topk, chosen.heads, 0, rows, False, 0, None, chosen.pool, chosen.local


def refuse_unknown_arguments(module: AttentionModule, attention_mask: object, kwargs: Mapping[str, object]) -> None:
    """Raise UserError if an argument would change the result of attention and attend does not take it."""
    name = type(module).__name__
    if not any(attention_mask is known for known in (None, EVERY_TOKEN, OWN_CHUNK)):
        raise UserError(f"{name} builds an attention mask of its own, which the R-part does not apply: not supported")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UserError(f"{name} attends in both directions; only causal (decoder) attention is supported")
    for key, value in kwargs.items():
        if key not in HARMLESS and value is not None and value is not False and value is not EVERY_TOKEN:
            raise UserError(f"{name} passes {key!r} to its attention, which attend does not carry: not supported")
